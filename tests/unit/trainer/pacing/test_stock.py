"""A full room costs time and never a group, and nothing stays there that does not train."""

import itertools
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from rollmesh.core.errors import ConfigError
from rollmesh.core.ids import GroupId
from rollmesh.core.types import Branch, Outcome, SamplingPolicy, Task
from rollmesh.serve.client.arrivals import Arrival, Finished
from rollmesh.tensors.arena import Arena
from rollmesh.tensors.handles import UNTAGGED
from rollmesh.tensors.store import OwnerStore, StoreSettings
from rollmesh.testing.client import ANSWER, PROMPT, ScriptedClient
from rollmesh.testing.clock import FakeClock
from rollmesh.trainer.books.records import RunRecords, Tally
from rollmesh.trainer.pacing.pacer import Batch, Pacer
from rollmesh.trainer.pacing.ready_queue import ReadyGroup, ReadyQueue, StoreAllocator
from rollmesh.trainer.pacing.requester import RequestSettings
from rollmesh.trainer.staleness import StalenessManager, StalenessSettings

NUM_SAMPLES = 4
LINE_BYTES = 128
"""What a sample of ScriptedClient's takes of the arena."""
GROUP_BYTES = NUM_SAMPLES * LINE_BYTES
BRANCHES: tuple[Branch, ...] = ("main",)
SEQUENCE = [*PROMPT, *ANSWER]


class World:
    """A stock whose room holds so many groups."""

    def __init__(self, num_groups: int) -> None:
        max_bytes = num_groups * GROUP_BYTES
        self.arena = Arena(max_bytes)
        self.store = OwnerStore(StoreSettings(max_bytes=max_bytes), FakeClock(), self.arena)
        self.allocator = StoreAllocator(self.store)
        self.stock = ReadyQueue(self.allocator)
        self.client = ScriptedClient()

    def ask(self) -> GroupId:
        return self.client.ask(
            Task(id="t"),
            env="guess",
            num_samples=NUM_SAMPLES,
            sampling=SamplingPolicy(),
            seed=0,
        )

    def arrive(self, number: int) -> list[ReadyGroup]:
        groups = []
        for _ in range(number):
            self.client.finish(self.ask())
            (finished,) = self.client.take(0.0)
            assert isinstance(finished, Finished)
            groups.append(self.stock.cut(finished, BRANCHES))
            self.stock.keep(groups[-1])
        return groups

    def is_inside(self, group: ReadyGroup) -> bool:
        inside = {self.allocator.holds(sample) for sample in group.all_samples()}
        assert len(inside) == 1, "a group lies in one place"
        return inside.pop()

    def assert_empty(self) -> None:
        stats = self.store.stats()
        left = (stats.num_tensors, stats.retained_bytes, self.arena.held_bytes)
        assert left == (0, 0, 0)


@pytest.fixture
def world() -> Iterator[World]:
    world = World(num_groups=2)
    yield world
    world.arena.close()


def ids(*groups: ReadyGroup) -> list[GroupId]:
    return [group.group_id for group in groups]


def assert_whole(group: ReadyGroup) -> None:
    assert [len(rollout) for rollout in group.samples] == [1] * NUM_SAMPLES
    for index, sample in enumerate(group.all_samples()):
        assert sample.rollout_id.index == index
        assert sample.token_ids.tolist() == SEQUENCE
        assert sample.logprobs.tolist() == [0, 0, 0, -0.5, -0.25]


