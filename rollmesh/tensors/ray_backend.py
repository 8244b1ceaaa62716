"""Tensors by way of Ray: for a mesh whose processes are Ray's, with no port or key of our own.

    owner's process                its machine                     a consumer, anywhere
      OwnerStore < TensorServer <--loopback-- Desk, an actor <--Ray-- RayPeers
                                              its answers --Ray's object store--> looked at in place

An owner keeps its store, with all that it promises; Ray carries. Owns the desk, one actor for each
owner, on the owner's machine and gone with it, and how a part of a fetch lies in Ray's object
store: one array, so that it costs one object however many shards it has. Invariants: what a desk
answers is data, an error never crosses as an exception that somebody unpickles; whatever Ray
reports is a TensorError. Driven by the plane (RayPeers is a Backend) and by the owner's process.
"""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeVar

import msgspec
import numpy as np
import ray
from numpy.typing import NDArray
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rollmesh.core.errors import (
    AddressError,
    ConfigError,
    FetchMismatch,
    MissReason,
    OwnerGone,
    ShardMissing,
    TensorError,
)
from rollmesh.tensors.handles import Content, RTensor, pack, unpack
from rollmesh.tensors.peers import Peers
from rollmesh.tensors.server import TensorServer
from rollmesh.tensors.store import OwnerStore

SCHEME = "ray://"
NAMESPACE = "rollmesh"
CALLS_AT_ONCE = 8
PART_BYTES = 2**26
"""Of one object; a longer shard is one alone. What comes in one is kept, and freed, together."""
PATIENCE_S = 60.0
"""With a part; the desk's own with its owner ends earlier."""
NAME_FREED_S = 10.0
"""In which Ray notices that the last bearer of a name has ended."""
_LOOPBACK = "tcp://127.0.0.1:0"
_NO_BYTES = np.empty(0, np.uint8)
_Result = TypeVar("_Result")


class DeskAnswer(msgspec.Struct, frozen=True):
    """What became of a call at a desk."""

    kind: Literal["done", "missing", "gone", "mismatch", "refused"] = "done"
    why: str = ""
    """Of a missing shard its reason."""
    shard_id: int = 0
    """The one that is missing."""


