"""The data plane of one process, and how shards are freed everywhere after a step.

- After `TensorRuntime.close` no thread, descriptor or shared memory of it is left.
- Ids are sent and never handles, so nothing is fetched in order to be freed.
- All ranks receive the same request, whether they own the shards, hold copies or neither.
- A request that is not confirmed is repeated, CLEAR_TRIES times in all; then a warning names where
  shards may be left. No failure to free a shard raises.
- Every rank is checked for leaks, and one that sent no report is named.
"""

import concurrent.futures
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import msgspec

from rollmesh.core.clock import SystemClock
from rollmesh.core.errors import AddressError, TensorError
from rollmesh.core.logs import get_logger
from rollmesh.tensors.fetch_buffer import FetchBuffer
from rollmesh.tensors.handles import UNTAGGED, collect_shards
from rollmesh.tensors.peers import Peers
from rollmesh.tensors.plane import Plane
from rollmesh.tensors.relay import TensorRelay
from rollmesh.tensors.server import TensorServer
from rollmesh.tensors.store import OwnerStore, StoreSettings
from rollmesh.trainer.controller.rank_group import NO_STEP, TensorReport
from rollmesh.trainer.controller.spec import PlaneSpec
from rollmesh.wire.keys import Keys
from rollmesh.wire.ranks import HeldTensors

log = get_logger()

MAX_UNCONFIRMED_ENDS = 3
CLEAR_TRIES = 3


class TensorRuntime:
    """Store, server, connections and fetch buffer of a process, opened and closed as one."""

    def __init__(self, spec: PlaneSpec, keys: Keys | None) -> None:
        """Raise AddressError if `spec.bind` is taken, or needs keys."""
        settings = StoreSettings(max_bytes=spec.store_bytes, lease_s=spec.lease_s)
        self._store = OwnerStore(settings, SystemClock())
        self._peers = Peers(keys, spec.buffer_bytes, is_shared=True)
        buffer = FetchBuffer(spec.buffer_bytes)
        bind = spec.bind or "tcp://127.0.0.1:0"
        self._server = TensorServer(self._store, bind, keys, TensorRelay(buffer, self._peers))
        self.plane = Plane(self._store, buffer, self._peers)
        try:
            self.address = self._server.start()
            self._peers.lend_at(self.address)
        except BaseException:
            self.close()
            raise

    def settle(self) -> None:
        """Report to other owners which of their shards are no longer read here."""
        self._peers.settle()

    def abandon(self) -> None:
        """Remove shared memory only, for a process that ends at once."""
        self._peers.abandon()
        self._store.close()

    def close(self) -> None:
        self._server.stop()
        self._peers.close()
        self._store.close()


def held_tensors(plane: Plane) -> tuple[HeldTensors, HeldTensors]:
    """Return what a process holds as owner, and as consumer."""
    stats = plane.stats()
    stored = buffered = HeldTensors()
    if storage := stats.storage:
        stored = HeldTensors(
            storage.num_tensors,
            storage.total_bytes,
            storage.retained_bytes,
            tuple(sorted(storage.bytes_by_step.items())),
        )
    if buffer := stats.buffer:
        by_step = tuple(sorted(buffer.bytes_by_step.items()))
        buffered = HeldTensors(buffer.num_tensors, buffer.total_bytes, 0, by_step)
    return stored, buffered


class RankTensors(msgspec.Struct, frozen=True):
    """Tensors that one process holds; rank -1 is the controller's process."""

    rank: int
    stored: HeldTensors
    buffered: HeldTensors


class Leak(msgspec.Struct, frozen=True):
    """Bytes that should have been freed."""

    rank: int
    tag: str
    """`step 7`, `retained`, `buffered of step 7` or `buffered of no step`."""
    num_bytes: int


def find_leaks(held: Sequence[RankTensors], ended_step: int, num_open: int) -> Iterator[Leak]:
    """Return tensors that are held although their step has ended; `num_open` calls are running.

        step <= ended, at an owner    should have been freed, and is held
        retained                      was freed, but is still read somewhere
        buffered, with no call open   a consumer has a copy that no call will use

    Tensors that no step has taken are not leaks; leases and `clear_batches` free those.
    """
    for each in held:
        for step, num_bytes in each.stored.bytes_by_step:
            if UNTAGGED < step <= ended_step and num_bytes:
                yield Leak(each.rank, f"step {step}", num_bytes)
        if num_open:
            continue  # a running call reads its arguments, and those of the next call are fetched
        if each.stored.retained_bytes:
            yield Leak(each.rank, "retained", each.stored.retained_bytes)
        for step, num_bytes in each.buffered.bytes_by_step:
            if num_bytes:
                of_step = "no step" if step == UNTAGGED else f"step {step}"
                yield Leak(each.rank, f"buffered of {of_step}", num_bytes)


