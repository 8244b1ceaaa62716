"""The ledger knows what is there, says why the rest is not, and frees each shard once."""

import math
import random
from collections.abc import Iterator

import hypothesis
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from rollmesh.core.errors import TensorError
from rollmesh.tensors import ledger as module
from rollmesh.tensors.handles import UNTAGGED
from rollmesh.tensors.ledger import Ledger

MINE, LEASE_S = 7, 100.0
STRANGE = [(MINE + 1) << 32, MINE - 1, 3]
"""Ids of other lives."""


@pytest.fixture
def ledger() -> Ledger:
    return Ledger(MINE, LEASE_S)


def drained(parts: Iterator[list[int]]) -> list[int]:
    """All that comes until nothing comes."""
    freed: list[int] = []
    while part := next(parts):
        freed += part
    return sorted(freed)


def reaped(ledger: Ledger, limit: int = 1000) -> list[int]:
    return drained(ledger.reap(limit) for _ in iter(int, 1))


def expired(ledger: Ledger, now_s: float, limit: int = 1000) -> list[int]:
    return drained(ledger.expire(now_s, limit) for _ in iter(int, 1))


def test_ids_are_the_incarnation_and_then_a_number(ledger: Ledger) -> None:
    assert list(ledger.put([10, 0], UNTAGGED, 0)) == [7 << 32, 7 << 32 | 1]
    assert list(ledger.put([5], 3, 0)) == [7 << 32 | 2]
    assert (ledger.num_tensors, ledger.total_bytes) == (3, 15)
    assert ledger.bytes_by_step == {UNTAGGED: 10, 3: 5}


def test_a_step_takes_along_all_that_came_before_it(ledger: Ledger) -> None:
    (early,), (late,) = ledger.put([1], 3, 0), ledger.put([2], 5, 0)
    (untagged,) = ledger.put([4], UNTAGGED, 0)
    ledger.end_step(4)
    assert [ledger.look(each) for each in (early, late, untagged)] == ["cleared", None, None]
    assert reaped(ledger) == [early]
    assert ledger.bytes_by_step == {5: 2, UNTAGGED: 4}


def test_what_a_later_step_took_too_outlives_the_earlier(ledger: Ledger) -> None:
    (shard_id,) = ledger.put([8], UNTAGGED, 0)
    for step in (2, 5, 3):
        assert ledger.take([shard_id, shard_id], step) == []
    ledger.end_step(4)
    assert reaped(ledger) == []
    assert ledger.bytes_by_step == {5: 8}
    ledger.end_step(5)
    assert reaped(ledger) == [shard_id]
    assert (ledger.total_bytes, ledger.bytes_by_step) == (0, {})


def test_a_step_that_has_ended_takes_and_puts_nothing(ledger: Ledger) -> None:
    (shard_id,) = ledger.put([8], UNTAGGED, 0)
    ledger.end_step(4)
    ledger.end_step(2)  # a message that came late
    for step in (0, 2, 4):
        with pytest.raises(TensorError, match=f"step {step} has ended, as have all up to 4"):
            ledger.take([shard_id], step)
        with pytest.raises(TensorError, match=f"step {step} has ended"):
            ledger.put([1], step, 0)
    assert ledger.take([shard_id], 5) == []
    assert (ledger.num_tensors, ledger.ended_step) == (1, 4)


def test_take_says_which_are_not_there_and_has_the_others(ledger: Ledger) -> None:
    there, gone, ended = ledger.put([1, 2, 4], UNTAGGED, 0)
    ledger.clear([gone])
    ledger.take([ended], 1)
    ledger.end_step(1)
    assert ledger.take([gone, there, ended, *STRANGE], 3) == [gone, ended, *STRANGE]
    assert ledger.bytes_by_step == {3: 1, 1: 4}


def test_each_absence_has_its_reason(ledger: Ledger) -> None:
    cleared, leased, ended = ledger.put([1, 1, 1], UNTAGGED, 0)
    ledger.clear([cleared])
    ledger.take([ended], 1)
    ledger.end_step(1)
    assert ledger.look(ended) == "cleared"  # at once, before anything is freed
    reaped(ledger)
    assert expired(ledger, LEASE_S) == [leased]
    reasons = [ledger.look(each) for each in (cleared, leased, ended, ended + 1)]
    assert reasons == ["cleared", "expired", "cleared", "never_seen"]
    assert {ledger.look(each) for each in STRANGE} == {"owner_restarted"}


def test_a_lease_runs_from_the_put_and_from_each_renewal(ledger: Ledger) -> None:
    (first,) = ledger.put([1], UNTAGGED, 0)
    (second,) = ledger.put([1], 9, 50)
    assert expired(ledger, 99.9) == []
    ledger.renew(99.9)
    assert expired(ledger, 199.8) == []
    (third,) = ledger.put([1], UNTAGGED, 199.8)
    assert expired(ledger, 199.9) == [first, second]
    assert ledger.look(third) is None
    assert expired(ledger, 299.8) == [third]


def test_without_end_a_lease_never_runs_out() -> None:
    ledger = Ledger(MINE, math.inf)
    ledger.put([1], UNTAGGED, 0)
    assert expired(ledger, 1e12) == []


