"""Threads that fetch, wait, fail and clear in every order, compared with a naive buffer.

A step begins only after the effect of the last step was observed from outside: a thread that waits
for others also fetches a shard of its own, and that fetch shows its progress.
"""

import time
from functools import partial

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from rollmesh.core.errors import OwnerGone
from rollmesh.tensors.fetch_buffer import BufferStats, FetchBuffer
from rollmesh.tensors.handles import UNTAGGED, RTensor
from tests.unit.tensors.fetches import (
    OWNER,
    WAIT_S,
    HeldFetch,
    Owners,
    ThreadCall,
    assert_are,
    handle,
    ids,
)

MAX_BYTES = 12
LARGE = 7
"""Number of a shard larger than the budget; others have as many bytes as their number."""
FIRST_OWN = 100
"""Number of the first shard that only one thread fetches."""

numbers = st.lists(st.integers(0, LARGE), max_size=5)
places = st.integers(0, 9)
ahead = st.integers(-1, 2)
"""The newest ended step: steps long past and far in the future behave as the nearest."""


class Call:
    """One thread in `get_many`."""

    def __init__(
        self,
        wanted: list[RTensor],
        own: list[RTensor],
        awaited: list["Call"],
        ended_step: int,
    ) -> None:
        self.ended_step = ended_step
        """Newest ended step when the call began."""
        self.wanted = wanted
        self.own = {each.shard_id: each for each in own}
        self.awaited = awaited
        self.has_failed = False
        self.fetch = HeldFetch(Owners())

    def start(self, buffer: FetchBuffer) -> None:
        self.thread = ThreadCall(partial(buffer.get_many, self.wanted, self.fetch))

    def check_end(self) -> None:
        """End with the requested shards, or with the error of a thread that fetched some of
        them.
        """
        is_failure = self.has_failed or any(each.has_failed for each in self.awaited)
        try:
            contents = self.thread.result()
        except OwnerGone:
            assert is_failure
        else:
            assert not is_failure
            assert_are(contents, self.wanted)


class BufferSchedule(RuleBasedStateMachine):
    """Random steps of several threads on both buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.buffer = FetchBuffer(MAX_BYTES)
        self.kept: dict[int, RTensor] = {}
        self.pending: dict[int, Call] = {}
        self.fetching: list[Call] = []
        self.waiting: list[Call] = []
        self.ended_step = UNTAGGED
        self.num_hits = 0
        self.num_fetched = 0
        self.num_calls = 0

    @rule(numbers=numbers, ahead=st.none() | ahead)
    def ask(self, numbers: list[int], ahead: int | None) -> None:
        step = UNTAGGED if ahead is None else max(self.ended_step + ahead, UNTAGGED)
        wanted = [handle(each, step, 20 if each == LARGE else each) for each in numbers]
        own: list[RTensor] = []
        awaited: list[Call] = []
        for each in dict.fromkeys(wanted):
            if each.shard_id in self.kept:
                self.kept[each.shard_id] = self.kept.pop(each.shard_id)
                self.num_hits += 1
            elif each.shard_id in self.pending:
                awaited.append(self.pending[each.shard_id])
            else:
                own.append(each)
        if awaited and not own:
            own.append(handle(FIRST_OWN + self.num_calls, step, 1))
            wanted.extend(own)
        self.num_calls += 1
        call = Call(wanted, own, awaited, self.ended_step)
        self.pending.update(dict.fromkeys(call.own, call))
        call.start(self.buffer)
        if own:
            call.fetch.wait_begun()
            self.fetching.append(call)
        else:
            call.check_end()

    @precondition(lambda self: self.fetching)
    @rule(place=places)
    def release(self, place: int) -> None:
        call = self.fetching.pop(place % len(self.fetching))
        for each in self._take_pending(call):
            is_untagged = each.step == UNTAGGED
            is_ended = (call.ended_step if is_untagged else each.step - 1) < self.ended_step
            if not is_ended and each.num_bytes <= MAX_BYTES:
                self.kept[each.shard_id] = each
        while sum(each.num_bytes for each in self.kept.values()) > MAX_BYTES:
            del self.kept[next(iter(self.kept))]
        self.num_fetched += len(call.own)
        self.waiting.append(call)
        call.fetch.release()

    @precondition(lambda self: self.fetching)
    @rule(place=places)
    def fail(self, place: int) -> None:
        call = self.fetching.pop(place % len(self.fetching))
        self._take_pending(call)
        call.has_failed = True
        call.fetch.fail(OwnerGone(OWNER, "it hung up"))
        call.check_end()

    @precondition(lambda self: self.kept or self.pending)
    @rule(numbers=numbers)
    def clear(self, numbers: list[int]) -> None:
        assert self.buffer.clear(ids(*numbers)) == self._drop({*ids(*numbers)})

    @precondition(lambda self: self.kept or self.pending)
    @rule()
    def flush(self) -> None:
        assert self.buffer.clear(None) == self._drop({*self.kept, *self.pending})

    @precondition(lambda self: self.kept or self.pending)
    @rule(ahead=ahead)
    def end_step(self, ahead: int) -> None:
        step = max(self.ended_step + ahead, UNTAGGED)
        ended: set[int] = set()
        if step > self.ended_step:
            self.ended_step = step
            ended = {each.shard_id for each in self.kept.values() if each.step <= step}
        assert self.buffer.end_step(step) == len([self.kept.pop(each) for each in ended])

    @invariant()
    def counts_agree(self) -> None:
        total_bytes = sum(each.num_bytes for each in self.kept.values())
        by_step: dict[int, int] = {}
        for each in self.kept.values():
            by_step[each.step] = by_step.get(each.step, 0) + each.num_bytes
        num_kept = len(self.kept)
        counted = BufferStats(num_kept, total_bytes, self.num_hits, self.num_fetched, by_step)
        give_up_s = time.monotonic() + WAIT_S
        # A released fetch ends at some later time.
        while self.buffer.stats() != counted and time.monotonic() < give_up_s:
            time.sleep(0)
        assert self.buffer.stats() == counted

    @invariant()
    def calls_without_pending_fetches_end(self) -> None:
        for call in [*self.waiting]:
            if not any(each in self.fetching for each in call.awaited):
                self.waiting.remove(call)
                call.check_end()

    def teardown(self) -> None:
        while self.fetching:
            self.release(0)
        self.calls_without_pending_fetches_end()
        assert not self.waiting
        self.buffer.clear(None)
        stats = self.buffer.stats()
        assert (stats.num_tensors, stats.total_bytes) == (0, 0)

    def _take_pending(self, call: Call) -> list[RTensor]:
        """Remove the pending shards of the call, and return them."""
        mine = [each for each in call.own if self.pending.get(each) is call]
        for each in mine:
            del self.pending[each]
        return [call.own[each] for each in mine]

    def _drop(self, shard_ids: set[int]) -> int:
        self.pending = {each: call for each, call in self.pending.items() if each not in shard_ids}
        return len([self.kept.pop(each) for each in shard_ids & self.kept.keys()])


def check_schedules(num_schedules: int, num_steps: int) -> None:
    """Run random schedules; raise AssertionError if the two buffers differ."""
    run_state_machine_as_test(
        BufferSchedule,
        settings=settings(max_examples=num_schedules, stateful_step_count=num_steps, deadline=None),
    )
