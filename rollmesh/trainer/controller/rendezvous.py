"""Where the ranks meet: their store, their process group, and the mesh that a role is handed.

    the controller binds a port, rank 0 inherits it, all join there        data, tensor = mesh axes

A head's arguments reach the ranks beside it here, in two kinds of broadcast: the call's body, which
holds handles, and then each tensor that a handle stands for, byte by byte. Those ranks need no way
to the owners, and a role never sees a call without data, whatever its rank.

Invariants: the collectives of a call are the same at all ranks of a group, in the same order: the
body says how many follow. What ranks tell each other outside of a call (`gather`) is for a plain
torchrun, where nobody leads. The store listens on the interface that was named and on no other.
Collectives have no keys: beyond loopback their network has to be the ranks' own. Driven by rank.py,
on the step thread.

The roles that a process plays: made once, called by name.

Invariants: what is imported is what the plan names, and nothing that a message says; names that
begin with an underscore are nobody's business. Driven by rank.py, and by plain.py.
"""

import datetime
import importlib
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore  # torch.distributed has it, and does not say so
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rollmesh.core.errors import ConfigError
from rollmesh.core.loopback import is_loopback
from rollmesh.core.process import listen
from rollmesh.tensors.handles import RTensor
from rollmesh.trainer.controller.answers import decode_values, fill_handles, handles_of
from rollmesh.trainer.controller.spec import RankSpec, RoleSpec, Topology
from rollmesh.trainer.models.device import resolve_device

JOIN_S = 120.0
COLLECTIVE_S = 24 * 3600.0
"""A rank may compute for long; who is stuck, or gone, the controller says."""
LOOPBACK = "lo"
"""Gloo's name of the interface; else it takes the one that the host's name resolves to."""


class RankContext(msgspec.Struct, frozen=True):
    """What a role knows of where it runs."""

    rank: int
    num_ranks: int
    mesh: DeviceMesh
    """Axes `data` (as many as heads) and `tensor` (ranks of one head)."""
    device: str

    @property
    def is_head(self) -> bool:
        return self.mesh.get_local_rank("tensor") == 0


class Rendezvous:
    """One rank's part in it."""

    def __init__(self, spec: RankSpec) -> None:
        """Rank 0 listens from now on."""
        self._spec = spec
        self._store: TCPStore | None = None
        self.address = ""
        """host:port of the store; rank 0's."""
        if spec.rank == 0:
            self._open()

    def join(self) -> RankContext:
        """Meet the others in the store that the spec names; returns when all are there."""
        topology, backend = self._spec.topology, backend_of(self._spec.device)
        bind_collectives(self._spec.meet_at)
        dist.init_process_group(
            backend,
            store=self._store or self._dial(self._spec.store),
            rank=self._spec.rank,
            world_size=topology.num_ranks,
            timeout=datetime.timedelta(seconds=COLLECTIVE_S),
        )
        return place_of(self._spec.rank, topology, self._spec.device)

    def leave(self) -> None:
        """The others do the same."""
        if dist.is_initialized():
            dist.destroy_process_group()
        self._store = None

    def _open(self) -> None:
        listening = listen(f"{self._spec.meet_at}:0", self._spec.store_fd)
        host, port = listening.getsockname()[:2]
        self.address = f"{host}:{port}"
        self._store = TCPStore(
            host,
            port,
            self._spec.topology.num_ranks,
            is_master=True,
            timeout=datetime.timedelta(seconds=JOIN_S),
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )

    def _dial(self, address: str) -> TCPStore:
        host, _, port = address.rpartition(":")
        timeout = datetime.timedelta(seconds=JOIN_S)
        return TCPStore(host, int(port), self._spec.topology.num_ranks, timeout=timeout)


def bind_collectives(address: str) -> None:
    """Where ranks meet on loopback, they talk there too, and are heard nowhere else."""
    if is_loopback(address):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)


def backend_of(device: str) -> str:
    """torch.distributed's name of it; ConfigError where there is no such device."""
    kind = resolve_device(device).type
    return "gloo" if kind == "cpu" else f"cpu:gloo,{kind}:nccl"


def place_of(rank: int, topology: Topology, device: str) -> RankContext:
    """In a process group that stands; a collective."""
    shape = (len(topology.heads()), topology.tensor_parallel)
    found = resolve_device(device, topology.num_ranks)
    mesh = init_device_mesh(found.type, shape, mesh_dim_names=("data", "tensor"))
    return RankContext(rank, topology.num_ranks, mesh, str(found))


def give(body: bytes, tensors: Sequence[Tensor], place: RankContext) -> None:
    """A head's part: `tensors` are those of the body's handles, in the order of `handles_of`."""
    _broadcast(torch.tensor([len(body)]), place)
    _broadcast(torch.frombuffer(bytearray(body), dtype=torch.uint8), place)
    for tensor in tensors:
        if tensor.numel():
            _broadcast(tensor.reshape(-1).view(torch.uint8), place)


def take(place: RankContext) -> Any:
    """The part of a rank beside it: the arguments, with tensors of its own."""
    length = torch.zeros(1, dtype=torch.int64)
    _broadcast(length, place)
    body = torch.empty(int(length), dtype=torch.uint8)
    _broadcast(body, place)
    values = decode_values(bytes(body.numpy()))
    return fill_handles(values, [_receive(each, place) for each in handles_of(values)])


def gather(body: bytes) -> list[bytes]:
    """What each of all ranks gives, at all of them."""
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(lengths, torch.tensor([len(body)]))
    longest = int(max(lengths))
    own = torch.frombuffer(bytearray(body.ljust(longest, b"\0")), dtype=torch.uint8)
    bodies = [torch.empty(longest, dtype=torch.uint8) for _ in lengths]
    dist.all_gather(bodies, own)
    return [bytes(each[: int(num)].numpy()) for each, num in zip(bodies, lengths, strict=True)]


def _receive(handle: RTensor, place: RankContext) -> Tensor:
    data = torch.empty(handle.num_bytes, dtype=torch.uint8)
    if handle.num_bytes:
        _broadcast(data, place)
    return data.view(getattr(torch, handle.dtype)).reshape(handle.shape)


def _broadcast(data: Tensor, place: RankContext) -> None:
    group = place.mesh.get_group("tensor")
    dist.broadcast(data, src=dist.get_process_group_ranks(group)[0], group=group)


class RoleRegistry:
    """See the module."""

    def __init__(self, specs: Mapping[str, RoleSpec], place: RankContext) -> None:
        """Make each at `place`; ConfigError where a spec names nothing to make one with, and
        whatever a maker raises."""
        self._roles = {name: _make(spec, place) for name, spec in specs.items()}

    def method(self, role: str, name: str) -> Callable[..., Any]:
        """ConfigError where there is none."""
        found = None if name.startswith("_") else getattr(self._roles.get(role), name, None)
        if not callable(found):
            raise ConfigError(f"no {role}.{name} here: {', '.join(self._roles) or 'no roles'}")
        method: Callable[..., Any] = found
        return method

    def fitting(
        self, role: str, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Callable[..., Any]:
        """The method, if it takes these arguments; else ConfigError."""
        method = self.method(role, name)
        try:
            inspect.signature(method).bind(*args, **kwargs)
        except TypeError as error:
            raise ConfigError(f"{role}.{name}: {error}") from None
        return method


def _make(spec: RoleSpec, place: RankContext) -> object:
    module_name, _, name = spec.make.partition(":")
    make = getattr(importlib.import_module(module_name), name, None)
    if not callable(make):
        raise ConfigError(f"{spec.make!r} is nothing to make a role with")
    return make(place, **spec.settings)
