"""The table knows the stored shards, gives the reason for missing ones, and frees each once."""

import math
import random
from collections.abc import Iterator

import hypothesis
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from rollmesh.core.errors import TensorError
from rollmesh.tensors import shard_table as module
from rollmesh.tensors.handles import UNTAGGED
from rollmesh.tensors.shard_table import ShardTable

MINE, LEASE_S = 7, 100.0
FOREIGN = [(MINE + 1) << 32, MINE - 1, 3]
"""Ids of other incarnations."""


@pytest.fixture
def table() -> ShardTable:
    return ShardTable(MINE, LEASE_S)


def drained(parts: Iterator[list[int]]) -> list[int]:
    """Return all events until none is left."""
    freed: list[int] = []
    while part := next(parts):
        freed += part
    return sorted(freed)


def reaped(table: ShardTable, limit: int = 1000) -> list[int]:
    return drained(table.reap(limit) for _ in iter(int, 1))


def expired(table: ShardTable, now_s: float, limit: int = 1000) -> list[int]:
    return drained(table.expire(now_s, limit) for _ in iter(int, 1))


def test_an_id_is_the_incarnation_and_a_number(table: ShardTable) -> None:
    assert list(table.put([10, 0], UNTAGGED, 0)) == [7 << 32, 7 << 32 | 1]
    assert list(table.put([5], 3, 0)) == [7 << 32 | 2]
    assert (table.num_tensors, table.total_bytes) == (3, 15)
    assert table.bytes_by_step == {UNTAGGED: 10, 3: 5}


def test_the_end_of_a_step_frees_its_shards_and_those_of_earlier_steps(table: ShardTable) -> None:
    (early,), (late,) = table.put([1], 3, 0), table.put([2], 5, 0)
    (untagged,) = table.put([4], UNTAGGED, 0)
    table.end_step(4)
    assert [table.missing_reason(each) for each in (early, late, untagged)] == [
        "cleared",
        None,
        None,
    ]
    assert reaped(table) == [early]
    assert table.bytes_by_step == {5: 2, UNTAGGED: 4}


def test_a_shard_that_a_later_step_took_survives_the_earlier(table: ShardTable) -> None:
    (shard_id,) = table.put([8], UNTAGGED, 0)
    for step in (2, 5, 3):
        assert table.take([shard_id, shard_id], step) == []
    table.end_step(4)
    assert reaped(table) == []
    assert table.bytes_by_step == {5: 8}
    table.end_step(5)
    assert reaped(table) == [shard_id]
    assert (table.total_bytes, table.bytes_by_step) == (0, {})


def test_a_step_that_has_ended_takes_and_puts_nothing(table: ShardTable) -> None:
    (shard_id,) = table.put([8], UNTAGGED, 0)
    table.end_step(4)
    table.end_step(2)  # a late message
    for step in (0, 2, 4):
        with pytest.raises(TensorError, match=f"step {step} has ended, as have all up to 4"):
            table.take([shard_id], step)
        with pytest.raises(TensorError, match=f"step {step} has ended"):
            table.put([1], step, 0)
    assert table.take([shard_id], 5) == []
    assert (table.num_tensors, table.ended_step) == (1, 4)


def test_take_returns_the_missing_ids_and_takes_the_others(table: ShardTable) -> None:
    there, gone, ended = table.put([1, 2, 4], UNTAGGED, 0)
    table.clear([gone])
    table.take([ended], 1)
    table.end_step(1)
    assert table.take([gone, there, ended, *FOREIGN], 3) == [gone, ended, *FOREIGN]
    assert table.bytes_by_step == {3: 1, 1: 4}


def test_each_missing_shard_has_its_reason(table: ShardTable) -> None:
    cleared, leased, ended = table.put([1, 1, 1], UNTAGGED, 0)
    table.clear([cleared])
    table.take([ended], 1)
    table.end_step(1)
    assert table.missing_reason(ended) == "cleared"  # at once, before anything is freed
    reaped(table)
    assert expired(table, LEASE_S) == [leased]
    reasons = [table.missing_reason(each) for each in (cleared, leased, ended, ended + 1)]
    assert reasons == ["cleared", "expired", "cleared", "never_seen"]
    assert {table.missing_reason(each) for each in FOREIGN} == {"owner_restarted"}


def test_a_lease_runs_from_the_put_and_from_each_renewal(table: ShardTable) -> None:
    (first,) = table.put([1], UNTAGGED, 0)
    (second,) = table.put([1], 9, 50)
    assert expired(table, 99.9) == []
    table.renew(99.9)
    assert expired(table, 199.8) == []
    (third,) = table.put([1], UNTAGGED, 199.8)
    assert expired(table, 199.9) == [first, second]
    assert table.missing_reason(third) is None
    assert expired(table, 299.8) == [third]


def test_an_infinite_lease_never_expires() -> None:
    table = ShardTable(MINE, math.inf)
    table.put([1], UNTAGGED, 0)
    assert expired(table, 1e12) == []


