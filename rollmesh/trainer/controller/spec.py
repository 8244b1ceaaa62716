"""Which rank does what: data-parallel heads, and the ranks that compute beside them.

    rank     0 1 | 2 3 | 4 5        num_ranks = 6, tensor_parallel = 2
    group      0 |   1 |   2        one per data-parallel head
    head     0   | 2   | 4          the first of its group; 1, 3 and 5 follow theirs

Invariant: consecutive ranks form a group, and its first is its head. Pure; driven by both ends.

What a rank process is started with: where its controller is, who it is, and what roles it has.

Invariant: all that a rank makes, and all code that it imports, is named here, on its command line;
what arrives over a socket names neither a module nor a file. Driven by processes.py, which starts
ranks, and by rank.py.
"""

from typing import Any

import msgspec

from rollmesh.core.errors import ConfigError


class Topology(msgspec.Struct, frozen=True):
    """Of one controller's ranks."""

    num_ranks: int
    tensor_parallel: int = 1
    """Ranks that compute one row together."""

    def __post_init__(self) -> None:
        if self.num_ranks < 1 or self.tensor_parallel < 1 or self.num_ranks % self.tensor_parallel:
            raise ConfigError(
                f"{self.num_ranks} ranks do not divide into groups of {self.tensor_parallel}"
            )

    def heads(self) -> range:
        """The ranks that are given data."""
        return range(0, self.num_ranks, self.tensor_parallel)


class RoleSpec(msgspec.Struct, frozen=True, kw_only=True):
    """An object whose methods are called: an actor, a critic, a reference."""

    make: str
    """`package.module:callable`; called with the rank's Place and `settings`."""
    settings: dict[str, Any] = {}


class PlaneSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Of the data plane of each rank."""

    bind: str = "tcp://127.0.0.1:0"
    """Where its tensors are fetched from."""
    store_bytes: int = 2**30
    """Of what it answered with."""
    buffer_bytes: int = 2**30
    """Of what it fetched."""
    lease_s: float = 600.0
    """What a dead controller leaves behind is freed after this time."""


class RankSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Of one rank."""

    controller: str
    """tcp:// address of its hub."""
    rank: int
    secret: str = ""
    """Names this process to its controller; passed by its standard input and never on its command
    line. A rank that was started by hand has none."""
    reads_secret: bool = False
    topology: Topology
    roles: dict[str, RoleSpec]
    device: str = "cpu"
    num_threads: int = 1
    """torch threads."""
    store: str = ""
    """host:port at which the ranks meet, chosen by the controller; empty: rank 0 chooses."""
    store_fd: int | None = None
    """The listening socket of `store`, which rank 0 inherits."""
    meet_at: str = "127.0.0.1"
    """Interface on which ranks reach each other; collectives have no keys, so a network that is
    the ranks' own."""
    plane: PlaneSpec = PlaneSpec()
    beat_s: float = 0.5
    silence_s: float = 30.0
    """A controller that is not heard for so long is gone, and so is the rank then."""
    folder: str = ""
    """The run's, for logs; empty: stderr."""


def route_of(spec: RankSpec) -> str:
    """The route that its controller knows it by; only the two know it where there is a secret."""
    return f"rank-{spec.rank}-{spec.secret}" if spec.secret else f"rank-{spec.rank}"


def to_argument(spec: RankSpec) -> str:
    """Its form on the command line, without the secret."""
    public = msgspec.structs.replace(spec, secret="", reads_secret=bool(spec.secret))
    return msgspec.json.encode(public).decode()


def from_argument(text: str) -> RankSpec:
    """The inverse; ConfigError on anything else."""
    try:
        return msgspec.json.decode(text, type=RankSpec)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"--spec is no rank's: {error}") from None
