"""Where ranks meet: their store, their process group and mesh; and the roles that each makes.

    rank 0 serves a store, the controller passes on its address, all join there

- The arguments of a head reach the other ranks of its group by broadcast: first the call's body,
  which has handles, then each tensor of a handle. So those ranks need no access to owners, and a
  role never runs without data.
- The collectives of a call are the same at all ranks of a group, in the same order.
- The store and the collectives use the interface that faces the controller. They have no keys, so
  beyond loopback they need a private network.
- A rank imports what its plan names, never what a message names.
"""

import datetime
import importlib
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore  # torch.distributed does not export it
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rollmesh.core.addresses import is_loopback, split_address, with_host
from rollmesh.core.errors import ConfigError
from rollmesh.core.process import listen
from rollmesh.tensors.handles import RTensor
from rollmesh.trainer.controller.answers import decode_values, fill_handles, handles_of
from rollmesh.trainer.controller.spec import RankSpec, RoleSpec, Topology
from rollmesh.trainer.ranks import resolve_device

COLLECTIVE_S = 24 * 3600.0
"""A rank may compute for long; the controller detects ranks that are stuck or gone."""
LOOPBACK = "lo"
"""Interface for gloo, whose default is the one that the host's name resolves to."""


class RankContext(msgspec.Struct, frozen=True):
    """The rank, mesh and device of a role."""

    rank: int
    num_ranks: int
    mesh: DeviceMesh
    """Axes `data` (one entry per head) and `tensor` (the ranks of one head)."""
    device: str

    @property
    def is_head(self) -> bool:
        return self.mesh.get_local_rank("tensor") == 0


class Rendezvous:
    """One rank's part in the meeting of all ranks."""

    def __init__(self, spec: RankSpec, host: str) -> None:
        """Make rank 0 listen; `host` is the address of this machine that faces the others."""
        self._spec = spec
        self._host = host
        self._store: TCPStore | None = None
        self.address = ""
        """host:port of the store, on rank 0."""
        if spec.rank == 0:
            self._open()

    def join(self, store: str) -> RankContext:
        """Meet the others in the store of rank 0; return when all have joined."""
        topology, backend = self._spec.topology, backend_of(self._spec.device)
        bind_collectives(self._host)
        select_device(self._spec.device)
        dist.init_process_group(
            backend,
            store=self._store or self._dial(store),
            rank=self._spec.rank,
            world_size=topology.num_ranks,
            timeout=datetime.timedelta(seconds=COLLECTIVE_S),
        )
        return make_context(self._spec.rank, topology, self._spec.device)

    def leave(self) -> None:
        """Leave the process group; the other ranks do the same."""
        if dist.is_initialized():
            dist.destroy_process_group()
        self._store = None

    def _open(self) -> None:
        listening = listen(with_host(":0", self._host))
        host, port = listening.getsockname()[:2]
        self.address = with_host(f":{port}", self._host)
        self._store = TCPStore(
            host,
            port,
            self._spec.topology.num_ranks,
            is_master=True,
            timeout=datetime.timedelta(seconds=self._spec.start_s),
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )

    def _dial(self, address: str) -> TCPStore:
        host, port = split_address(address)
        timeout = datetime.timedelta(seconds=self._spec.start_s)
        return TCPStore(host, int(port), self._spec.topology.num_ranks, timeout=timeout)


def bind_collectives(host: str) -> None:
    """Restrict collectives to the interface with this address of this machine."""
    name = LOOPBACK if is_loopback(host) else interface_of(host)
    if name:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")  # exactly this one


def interface_of(host: str) -> str:
    """Name of the network interface with this address; '' if there is none."""
    wanted = host.strip("[]")
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == wanted for each in addresses):
            return name
    return ""


def backend_of(device: str) -> str:
    """torch.distributed's backend for `device`; raise ConfigError if there is no such device."""
    kind = resolve_device(device).type
    return "gloo" if kind == "cpu" else f"cpu:gloo,{kind}:nccl"


