"""The shards that an owner holds: size, step and lease of each. Pure.

    put --> UNTAGGED --take(step)--> TAGGED --take(a later step)--> TAGGED
    put(step) --> TAGGED
    UNTAGGED | TAGGED --clear--> cleared
    UNTAGGED | TAGGED --not renewed for lease_s--> expired
    TAGGED --end_step(its step, or a later one)--> cleared; `reap` then frees it

- An id is given once. Shards of an ended step are missing at once; no more are put or taken for it.
- Untagged shards are freed by `clear` or by their lease only.
- Each shard is returned by `clear`, `reap` or `expire` exactly once.
- Every call costs as much as the shards it names; callers with many name them in chunks.
"""

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice
from operator import attrgetter

import msgspec

from rollmesh.core.errors import MissReason, TensorError
from rollmesh.tensors.handles import NUMBER_BITS, UNTAGGED

MAX_EXPIRED = 1024
"""Runs of ids whose expiry is remembered; older ones are reported as cleared."""


class _Shard(msgspec.Struct, gc=False):
    num_bytes: int
    step: int
    put_s: float


class _StepShards(msgspec.Struct):
    """The shards of one step, or of UNTAGGED."""

    ids: set[int]
    num_bytes: int = 0


class ShardTable:
    """The table of one owner's incarnation."""

    def __init__(self, incarnation: int, lease_s: float) -> None:
        self.incarnation = incarnation
        self.ended_step = UNTAGGED
        """The newest ended step; all before it have ended too."""
        self.total_bytes = 0
        self._lease_s = lease_s
        self._renewed_s = -math.inf
        self._first = self._next = incarnation << NUMBER_BITS
        self._shards: dict[int, _Shard] = {}
        """By id, which is also the order of their leases."""
        self._steps: dict[int, _StepShards] = {}
        self._expired: deque[range] = deque(maxlen=MAX_EXPIRED)
        """Ascending: the oldest expire first."""

    @property
    def num_tensors(self) -> int:
        """Shards held, including those of ended steps that are not reaped yet."""
        return len(self._shards)

    @property
    def bytes_by_step(self) -> dict[int, int]:
        """Adds up to `total_bytes`."""
        return {step: tagged.num_bytes for step, tagged in self._steps.items()}

    def put(self, sizes: Sequence[int], step: int, now_s: float) -> range:
        """Add shards of these sizes; return their ids. TensorError if `step` has ended."""
        self._check_open(step)
        ids = range(self._next, self._next + len(sizes))
        if ids.stop > self._first + (1 << NUMBER_BITS):
            raise TensorError(f"this owner gave out its {1 << NUMBER_BITS} ids; restart it")
        self._next = ids.stop
        for shard_id, num_bytes in zip(ids, sizes, strict=True):
            self._shards[shard_id] = _Shard(num_bytes, step, now_s)
        self._tag(ids, step, sum(sizes))
        self.total_bytes += sum(sizes)
        return ids

    def take(self, shard_ids: Sequence[int], step: int) -> list[int]:
        """Hold shards until `step` ends, or the later step that also took them.

        Returns the missing ones. TensorError if `step` has ended.
        """
        self._check_open(step)
        held = dict.fromkeys(each for each in shard_ids if self.missing_reason(each) is None)
        moved = [each for each in held if self._shards[each].step < step]
        num_bytes = 0
        for shard_id in moved:
            shard = self._shards[shard_id]
            self._untag(shard_id, shard)
            shard.step = step
            num_bytes += shard.num_bytes
        self._tag(moved, step, num_bytes)
        return [each for each in shard_ids if each not in held]

    def missing_reason(self, shard_id: int) -> MissReason | None:
        """Return why the shard is missing; None if it is held."""
        shard = self._shards.get(shard_id)
        if shard is not None and not self._has_ended(shard.step):
            return None
        if shard_id >> NUMBER_BITS != self.incarnation:
            return "owner_restarted"
        if shard_id >= self._next:
            return "never_seen"
        at = bisect_right(self._expired, shard_id, key=attrgetter("start"))
        return "expired" if at and shard_id in self._expired[at - 1] else "cleared"

    def end_step(self, step: int) -> None:
        """End `step` and all before it; see `reap`."""
        self.ended_step = max(self.ended_step, step)

    def reap(self, limit: int) -> list[int]:
        """Free at most `limit` shards of ended steps; empty when none is left."""
        freed: list[int] = []
        for step in [each for each in self._steps if self._has_ended(each)]:
            ids = self._steps[step].ids
            while ids and len(freed) < limit:
                freed.append(self._forget(ids.pop()))
        return freed

    def clear(self, shard_ids: Iterable[int]) -> list[int]:
        """Free these shards; return those that were held."""
        return [self._forget(each) for each in shard_ids if each in self._shards]

    def renew(self, now_s: float) -> None:
        """Renew all leases: a user of the shards is alive."""
        self._renewed_s = now_s

    def expire(self, now_s: float, limit: int) -> list[int]:
        """Free at most `limit` shards whose lease has expired; empty when none is left."""
        if now_s - self._renewed_s < self._lease_s:
            return []
        oldest = list(islice(self._shards.items(), limit))
        freed = [each for each, shard in oldest if now_s - shard.put_s >= self._lease_s]
        for shard_id in freed:
            self._forget(shard_id)
            self._note_expired(shard_id)
        return freed

    def _check_open(self, step: int) -> None:
        assert step >= UNTAGGED, step
        if self._has_ended(step):
            ended = f"step {step} has ended, as have all up to {self.ended_step}"
            raise TensorError(f"{ended}; nothing is put or taken for it any more")

    def _has_ended(self, step: int) -> bool:
        return UNTAGGED < step <= self.ended_step

    def _tag(self, ids: Sequence[int], step: int, num_bytes: int) -> None:
        if ids:
            tagged = self._steps.setdefault(step, _StepShards(set()))
            tagged.ids.update(ids)
            tagged.num_bytes += num_bytes

    def _untag(self, shard_id: int, shard: _Shard) -> None:
        tagged = self._steps[shard.step]
        tagged.ids.discard(shard_id)
        tagged.num_bytes -= shard.num_bytes
        if not tagged.ids:
            del self._steps[shard.step]

    def _forget(self, shard_id: int) -> int:
        shard = self._shards.pop(shard_id)
        self._untag(shard_id, shard)
        self.total_bytes -= shard.num_bytes
        return shard_id

    def _note_expired(self, shard_id: int) -> None:
        last = self._expired[-1] if self._expired else range(0)
        if shard_id == last.stop:
            self._expired[-1] = range(last.start, shard_id + 1)
        else:
            self._expired.append(range(shard_id, shard_id + 1))