class Desk:
    """An actor on the owner's machine, who fetches from it for others."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._peers = Peers()

    def fetch(self, packed: bytes) -> tuple[bytes, NDArray[np.uint8]]:
        """A DeskAnswer as JSON, and the bytes of these packed handles, one after the other."""
        handles = unpack(packed)
        none: list[Content] = []
        answer, contents = _tried(lambda: self._peers.fetch(self._address, handles), none)
        # One array for all: Ray's object store makes one object of it, and not thousands.
        return answer, np.concatenate([_NO_BYTES, *(each.data for each in contents)])

    def take(self, shard_ids: list[int], step: int) -> tuple[bytes, None]:
        """A DeskAnswer as JSON: whether the owner holds these shards for `step` now."""
        return _tried(lambda: self._peers.take(self._address, shard_ids, step), None)

    def end_step(self, step: int) -> tuple[bytes, int]:
        """A DeskAnswer as JSON, and how many shards the owner freed with `step`."""
        return _tried(lambda: self._peers.end_step(self._address, step), 0)

    def clear(self, shard_ids: list[int]) -> tuple[bytes, int]:
        """A DeskAnswer as JSON, and how many of these shards the owner held."""
        return _tried(lambda: self._peers.clear(self._address, shard_ids), 0)


class RayServer:
    """Where consumers find an owner, in the Ray cluster that its process has joined."""

    def __init__(self, store: OwnerStore, address: str) -> None:
        """To serve `store` as `address`, ray://NAME, which no other owner of the cluster has.
        ConfigError without a cluster, AddressError where that is no name."""
        if not address.startswith(SCHEME) or address == SCHEME:
            raise AddressError(f"{address}: not a name in Ray; it is written as ray://NAME")
        _check_joined()
        self._store = store
        self._address = address
        self._server = TensorServer(store, _LOOPBACK)
        self._desk: Any = None

    def start(self) -> str:
        """Serve from now on; the address, which is the store's owner from now on. AddressError if
        the name is taken."""
        local = self._server.start()
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        options = {
            "name": self._address.removeprefix(SCHEME),
            "namespace": NAMESPACE,
            "num_cpus": 0,
            "max_concurrency": CALLS_AT_ONCE,
            "scheduling_strategy": here,
        }
        give_up_s = time.monotonic() + NAME_FREED_S
        while self._desk is None:
            try:
                self._desk = ray.remote(Desk).options(**options).remote(local)
            except ValueError as error:
                if time.monotonic() > give_up_s:
                    self._server.stop()
                    raise AddressError(f"{self._address} is taken: {error}") from None
                time.sleep(0.1)
        self._store.owner = self._address
        return self._address

    def stop(self) -> None:
        """Whoever asks is told that we are gone."""
        if self._desk is not None:
            ray.kill(self._desk)
        self._server.stop()


class RayPeers:
    """See the module; a Backend."""

    def __init__(self) -> None:
        """ConfigError where this process has joined no cluster."""
        _check_joined()
        self._desks: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._is_closed = False

    def fetch(self, owner: str, handles: list[RTensor]) -> list[Content]:
        """As Backend has it."""
        parts = [*_parts(handles)]
        answers = self._call(owner, "fetch", [(pack(part),) for part in parts])
        contents: list[Content] = []
        for part, (said, block) in zip(parts, answers, strict=True):
            _check(owner, said)
            contents += _contents(owner, part, block)
        return contents

    def take(self, owner: str, shard_ids: list[int], step: int) -> None:
        """As Backend has it."""
        self._call_once(owner, "take", shard_ids, step)

    def end_step(self, owner: str, step: int) -> int:
        """As Backend has it."""
        return int(self._call_once(owner, "end_step", step))

    def clear(self, owner: str, shard_ids: list[int]) -> int:
        """As Backend has it."""
        return int(self._call_once(owner, "clear", shard_ids))

    def close(self) -> None:
        """As Backend has it."""
        with self._lock:
            self._is_closed = True
            self._desks.clear()

    def _call_once(self, owner: str, method: str, *arguments: Any) -> Any:
        ((said, result),) = self._call(owner, method, [arguments])
        _check(owner, said)
        return result

    def _call(self, owner: str, method: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
        """What the owner's desk answers to each; once more where it was that of an earlier life."""
        try:
            return self._ask(owner, method, arguments)
        except RayActorError:
            with self._lock:
                self._desks.pop(owner, None)
        try:
            return self._ask(owner, method, arguments)
        except RayActorError as error:
            raise OwnerGone(owner, _line_of(error)) from None

    def _ask(self, owner: str, method: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
        desk = self._desk(owner)
        refs = [getattr(desk, method).remote(*each) for each in arguments]
        try:
            # One after the other, so that patience is with each part, and not with all of a fetch.
            return [ray.get(ref, timeout=PATIENCE_S) for ref in refs]
        except RayActorError:
            raise
        except GetTimeoutError:
            raise OwnerGone(owner, f"no answer within {PATIENCE_S:g} s") from None
        except RayError as error:
            raise TensorError(f"{owner} did not answer: {_line_of(error)}") from None

    def _desk(self, owner: str) -> Any:
        with self._lock:
            if self._is_closed:
                raise TensorError(f"{owner} is not asked any more: this process is closing")
            if owner not in self._desks:
                self._desks[owner] = _find(owner)
            return self._desks[owner]


def _check_joined() -> None:
    # Ray's own way with such a process is to start a cluster for it, in which nobody else is.
    if not ray.is_initialized():
        raise ConfigError("this process has joined no Ray cluster; call ray.init(ADDRESS) first")


def _find(owner: str) -> Any:
    try:
        return ray.get_actor(owner.removeprefix(SCHEME), namespace=NAMESPACE)
    except ValueError:
        raise OwnerGone(owner, "Ray knows nobody of that name") from None
    except AssertionError as error:
        # Of one whose program has just ended Ray still has the name, and not the class any more.
        raise OwnerGone(owner, f"its program has ended: {_line_of(error)}") from None


def _tried(call: Callable[[], _Result], otherwise: _Result) -> tuple[bytes, _Result]:
    """What it gives, or `otherwise`, and what became of it."""
    answer, result = DeskAnswer(), otherwise
    try:
        result = call()
    except ShardMissing as error:
        answer = DeskAnswer("missing", error.reason, error.shard_id)
    except OwnerGone as error:
        answer = DeskAnswer("gone", error.why)
    except FetchMismatch as error:
        answer = DeskAnswer("mismatch", str(error))
    except TensorError as error:
        answer = DeskAnswer("refused", str(error))
    return msgspec.json.encode(answer), result


def _check(owner: str, said: bytes) -> None:
    """The error that became of a call at a desk."""
    answer = msgspec.json.decode(said, type=DeskAnswer)
    match answer.kind:
        case "done":
            return
        case "missing":
            raise ShardMissing(answer.shard_id, owner, msgspec.convert(answer.why, MissReason))
        case "gone":
            raise OwnerGone(owner, answer.why)
        case "mismatch":
            raise FetchMismatch(answer.why)
        case "refused":
            raise TensorError(answer.why)


def _contents(owner: str, handles: list[RTensor], block: NDArray[np.uint8]) -> list[Content]:
    """The parts of what came in one object."""
    wanted = sum(handle.num_bytes for handle in handles)
    if block.nbytes != wanted:
        raise FetchMismatch(f"{wanted} bytes were asked of {owner}, {block.nbytes} came")
    contents, start = [], 0
    for handle in handles:
        stop = start + handle.num_bytes
        contents.append(Content(handle.dtype, handle.shape, block[start:stop]))
        start = stop
    return contents


def _parts(handles: list[RTensor]) -> Iterator[list[RTensor]]:
    part: list[RTensor] = []
    num_bytes = 0
    for handle in handles:
        if part and num_bytes + handle.num_bytes > PART_BYTES:
            yield part
            part, num_bytes = [], 0
        part.append(handle)
        num_bytes += handle.num_bytes
    if part:
        yield part


def _line_of(error: Exception) -> str:
    return str(error).strip().rpartition("\n")[2]  # above it stand ids, or where it was raised
