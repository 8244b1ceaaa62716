"""The description of a rank process: its controller, its place among the ranks, and its roles.

- All code that a rank imports and all objects that it makes are named here, on its command line;
  a message names neither a module nor a file.
"""

from typing import Any

import msgspec

from rollmesh.core.errors import ConfigError


class Topology(msgspec.Struct, frozen=True):
    """Data-parallel heads, and the ranks that compute beside them.

    rank     0 1 | 2 3 | 4 5        num_ranks = 6, tensor_parallel = 2
    group      0 |   1 |   2        one per data-parallel head
    head     0   | 2   | 4          the first rank of its group
    """

    num_ranks: int
    tensor_parallel: int = 1
    """Ranks that compute one row together."""

    def __post_init__(self) -> None:
        if self.num_ranks < 1 or self.tensor_parallel < 1 or self.num_ranks % self.tensor_parallel:
            raise ConfigError(
                f"{self.num_ranks} ranks do not divide into groups of {self.tensor_parallel}"
            )

    def heads(self) -> range:
        """The ranks that receive data."""
        return range(0, self.num_ranks, self.tensor_parallel)


class RoleSpec(msgspec.Struct, frozen=True, kw_only=True):
    """An object whose methods the controller calls: an actor, a critic, a reference."""

    make: str
    """`package.module:callable`; called with the RankContext and `settings`."""
    settings: dict[str, Any] = {}


class PlaneSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a rank's data plane."""

    bind: str = "tcp://127.0.0.1:0"
    """Address from which others fetch its tensors."""
    store_bytes: int = 2**30
    """Limit of the tensors in its answers."""
    buffer_bytes: int = 2**30
    """Limit of the tensors that it fetched."""
    lease_s: float = 600.0
    """Tensors of a dead controller are freed after this time."""


class RankSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that one rank process is started with."""

    controller: str
    """tcp:// address of the controller."""
    rank: int
    secret: str = ""
    """Identifies this process to its controller; passed on standard input, never on the command
    line. A rank that was started by hand has none."""
    reads_secret: bool = False
    topology: Topology
    roles: dict[str, RoleSpec]
    device: str = "cpu"
    num_threads: int = 1
    """torch threads."""
    store: str = ""
    """host:port of the ranks' rendezvous, chosen by the controller; empty: rank 0 chooses."""
    store_fd: int | None = None
    """The listening socket of `store`, which rank 0 inherits."""
    meet_at: str = "127.0.0.1"
    """Interface between the ranks. Collectives have no keys, so it must be a private network."""
    plane: PlaneSpec = PlaneSpec()
    start_s: float = 120.0
    """Time for the ranks to meet."""
    beat_s: float = 0.5
    silence_s: float = 30.0
    """A rank ends if its controller is silent for this time."""
    folder: str = ""
    """Run folder, for logs; empty: stderr."""


def route_of(spec: RankSpec) -> str:
    """The route by which the controller knows the rank; with a secret only these two know it."""
    return f"rank-{spec.rank}-{spec.secret}" if spec.secret else f"rank-{spec.rank}"


def to_argument(spec: RankSpec) -> str:
    """Encode `spec` for the command line, without the secret."""
    public = msgspec.structs.replace(spec, secret="", reads_secret=bool(spec.secret))
    return msgspec.json.encode(public).decode()


def from_argument(text: str) -> RankSpec:
    """Decode what `to_argument` returned; raise ConfigError on anything else."""
    try:
        return msgspec.json.decode(text, type=RankSpec)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"--spec is not the description of a rank: {error}") from None
