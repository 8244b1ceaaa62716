"""Tensors by way of Ray, for a mesh of Ray processes, without a port or key of our own.

    owner's process                its machine                        a consumer, anywhere
      OwnerStore < TensorServer <--loopback-- OwnerActor <--Ray-- RayPeers
                                              its replies --Ray's object store--> mapped in place

- Each owner has one actor, on its machine, which ends with it.
- A part of a fetch is one array in Ray's object store, so it costs one object for many shards.
- Replies are data: an error never crosses as a pickled exception. Whatever Ray reports becomes a
  TensorError.
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
"""Size of one object; a longer shard is alone in one. The shards of an object are kept, and freed,
together."""
PATIENCE_S = 60.0
"""Timeout of one part; the actor's own call to its owner ends earlier."""
NAME_FREED_S = 10.0
"""Time for Ray to notice that the last holder of a name has ended."""
_LOOPBACK = "tcp://127.0.0.1:0"
_NO_BYTES = np.empty(0, np.uint8)
_Result = TypeVar("_Result")


class ActorReply(msgspec.Struct, frozen=True):
    """The outcome of a call to an actor."""

    kind: Literal["done", "missing", "gone", "mismatch", "refused"] = "done"
    why: str = ""
    """For a missing shard, the reason."""
    shard_id: int = 0
    """The missing shard."""