def test_a_group_that_finds_no_room_waits_aside_and_is_brought_in(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    first, second, third, _ = world.arrive(4)
    assert [world.is_inside(each) for each in (first, second, third)] == [True, True, False]
    [line] = [each.message for each in caplog.records if "room.full" in each.message]
    assert "copied when their step comes" in line
    world.stock.take(ids(first))
    world.stock.clear([first])
    del first
    assert world.stock.take(ids(third)) == [third]
    assert world.is_inside(third)
    assert_whole(third)


def test_the_buffers_that_a_group_came_in_are_gone_once_it_is_cut(world: World) -> None:
    world.client.finish(world.ask())
    (finished,) = world.client.take(0.0)
    assert isinstance(finished, Finished)
    buffers: list[weakref.ref[Any]] = [weakref.ref(finished.token_ids)]
    buffers.append(weakref.ref(finished.logprobs))
    group = world.stock.cut(finished, BRANCHES)
    del finished
    assert [buffer() for buffer in buffers] == [None, None]
    assert_whole(group)


def test_the_newest_that_waits_makes_way(world: World) -> None:
    first, second, third = world.arrive(3)
    assert world.stock.take(ids(third)) == [third]
    assert [world.is_inside(each) for each in (first, second, third)] == [True, False, True]
    assert_whole(second)
    assert_whole(third)
    assert [*world.stock.waiting()] == [first, second]


def test_a_batch_that_lies_there_stays_where_it_is(world: World) -> None:
    groups = world.arrive(2)
    addresses = [s.token_ids.ctypes.data for group in groups for s in group.all_samples()]
    taken = world.stock.take(ids(*groups))
    assert [s.token_ids.ctypes.data for group in taken for s in group.all_samples()] == addresses


def test_a_batch_larger_than_the_room_is_one_line_that_says_what_to_set(world: World) -> None:
    groups = world.arrive(3)
    with pytest.raises(ConfigError) as raised:
        world.stock.take(ids(*groups))
    num_bytes = 13 * len(SEQUENCE) * 3 * NUM_SAMPLES
    assert str(raised.value) == (
        f"a step's 12 samples are {num_bytes} bytes, and ranks share {2 * GROUP_BYTES:,}: lower "
        "trainer.groups_per_step or trainer.samples_per_group, or enlarge /dev/shm (in a container "
        "by --shm-size)"
    )
    assert [*world.stock.waiting()] == groups
    assert world.stock.take(ids(*groups[:2])) == groups[:2]


def test_of_what_is_cleared_nothing_stays(world: World) -> None:
    groups = world.arrive(3)
    for group in groups[1:]:
        assert world.stock.give_up(group.group_id) is group
    world.stock.clear(groups)
    assert world.store.stats().num_tensors == 0
    world.stock.take(ids(groups[0]))  # of which another copy would be brought in
    del group
    groups.clear()
    world.assert_empty()


class EvaluatingClient(ScriptedClient):
    """Groups of one end as soon as somebody looks."""

    def take(self, timeout_s: float) -> list[Arrival]:
        for group_id in [g for g, (_, num_samples) in self.asked.items() if num_samples == 1]:
            self.finish(group_id)
        return super().take(timeout_s)


class Life(RuleBasedStateMachine):
    """A run of a trainer whose policy is on ranks: the pacer, the store, and every way to end.

    What a policy on ranks does with a step is done here: the store takes it, and ends it once
    nobody holds its batch.
    """

    @initialize(num_groups=st.integers(0, 6))
    def begin(self, num_groups: int) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.world = World(num_groups)
        self.client = EvaluatingClient()
        self.records, self.tally = RunRecords(Path(self.folder.name), FakeClock()), Tally()
        staleness = StalenessManager(
            StalenessSettings(batch=2 * NUM_SAMPLES, max_staleness=1, max_concurrent=400)
        )
        asking = RequestSettings(
            env="guess",
            num_samples=NUM_SAMPLES,
            sampling=SamplingPolicy(),
            seed=0,
            branches=BRANCHES,
        )
        tasks = (Task(id=f"t{number}") for number in itertools.count())
        books = (self.records, self.tally)
        self.pacer = Pacer(self.client, staleness, tasks, asking, books, self.world.allocator)
        self.step = self.policy_version = self.num_evals = 0
        self.is_over = False

    @rule()
    def ask(self) -> None:
        self.pacer.ask(10)

    @rule(
        how=st.sampled_from(["good", "good", "good", "old", "foreign", "barren", "failed", "cut"]),
        at=st.integers(0, 3),
    )
    def end_one(self, how: str, at: int) -> None:
        if not self.client.asked:
            return
        group_id = [*self.client.asked][at % len(self.client.asked)]
        outcomes = {"barren": dict.fromkeys(range(NUM_SAMPLES), Outcome.INFRA_ERROR)}
        outcomes["cut"] = {1: Outcome.AGENT_ERROR}
        versions = {"old": (0, self.policy_version), "foreign": (99,)}
        if how == "failed":
            self.client.drop(group_id, "env_failed: no licence")
        else:
            versions_of = versions.get(how, (self.policy_version,))
            self.client.finish(group_id, outcomes.get(how), versions_of)

    @rule()
    def hear_of_an_earlier_run(self) -> None:
        self.client.asked[GroupId("before", 5)] = (Task(id="old"), NUM_SAMPLES)
        self.client.finish(GroupId("before", 5))

    @rule()
    def collect(self) -> None:
        self.pacer.collect(0.0)

    @rule()
    def evaluate(self) -> None:
        num_before = self.world.store.stats().num_tensors
        self.num_evals += 2
        while not self.pacer.measure(self.num_evals):
            self.pacer.collect(0.0)
        assert len(self.tally.measured) == self.num_evals
        assert self.world.store.stats().num_tensors >= num_before

    @rule()
    def publish(self) -> None:
        self.policy_version += 1
        self.pacer.publishing(self.policy_version, self.step)
        self.pacer.published(self.step)

    @precondition(lambda self: not self.is_over)
    @rule(fails=st.booleans())
    def train(self, fails: bool) -> None:
        batch = self.batch()
        if batch is None:
            return
        handles = [sample.handle for sample in batch.samples()]
        taken = [handle.shard_id for handle in handles if handle is not None]
        assert len(taken) == len(handles)
        self.world.store.take(taken, self.step)
        for sample in batch.samples():
            assert sample.token_ids.tolist() == SEQUENCE
        if fails:
            self.is_over = True
            return
        self.pacer.trained(batch)
        del batch, sample
        self.world.store.end_step(self.step)
        stats = self.world.store.stats()
        assert stats.retained_bytes == 0
        assert stats.bytes_by_step.keys() <= {UNTAGGED}
        self.step += 1

    def batch(self) -> Batch | None:
        """The next, where its step may have one and the room is large enough."""
        try:
            return self.pacer.take(self.step)
        except ConfigError:
            assert self.world.arena.max_bytes < 2 * GROUP_BYTES
            self.is_over = True
            return None

    def teardown(self) -> None:
        if not hasattr(self, "pacer"):
            return
        self.pacer.close()
        assert self.world.store.stats().num_tensors == 0
        del self.pacer
        self.world.assert_empty()
        self.world.arena.close()
        self.records.close()
        self.folder.cleanup()


TestLife = Life.TestCase
TestLife.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, derandomize=True, database=None
)