def select_device(device: str) -> None:
    """Make a rank's GPU the default of its process, as NCCL needs it; do nothing on the CPU."""
    if device.startswith("cuda"):
        torch.cuda.set_device(device)


def make_context(rank: int, topology: Topology, device: str) -> RankContext:
    """Return the context of `rank`; a collective of an existing process group."""
    shape = (len(topology.heads()), topology.tensor_parallel)
    found = resolve_device(device)
    mesh = init_device_mesh(found.type, shape, mesh_dim_names=("data", "tensor"))
    return RankContext(rank, topology.num_ranks, mesh, str(found))


def broadcast_arguments(body: bytes, tensors: Sequence[Tensor], context: RankContext) -> None:
    """Broadcast a call as its head; `tensors` are those of the body's handles, in the order of
    `handles_of`."""
    _broadcast(torch.tensor([len(body)]), context)
    _broadcast(torch.frombuffer(bytearray(body), dtype=torch.uint8), context)
    for tensor in tensors:
        if tensor.numel():
            _broadcast(tensor.reshape(-1).view(torch.uint8), context)


def receive_arguments(context: RankContext) -> Any:
    """Receive the broadcast of a head; return the arguments, with tensors of this rank."""
    length = torch.zeros(1, dtype=torch.int64)
    _broadcast(length, context)
    body = torch.empty(int(length), dtype=torch.uint8)
    _broadcast(body, context)
    values = decode_values(bytes(body.numpy()))
    return fill_handles(values, [_receive(each, context) for each in handles_of(values)])


def gather(body: bytes) -> list[bytes]:
    """Return the bodies of all ranks, on all of them."""
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(lengths, torch.tensor([len(body)]))
    longest = int(max(lengths))
    own = torch.frombuffer(bytearray(body.ljust(longest, b"\0")), dtype=torch.uint8)
    bodies = [torch.empty(longest, dtype=torch.uint8) for _ in lengths]
    dist.all_gather(bodies, own)
    return [bytes(each[: int(num)].numpy()) for each, num in zip(bodies, lengths, strict=True)]


def _receive(handle: RTensor, context: RankContext) -> Tensor:
    data = torch.empty(handle.num_bytes, dtype=torch.uint8)
    if handle.num_bytes:
        _broadcast(data, context)
    return data.view(getattr(torch, handle.dtype)).reshape(handle.shape)


def _broadcast(data: Tensor, context: RankContext) -> None:
    group = context.mesh.get_group("tensor")
    dist.broadcast(data, src=dist.get_process_group_ranks(group)[0], group=group)


class RoleRegistry:
    """The roles of a rank, made once and called by name."""

    def __init__(self, specs: Mapping[str, RoleSpec], context: RankContext) -> None:
        """Make all roles; raise ConfigError for a spec that names no callable, and anything that a
        constructor raises."""
        self._roles = {name: _make(spec, context) for name, spec in specs.items()}

    def method(self, role: str, name: str) -> Callable[..., Any]:
        """Return a public method; raise ConfigError if there is none."""
        found = None if name.startswith("_") else getattr(self._roles.get(role), name, None)
        if not callable(found):
            raise ConfigError(f"no {role}.{name} here: {', '.join(self._roles) or 'no roles'}")
        method: Callable[..., Any] = found
        return method

    def fitting(
        self, role: str, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Callable[..., Any]:
        """Return the method if it accepts these arguments; else raise ConfigError."""
        method = self.method(role, name)
        try:
            inspect.signature(method).bind(*args, **kwargs)
        except TypeError as error:
            raise ConfigError(f"{role}.{name}: {error}") from None
        return method


def _make(spec: RoleSpec, context: RankContext) -> object:
    module_name, _, name = spec.make.partition(":")
    make = getattr(importlib.import_module(module_name), name, None)
    if not callable(make):
        raise ConfigError(f"{spec.make!r} is not a callable that makes a role")
    return make(context, **spec.settings)