class OwnerActor:
    """An actor on the owner's machine that fetches from it for others."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._peers = Peers()

    def fetch(self, packed: bytes) -> tuple[bytes, NDArray[np.uint8]]:
        """Return an ActorReply as JSON, and the bytes of the packed handles' shards, one after the
        other."""
        handles = unpack(packed)
        none: list[Content] = []
        answer, contents = _tried(lambda: self._peers.fetch(self._address, handles), none)
        # One array: Ray's object store makes one object of it, and not thousands.
        return answer, np.concatenate([_NO_BYTES, *(each.data for each in contents)])

    def take(self, shard_ids: list[int], step: int) -> tuple[bytes, None]:
        """Return an ActorReply as JSON: whether the owner holds these shards for `step` now."""
        return _tried(lambda: self._peers.take(self._address, shard_ids, step), None)

    def end_step(self, step: int) -> tuple[bytes, int]:
        """Return an ActorReply as JSON, and how many shards the owner freed with `step`."""
        return _tried(lambda: self._peers.end_step(self._address, step), 0)

    def clear(self, shard_ids: list[int]) -> tuple[bytes, int]:
        """Return an ActorReply as JSON, and how many of these shards the owner held."""
        return _tried(lambda: self._peers.clear(self._address, shard_ids), 0)


class RayServer:
    """Announces an owner in the Ray cluster that its process has joined."""

    def __init__(self, store: OwnerStore, address: str) -> None:
        """Serve `store` as `address`, ray://NAME, which must be unique in the cluster. ConfigError
        without a cluster, AddressError for an invalid name."""
        if not address.startswith(SCHEME) or address == SCHEME:
            raise AddressError(f"{address}: not a name in Ray; it is written as ray://NAME")
        _check_joined()
        self._store = store
        self._address = address
        self._server = TensorServer(store, _LOOPBACK)
        self._actor: Any = None

    def start(self) -> str:
        """Start to serve; return the address, which becomes the store's owner. AddressError if the
        name is taken."""
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
        while self._actor is None:
            try:
                self._actor = ray.remote(OwnerActor).options(**options).remote(local)
            except ValueError as error:
                if time.monotonic() > give_up_s:
                    self._server.stop()
                    raise AddressError(f"{self._address} is taken: {error}") from None
                time.sleep(0.1)
        self._store.owner = self._address
        return self._address

    def stop(self) -> None:
        """Stop; later callers learn that the owner is gone."""
        if self._actor is not None:
            ray.kill(self._actor)
        self._server.stop()


class RayPeers:
    """Fetches from owners through Ray; a TensorBackend."""

    def __init__(self) -> None:
        """ConfigError if this process has joined no cluster."""
        _check_joined()
        self._actors: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._is_closed = False

    def fetch(self, owner: str, handles: list[RTensor]) -> list[Content]:
        """Implement TensorBackend."""
        parts = [*_parts(handles)]
        answers = self._call(owner, "fetch", [(pack(part),) for part in parts])
        contents: list[Content] = []
        for part, (reply, block) in zip(parts, answers, strict=True):
            _check(owner, reply)
            contents += _contents(owner, part, block)
        return contents

    def take(self, owner: str, shard_ids: list[int], step: int) -> None:
        """Implement TensorBackend."""
        self._call_once(owner, "take", shard_ids, step)

    def end_step(self, owner: str, step: int) -> int:
        """Implement TensorBackend."""
        return int(self._call_once(owner, "end_step", step))

    def clear(self, owner: str, shard_ids: list[int]) -> int:
        """Implement TensorBackend."""
        return int(self._call_once(owner, "clear", shard_ids))

    def close(self) -> None:
        """Implement TensorBackend."""
        with self._lock:
            self._is_closed = True
            self._actors.clear()

    def _call_once(self, owner: str, method: str, *arguments: Any) -> Any:
        ((reply, result),) = self._call(owner, method, [arguments])
        _check(owner, reply)
        return result

    def _call(self, owner: str, method: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
        """Call the owner's actor for each item; repeat once if the actor was that of an earlier
        incarnation."""
        try:
            return self._ask(owner, method, arguments)
        except RayActorError:
            with self._lock:
                self._actors.pop(owner, None)
        try:
            return self._ask(owner, method, arguments)
        except RayActorError as error:
            raise OwnerGone(owner, _line_of(error)) from None

    def _ask(self, owner: str, method: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
        actor = self._actor(owner)
        refs = [getattr(actor, method).remote(*each) for each in arguments]
        try:
            # One after the other, so that the timeout applies to each part and not to the whole
            # fetch.
            return [ray.get(ref, timeout=PATIENCE_S) for ref in refs]
        except RayActorError:
            raise
        except GetTimeoutError:
            raise OwnerGone(owner, f"no answer within {PATIENCE_S:g} s") from None
        except RayError as error:
            raise TensorError(f"{owner} did not answer: {_line_of(error)}") from None

    def _actor(self, owner: str) -> Any:
        with self._lock:
            if self._is_closed:
                raise TensorError(f"{owner} is not asked any more: this process is closing")
            if owner not in self._actors:
                self._actors[owner] = _find(owner)
            return self._actors[owner]


def _check_joined() -> None:
    # Ray would start a new cluster for such a process, without any other member.
    if not ray.is_initialized():
        raise ConfigError("this process has joined no Ray cluster; call ray.init(ADDRESS) first")


def _find(owner: str) -> Any:
    try:
        return ray.get_actor(owner.removeprefix(SCHEME), namespace=NAMESPACE)
    except ValueError:
        raise OwnerGone(owner, "Ray knows no actor of that name") from None
    except AssertionError as error:
        # If its program has just ended, Ray still has the actor's name, but no longer its class.
        raise OwnerGone(owner, f"its program has ended: {_line_of(error)}") from None


def _tried(call: Callable[[], _Result], otherwise: _Result) -> tuple[bytes, _Result]:
    """Return the result of `call`, or `otherwise`, and the encoded outcome."""
    answer, result = ActorReply(), otherwise
    try:
        result = call()
    except ShardMissing as error:
        answer = ActorReply("missing", error.reason, error.shard_id)
    except OwnerGone as error:
        answer = ActorReply("gone", error.why)
    except FetchMismatch as error:
        answer = ActorReply("mismatch", str(error))
    except TensorError as error:
        answer = ActorReply("refused", str(error))
    return msgspec.json.encode(answer), result


def _check(owner: str, reply: bytes) -> None:
    """Raise the error that an actor replied with."""
    answer = msgspec.json.decode(reply, type=ActorReply)
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
    """Split what arrived in one object."""
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
    return str(error).strip().rpartition("\n")[2]  # ids or a traceback precede it