class OtherOwners:
    """Owners that are not ranks of this controller (an env, a trainer) and hold shards of steps.

        noted by a take --its newest step has ended there--> forgotten
        noted by a take --MAX_UNCONFIRMED_ENDS ends in a row fail--> forgotten, freed by leases

    Ranks learn of a step's end from every message of the controller; these owners are called. A
    failed call is made up for by the next one, which is of a later step and so covers both.
    """

    def __init__(self, plane: Plane) -> None:
        """`plane` has connections to the owners."""
        self._plane = plane
        self._steps: dict[str, int] = {}
        """The newest step that took a shard, by owner."""
        self._unconfirmed_ends = Counter[str]()

    def note(self, owners: Iterable[str], step: int) -> None:
        """Record that `step` takes shards of these owners."""
        for owner in owners:
            self._steps[owner] = max(step, self._steps.get(owner, step))

    def end_step(self, step: int) -> None:
        """Report the end of `step` to all noted owners."""
        for owner, newest in list(self._steps.items()):
            try:
                self._plane.end_step_at(owner, step)
            except (TensorError, AddressError) as error:
                self._note_unconfirmed(owner, step, str(error))
                continue
            del self._unconfirmed_ends[owner]
            if newest <= step:
                del self._steps[owner]

    def _note_unconfirmed(self, owner: str, step: int, why: str) -> None:
        self._unconfirmed_ends[owner] += 1
        is_last = self._unconfirmed_ends[owner] >= MAX_UNCONFIRMED_ENDS
        log.warning("tensors.not_ended", owner=owner, step=step, why=why, is_given_up=is_last)
        if is_last:
            del self._steps[owner], self._unconfirmed_ends[owner]


class RankQueries(Protocol):
    """The part of a RankHub that clearing needs."""

    def owners(self) -> set[str]:
        """Return the addresses at which ranks serve their tensors."""

    def query_tensors(
        self, ended_step: int, shard_ids: bytes
    ) -> "concurrent.futures.Future[TensorReport]":
        """Have all ranks free `shard_ids` and report."""


def clear_everywhere(plane: Plane, hub: RankQueries, targets: Any) -> int:
    """Free the shards of `targets`, and return how many their owners held."""
    by_owner = collect_shards(targets)
    if not by_owner:
        return 0
    shard_ids = [each for ids in by_owner.values() for each in ids]
    num_cleared = plane.clear(shard_ids)
    own = plane.store.owner if plane.store is not None else ""
    for owner in by_owner.keys() - hub.owners() - {own}:
        num_cleared += _clear_at(plane, owner, by_owner[owner])
    unconfirmed: list[tuple[int, str]] = []
    for _ in range(CLEAR_TRIES):
        report = _ask(hub, shard_ids)
        num_cleared += sum(each.num_cleared for each in report.reports)
        unconfirmed = list(_unconfirmed(report))
        if not unconfirmed:
            break
    for rank, why in unconfirmed:
        log.warning("tensors.not_cleared", rank=rank, num=len(shard_ids), why=why)
    return num_cleared


def _ask(hub: RankQueries, shard_ids: list[int]) -> TensorReport:
    return hub.query_tensors(NO_STEP, array("Q", shard_ids).tobytes()).result()


def _clear_at(plane: Plane, owner: str, shard_ids: list[int]) -> int:
    """Free shards of an owner that is not a rank of this controller."""
    why = ""
    for _ in range(CLEAR_TRIES):
        try:
            return plane.clear_at(owner, shard_ids)
        except (TensorError, AddressError) as error:
            why = str(error)
    log.warning("tensors.not_cleared", owner=owner, num=len(shard_ids), why=why)
    return 0


def _unconfirmed(report: TensorReport) -> Iterator[tuple[int, str]]:
    """Ranks that may still hold something, with the reason."""
    yield from ((rank, "it did not answer") for rank in report.missing)
    yield from ((each.rank, each.error) for each in report.reports if each.error)