def test_expired_runs_are_remembered_within_bounds(table: ShardTable) -> None:
    ids = table.put([1] * 3000, UNTAGGED, 0)
    table.clear(ids[1::2])
    assert expired(table, LEASE_S) == list(ids[::2])
    found = [table.missing_reason(each) for each in ids[::2]]
    num_forgotten = 1500 - module.MAX_EXPIRED
    assert found == ["cleared"] * num_forgotten + ["expired"] * module.MAX_EXPIRED
    together = table.put([1] * 3000, UNTAGGED, 200)
    expired(table, 300)
    assert {table.missing_reason(each) for each in together} == {"expired"}
    assert table.missing_reason(ids[2998]) == "expired"


def test_nothing_is_freed_beyond_the_limit(table: ShardTable) -> None:
    ids = table.put([1] * 10, 1, 0)
    table.end_step(1)
    assert [len(table.reap(4)) for _ in range(4)] == [4, 4, 2, 0]
    others = table.put([1] * 10, UNTAGGED, 0)
    assert [len(table.expire(LEASE_S, 4)) for _ in range(4)] == [4, 4, 2, 0]
    assert {table.missing_reason(each) for each in [*ids, *others]} == {"cleared", "expired"}


def test_an_owner_without_ids_left_asks_for_a_restart(table: ShardTable) -> None:
    class Endless(list[int]):
        def __len__(self) -> int:
            return 2**32 + 1

    with pytest.raises(TensorError, match="restart it"):
        table.put(Endless(), UNTAGGED, 0)


class TableMachine(RuleBasedStateMachine):
    """Random operations on a table, compared with dictionaries that are searched completely."""

    @initialize(lease_s=st.sampled_from([5.0, 50.0]))
    def begin(self, lease_s: float) -> None:
        self.table, self.lease_s = ShardTable(MINE, lease_s), lease_s
        self.now_s, self.renewed_s, self.ended_step = 0.0, -math.inf, UNTAGGED
        self.sizes: dict[int, int] = {}
        self.steps: dict[int, int] = {}
        self.put_s: dict[int, float] = {}
        self.gone: dict[int, str] = {}

    def some(self, seed: int) -> list[int]:
        """Ids of all kinds, some twice."""
        known = [*self.steps, *self.gone]
        return random.Random(seed).choices(
            [*known, max(known, default=MINE << 32) + 1, *FOREIGN], k=5
        )

    def leave(self, ids: list[int], reason: str) -> None:
        for each in ids:
            del self.steps[each]
            self.gone[each] = reason

    @rule(sizes=st.lists(st.integers(0, 99), max_size=6), step=st.integers(UNTAGGED, 12))
    def put(self, sizes: list[int], step: int) -> None:
        if UNTAGGED < step <= self.ended_step:
            with pytest.raises(TensorError):
                self.table.put(sizes, step, self.now_s)
            return
        ids = self.table.put(sizes, step, self.now_s)
        assert not set(ids) & {*self.steps, *self.gone}
        self.sizes |= zip(ids, sizes, strict=True)
        self.steps |= dict.fromkeys(ids, step)
        self.put_s |= dict.fromkeys(ids, self.now_s)

    @rule(seed=st.integers(0, 999), step=st.integers(0, 12))
    def take(self, seed: int, step: int) -> None:
        ids = self.some(seed)
        if step <= self.ended_step:
            with pytest.raises(TensorError):
                self.table.take(ids, step)
            return
        assert self.table.take(ids, step) == [each for each in ids if each not in self.steps]
        self.steps |= {each: max(self.steps[each], step) for each in ids if each in self.steps}

    @rule(step=st.integers(0, 12), limit=st.integers(1, 5))
    def end_step(self, step: int, limit: int) -> None:
        self.ended_step = max(self.ended_step, step)
        over = [each for each, tag in self.steps.items() if UNTAGGED < tag <= self.ended_step]
        self.table.end_step(step)
        self.leave(over, "cleared")
        self.check_reasons()
        assert reaped(self.table, limit) == sorted(over)

    @rule(seed=st.integers(0, 999))
    def clear(self, seed: int) -> None:
        ids = self.some(seed)
        held = [each for each in dict.fromkeys(ids) if each in self.steps]
        assert self.table.clear(ids) == held
        self.leave(held, "cleared")

    @rule(pause_s=st.integers(0, 30), renews=st.booleans())
    def wait(self, pause_s: int, renews: bool) -> None:
        self.now_s += pause_s
        if renews:
            self.renewed_s = self.now_s
            self.table.renew(self.now_s)

    @rule(limit=st.integers(1, 5))
    def expire(self, limit: int) -> None:
        until_s = self.now_s - self.lease_s
        due = [each for each in self.steps if max(self.put_s[each], self.renewed_s) <= until_s]
        assert expired(self.table, self.now_s, limit) == sorted(due)
        self.leave(due, "expired")

    @invariant()
    def check_reasons(self) -> None:
        for each in self.steps:
            assert self.table.missing_reason(each) is None
        for each, reason in self.gone.items():
            assert self.table.missing_reason(each) == reason

    @invariant()
    def check_sums(self) -> None:
        by_step = dict.fromkeys(self.steps.values(), 0)
        for each, step in self.steps.items():
            by_step[step] += self.sizes[each]
        assert self.table.bytes_by_step == by_step
        assert self.table.total_bytes == sum(by_step.values())
        assert self.table.num_tensors == len(self.steps)


TestTable = TableMachine.TestCase
TestTable.settings = hypothesis.settings(
    max_examples=60, stateful_step_count=40, deadline=None, derandomize=True, database=None
)
