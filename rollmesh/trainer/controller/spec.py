"""The description of a rank process: its controller, its place among the ranks, and its roles.

- All code that a rank imports and all objects that it makes are named here, on its command line or
  in its own settings file; a message names neither a module nor a file.
"""

import hashlib
import threading
from collections.abc import Callable
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

    bind: str = ""
    """Address from which others fetch its tensors; empty: a free port that faces the controller."""
    store_bytes: int = 2**30
    """Limit of the tensors in its answers."""
    buffer_bytes: int = 2**30
    """Limit of the tensors that it fetched."""
    lease_s: float = 600.0
    """Tensors of a dead controller are freed after this time."""


class Meeting(msgspec.Struct, frozen=True):
    """Where ranks join that are started elsewhere."""

    bind: str = "tcp://127.0.0.1:0"
    """Address on which the trainer listens for them."""
    publish: Callable[[str], None] = lambda _: None
    """Passes the address that they dial on to them."""
    stop: threading.Event | None = None
    """Ends the wait for them."""


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
    """Its own device, such as cuda:3."""
    num_threads: int = 1
    """torch threads."""
    plane: PlaneSpec = PlaneSpec()
    start_s: float = 120.0
    """Time for the ranks to meet."""
    beat_s: float = 0.5
    silence_s: float = 30.0
    """A rank ends if its controller is silent for this time."""
    folder: str = ""
    """Run folder, for logs; empty: stderr."""
    is_external: bool = False
    """Whether it was not started by its controller, and waits until that answers."""

    @property
    def digest(self) -> str:
        """Digest of what must be the same at all ranks: topology and roles."""
        same = msgspec.json.encode((self.topology, self.roles), order="deterministic")
        return hashlib.sha256(same).hexdigest()[:32]


def device_type(device: str) -> str:
    """The type of a torch device, such as cuda for cuda:3."""
    return device.partition(":")[0]


def rank_device(device: str, local_rank: int, num_visible: int, num_sharing: int = 1) -> str:
    """Return the own device of rank `local_rank` of a host, such as cuda:3 for `cuda`.

    Its process sees `num_visible` GPUs, as do all `num_sharing` ranks of the host that are started
    with the same environment. A rank that alone sees one GPU uses that, whatever its number. Raises
    ConfigError if there is no GPU for it.
    """
    kind, _, index = device.partition(":")
    if kind != "cuda":
        return device
    if index:
        if num_sharing == 1:
            return device
        raise ConfigError(
            f'trainer.device = "{device}" is one GPU for {num_sharing} ranks; write "cuda", which '
            "gives each rank its own"
        )
    if local_rank < num_visible:
        return f"{kind}:{local_rank}"
    if num_visible == num_sharing == 1:
        return f"{kind}:0"
    raise ConfigError(
        f"rank {local_rank} of this host has no GPU: torch finds {num_visible}; start fewer ranks "
        "here, or set CUDA_VISIBLE_DEVICES"
    )


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
