"""A process group in which rank 0 broadcasts weights to engines, formed as in SGLang.

    store: TCP at the publisher's address > prefixes by the group's name > gloo or NCCL

- It is not a process's default group, so a process may be in several, besides a trainer's.
- gloo listens only on the interface that faces the publisher.
- A wait for a peer that is gone or silent ends in WeightGroupError after at most `timeout_s`.
- Keys and prefixes are those of SGLang 0.5.21's init_custom_process_group and torch's
  _new_process_group_helper.
"""

import datetime
import socket
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import (  # torch.distributed re-exports them without declaring it
    BroadcastOptions,
    PrefixStore,
    Store,
    TCPStore,
)

from rollmesh.core.errors import EngineUnavailable

DEVICES = {"gloo": "cpu", "nccl": "cuda"}
"""Device of the tensors that each backend broadcasts."""


class WeightGroupError(EngineUnavailable):
    """A peer of the group is gone or was too slow."""


def open_store(host: str, size: int, timeout_s: float) -> TCPStore:
    """Create the store at which ranks meet; it listens at `host` on a free port."""
    timeout = datetime.timedelta(seconds=timeout_s)
    return TCPStore(host, 0, size, is_master=True, timeout=timeout, wait_for_workers=False)


def dial_store(host: str, port: int, size: int, timeout_s: float) -> TCPStore:
    """Connect to the store as a rank other than 0; WeightGroupError if it does not exist."""
    timeout = datetime.timedelta(seconds=timeout_s)
    try:
        return TCPStore(host, port, size, is_master=False, timeout=timeout)
    except (RuntimeError, ValueError) as error:
        raise WeightGroupError(f"{host}:{port}: no group is formed there: {_line(error)}") from None


class GroupShape(msgspec.Struct, frozen=True):
    """Settings that all ranks of a group share."""

    name: str
    backend: str
    timeout_s: float


class WeightGroup:
    """One rank of a group."""

    def __init__(self, store: TCPStore, rank: int, size: int, shape: "GroupShape") -> None:
        """Returns when all ranks have joined; `store` comes from open_store or dial_store."""
        self.device = torch.device(DEVICES[shape.backend])
        self._name = shape.name
        where: Store = store
        for prefix in (shape.name, f"{shape.name}/", f"{self.device.type}/"):
            where = PrefixStore(prefix, where)
        timeout = datetime.timedelta(seconds=shape.timeout_s)
        try:
            if shape.backend == "nccl":
                self._group = _nccl(where, rank, size, timeout)
            else:
                address = local_address_towards(store.host, store.port)
                self._group = _gloo(where, rank, size, timeout, address)
        except RuntimeError as error:
            why = _line(error)
            raise WeightGroupError(
                f"group {shape.name}: not all of {size} ranks joined: {why}"
            ) from None

    def broadcast(self, tensor: Tensor) -> None:
        """Broadcast from rank 0 to all, in place. Blocks."""
        options = BroadcastOptions()
        options.rootRank = 0
        try:
            self._group.broadcast([tensor], options).wait()
            if self.device.type == "cuda":
                torch.cuda.synchronize()
        except RuntimeError as error:
            raise WeightGroupError(f"group {self._name}: {_line(error)}") from None

    def receive(self, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """Return the next tensor that rank 0 broadcasts."""
        tensor = torch.empty(shape, dtype=dtype, device=self.device)
        if tensor.numel():
            self.broadcast(tensor)
        return tensor


def local_address_towards(host: str, port: int) -> str:
    """Return this machine's address on the route to another."""
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as towards:
        towards.connect(address)
        return str(towards.getsockname()[0])


def _gloo(store: Store, rank: int, size: int, timeout: datetime.timedelta, address: str) -> Any:
    kind: Any = dist.ProcessGroupGloo
    options = kind._Options()  # noqa: SLF001 - torch has no other name for it
    options._timeout = timeout  # noqa: SLF001 - nor for this
    options._devices = [kind.create_device(hostname=address)]  # noqa: SLF001 - nor for these
    return kind(store, rank, size, options)


def _nccl(store: Store, rank: int, size: int, timeout: datetime.timedelta) -> Any:
    kind: Any = getattr(dist, "ProcessGroupNCCL", None)
    if kind is None:
        raise RuntimeError("this torch has no NCCL")
    options = kind.Options()
    options._timeout = timeout  # noqa: SLF001 - as gloo's
    return kind(store, rank, size, options)


def _line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