def test_runs_that_expired_are_remembered_within_bounds(ledger: Ledger) -> None:
    ids = ledger.put([1] * 3000, UNTAGGED, 0)
    ledger.clear(ids[1::2])
    assert expired(ledger, LEASE_S) == list(ids[::2])
    told = [ledger.look(each) for each in ids[::2]]
    num_forgotten = 1500 - module.MAX_EXPIRED
    assert told == ["cleared"] * num_forgotten + ["expired"] * module.MAX_EXPIRED
    together = ledger.put([1] * 3000, UNTAGGED, 200)
    expired(ledger, 300)
    assert {ledger.look(each) for each in together} == {"expired"}
    assert ledger.look(ids[2998]) == "expired"


def test_nothing_is_freed_beyond_the_limit(ledger: Ledger) -> None:
    ids = ledger.put([1] * 10, 1, 0)
    ledger.end_step(1)
    assert [len(ledger.reap(4)) for _ in range(4)] == [4, 4, 2, 0]
    others = ledger.put([1] * 10, UNTAGGED, 0)
    assert [len(ledger.expire(LEASE_S, 4)) for _ in range(4)] == [4, 4, 2, 0]
    assert {ledger.look(each) for each in [*ids, *others]} == {"cleared", "expired"}


def test_an_owner_that_gave_out_all_its_ids_says_so(ledger: Ledger) -> None:
    class Endless(list[int]):
        def __len__(self) -> int:
            return 2**32 + 1

    with pytest.raises(TensorError, match="start it anew"):
        ledger.put(Endless(), UNTAGGED, 0)


class Naive(RuleBasedStateMachine):
    """A ledger, and beside it three dictionaries that are looked through whole each time."""

    @initialize(lease_s=st.sampled_from([5.0, 50.0]))
    def begin(self, lease_s: float) -> None:
        self.ledger, self.lease_s = Ledger(MINE, lease_s), lease_s
        self.now_s, self.renewed_s, self.ended_step = 0.0, -math.inf, UNTAGGED
        self.sizes: dict[int, int] = {}
        self.steps: dict[int, int] = {}
        self.put_s: dict[int, float] = {}
        self.gone: dict[int, str] = {}

    def some(self, seed: int) -> list[int]:
        """Ids of all kinds, some twice."""
        known = [*self.steps, *self.gone]
        return random.Random(seed).choices(
            [*known, max(known, default=MINE << 32) + 1, *STRANGE], k=5
        )

    def leave(self, ids: list[int], reason: str) -> None:
        for each in ids:
            del self.steps[each]
            self.gone[each] = reason

    @rule(sizes=st.lists(st.integers(0, 99), max_size=6), step=st.integers(UNTAGGED, 12))
    def put(self, sizes: list[int], step: int) -> None:
        if UNTAGGED < step <= self.ended_step:
            with pytest.raises(TensorError):
                self.ledger.put(sizes, step, self.now_s)
            return
        ids = self.ledger.put(sizes, step, self.now_s)
        assert not set(ids) & {*self.steps, *self.gone}
        self.sizes |= zip(ids, sizes, strict=True)
        self.steps |= dict.fromkeys(ids, step)
        self.put_s |= dict.fromkeys(ids, self.now_s)

    @rule(seed=st.integers(0, 999), step=st.integers(0, 12))
    def take(self, seed: int, step: int) -> None:
        ids = self.some(seed)
        if step <= self.ended_step:
            with pytest.raises(TensorError):
                self.ledger.take(ids, step)
            return
        assert self.ledger.take(ids, step) == [each for each in ids if each not in self.steps]
        self.steps |= {each: max(self.steps[each], step) for each in ids if each in self.steps}

    @rule(step=st.integers(0, 12), limit=st.integers(1, 5))
    def end_step(self, step: int, limit: int) -> None:
        self.ended_step = max(self.ended_step, step)
        over = [each for each, tag in self.steps.items() if UNTAGGED < tag <= self.ended_step]
        self.ledger.end_step(step)
        self.leave(over, "cleared")
        self.check_reasons()
        assert reaped(self.ledger, limit) == sorted(over)

    @rule(seed=st.integers(0, 999))
    def clear(self, seed: int) -> None:
        ids = self.some(seed)
        held = [each for each in dict.fromkeys(ids) if each in self.steps]
        assert self.ledger.clear(ids) == held
        self.leave(held, "cleared")

    @rule(pause_s=st.integers(0, 30), renews=st.booleans())
    def wait(self, pause_s: int, renews: bool) -> None:
        self.now_s += pause_s
        if renews:
            self.renewed_s = self.now_s
            self.ledger.renew(self.now_s)

    @rule(limit=st.integers(1, 5))
    def expire(self, limit: int) -> None:
        until_s = self.now_s - self.lease_s
        due = [each for each in self.steps if max(self.put_s[each], self.renewed_s) <= until_s]
        assert expired(self.ledger, self.now_s, limit) == sorted(due)
        self.leave(due, "expired")

    @invariant()
    def check_reasons(self) -> None:
        for each in self.steps:
            assert self.ledger.look(each) is None
        for each, reason in self.gone.items():
            assert self.ledger.look(each) == reason

    @invariant()
    def check_sums(self) -> None:
        by_step = dict.fromkeys(self.steps.values(), 0)
        for each, step in self.steps.items():
            by_step[step] += self.sizes[each]
        assert self.ledger.bytes_by_step == by_step
        assert self.ledger.total_bytes == sum(by_step.values())
        assert self.ledger.num_tensors == len(self.steps)


TestNaive = Naive.TestCase
TestNaive.settings = hypothesis.settings(
    max_examples=60, stateful_step_count=40, deadline=None, derandomize=True, database=None
)
