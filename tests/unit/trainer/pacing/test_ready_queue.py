"""A full allocator costs time and never a group, and nothing stays there that does not train.

Masked tokens are context; what is left of a rollout trains with the weight of the whole.
"""

import itertools
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from rollmesh.core.errors import ConfigError, StoreFull
from rollmesh.core.ids import GroupId
from rollmesh.core.types import Branch, Outcome, SamplingPolicy, Task
from rollmesh.serve.client.arrivals import Arrival, Finished
from rollmesh.serve.client.samples import (
    BYTES_PER_TOKEN,
    Sample,
    SampleArrays,
    SampledRun,
    lay_plainly,
)
from rollmesh.tensors.arena import PAGE_BYTES, Arena
from rollmesh.tensors.handles import UNTAGGED
from rollmesh.tensors.segment import AttachedSegment
from rollmesh.tensors.store import OwnerStore, StoreSettings
from rollmesh.testing.client import ANSWER, PROMPT, ScriptedClient
from rollmesh.testing.clock import FakeClock
from rollmesh.trainer.pacing.pacer import Batch, Pacer
from rollmesh.trainer.pacing.ready_queue import (
    LocalAllocator,
    ReadyGroup,
    ReadyQueue,
    StoreAllocator,
    copy_samples,
    without_versions,
)
from rollmesh.trainer.pacing.requester import RequestSettings
from rollmesh.trainer.reports.records import RunRecords, Tally
from rollmesh.trainer.staleness import StalenessManager, StalenessSettings
from tests.unit.trainer.pacing.pacer_stage import MANY, staged
from tests.unit.trainer.samples import new_sample

NUM_SAMPLES = 4
LINE_BYTES = 128
"""Arena bytes of a sample of ScriptedClient's."""
GROUP_BYTES = NUM_SAMPLES * LINE_BYTES
BRANCHES: tuple[Branch, ...] = ("main",)
SEQUENCE = [*PROMPT, *ANSWER]


class World:
    """A ready queue whose allocator has space for `num_groups` groups."""

    def __init__(self, num_groups: int) -> None:
        max_bytes = num_groups * GROUP_BYTES
        self.arena = Arena(max_bytes)
        self.store = OwnerStore(StoreSettings(max_bytes=max_bytes), FakeClock(), self.arena)
        self.allocator = StoreAllocator(self.store)
        self.queue = ReadyQueue(self.allocator)
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
            groups.append(self.queue.cut(finished, BRANCHES))
            self.queue.keep(groups[-1])
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


def test_group_without_space_waits_and_is_copied_in_later(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    first, second, third, _ = world.arrive(4)
    assert [world.is_inside(each) for each in (first, second, third)] == [True, True, False]
    [line] = [each.message for each in caplog.records if "allocator.full" in each.message]
    assert "copied when their step comes" in line
    world.queue.take(ids(first))
    world.queue.clear([first])
    del first
    assert world.queue.take(ids(third)) == [third]
    assert world.is_inside(third)
    assert_whole(third)


def test_received_buffers_are_freed_once_the_group_is_copied(world: World) -> None:
    world.client.finish(world.ask())
    (finished,) = world.client.take(0.0)
    assert isinstance(finished, Finished)
    buffers: list[weakref.ref[Any]] = [weakref.ref(finished.token_ids)]
    buffers.append(weakref.ref(finished.logprobs))
    group = world.queue.cut(finished, BRANCHES)
    del finished
    assert [buffer() for buffer in buffers] == [None, None]
    assert_whole(group)


def test_newest_group_is_evicted_for_one_that_is_taken(world: World) -> None:
    first, second, third = world.arrive(3)
    assert world.queue.take(ids(third)) == [third]
    assert [world.is_inside(each) for each in (first, second, third)] == [True, False, True]
    assert_whole(second)
    assert_whole(third)
    assert [*world.queue.waiting()] == [first, second]


def test_a_waiting_batch_keeps_its_memory(world: World) -> None:
    groups = world.arrive(2)
    addresses = [s.token_ids.ctypes.data for group in groups for s in group.all_samples()]
    taken = world.queue.take(ids(*groups))
    assert [s.token_ids.ctypes.data for group in taken for s in group.all_samples()] == addresses


def test_batch_larger_than_the_store_is_one_line_that_names_the_setting(world: World) -> None:
    groups = world.arrive(3)
    with pytest.raises(ConfigError) as raised:
        world.queue.take(ids(*groups))
    num_bytes = 13 * len(SEQUENCE) * 3 * NUM_SAMPLES
    assert str(raised.value) == (
        f"a step's 12 samples are {num_bytes} bytes, and ranks share {2 * GROUP_BYTES:,}: lower "
        "trainer.groups_per_step or trainer.samples_per_group, or enlarge /dev/shm (in a container "
        "by --shm-size)"
    )
    assert [*world.queue.waiting()] == groups
    assert world.queue.take(ids(*groups[:2])) == groups[:2]


def test_cleared_samples_leave_no_memory_in_use(world: World) -> None:
    groups = world.arrive(3)
    for group in groups[1:]:
        assert world.queue.pop(group.group_id) is group
    world.queue.clear(groups)
    assert world.store.stats().num_tensors == 0
    world.queue.take(ids(groups[0]))  # of which another copy would be brought in
    del group
    groups.clear()
    world.assert_empty()


class EvaluatingClient(ScriptedClient):
    """A client whose groups of one end at the first poll."""

    def take(self, timeout_s: float) -> list[Arrival]:
        for group_id in [g for g, (_, num_samples) in self.asked.items() if num_samples == 1]:
            self.finish(group_id)
        return super().take(timeout_s)


class TrainerRun(RuleBasedStateMachine):
    """A run of a trainer whose policy is on ranks: the pacer, the store, and every way to end.

    The test does what a policy on ranks does with a step: the store takes it, and ends it once no
    reference to its batch is left.
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
        reports = (self.records, self.tally)
        self.pacer = Pacer(self.client, staleness, tasks, asking, reports, self.world.allocator)
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
        """Return the next batch, or None if there is none or the allocator cannot hold it."""
        try:
            return self.pacer.take(self.step)
        except ConfigError:
            # A group that lost rollouts makes the step take a third one.
            assert self.world.arena.max_bytes < 3 * GROUP_BYTES
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


TestTrainerRun = TrainerRun.TestCase
TestTrainerRun.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, derandomize=True, database=None
)


MAX_BYTES = 16 * PAGE_BYTES


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(MAX_BYTES)
    yield arena
    arena.close()


@pytest.fixture
def store(arena: Arena) -> OwnerStore:
    return OwnerStore(StoreSettings(max_bytes=MAX_BYTES), FakeClock(), arena)


def samples_of_lengths(*lengths: int) -> list[Sample]:
    """Samples of these lengths, all different."""
    return [
        new_sample(
            [100 * number + at for at in range(length)],
            [0] + [1] * (length - 1),
            index=number,
            reward=number,
            logprobs=np.linspace(-number - 1, -1, length),
            policy_version=number,
        )
        for number, length in enumerate(lengths)
    ]


def assert_alike(samples: Sequence[Sample], others: Sequence[Sample]) -> None:
    for one, other in zip(samples, others, strict=True):
        assert (one.rollout_id, one.reward) == (other.rollout_id, other.reward)
        for name in SampleArrays._fields:
            mine, theirs = getattr(one, name), getattr(other, name)
            assert mine.dtype == theirs.dtype
            assert np.array_equal(mine, theirs), name


def test_samples_in_the_store_are_unchanged_and_read_only(store: OwnerStore) -> None:
    allocator = StoreAllocator(store)
    samples = copy_samples(samples_of_lengths(4, 9, 2), allocator.allocate)
    assert_alike(samples, samples_of_lengths(4, 9, 2))
    assert all(map(allocator.holds, samples))
    assert not any(map(allocator.holds, samples_of_lengths(4, 9, 2)))
    assert not any(sample.token_ids.flags.writeable for sample in samples)
    assert store.stats().total_bytes == BYTES_PER_TOKEN * 15


def test_attaching_by_handle_shows_the_same_memory(store: OwnerStore) -> None:
    (sample,) = copy_samples(samples_of_lengths(7), StoreAllocator(store).allocate)
    assert sample.handle is not None
    (place,) = store.pins.places([sample.handle.shard_id], "rank")
    seen = AttachedSegment(place.path).view(place.offset, place.num_bytes)
    assert seen[: 4 * 7].tobytes() == sample.token_ids.tobytes()
    assert len(seen) == BYTES_PER_TOKEN * 7 == sample.handle.num_bytes


def test_cleared_samples_are_freed_when_no_reference_is_left(
    store: OwnerStore, arena: Arena
) -> None:
    allocator = StoreAllocator(store)
    samples = copy_samples(samples_of_lengths(4, 9), allocator.allocate)
    allocator.clear([*samples, *samples_of_lengths(3)])
    assert (store.stats().num_tensors, store.stats().retained_bytes) == (0, BYTES_PER_TOKEN * 13)
    assert_alike(samples, samples_of_lengths(4, 9))
    samples.clear()
    assert store.stats().retained_bytes == 0
    assert arena.held_bytes == 0


def test_samples_that_do_not_fit_change_nothing_in_the_store(store: OwnerStore) -> None:
    allocator = StoreAllocator(store)
    samples = copy_samples(samples_of_lengths(4), allocator.allocate)
    with pytest.raises(StoreFull):
        copy_samples(samples_of_lengths(2, MAX_BYTES // BYTES_PER_TOKEN), allocator.allocate)
    assert store.stats().num_tensors == 1
    assert_alike(samples, samples_of_lengths(4))


def test_samples_copied_out_of_the_store_are_plain_arrays(store: OwnerStore) -> None:
    allocator = StoreAllocator(store)
    samples = copy_samples(samples_of_lengths(4, 9), allocator.allocate)
    aside = copy_samples(samples, lay_plainly)
    allocator.clear(samples)
    del samples
    assert (store.stats().num_tensors, store.stats().retained_bytes) == (0, 0)
    assert_alike(aside, samples_of_lengths(4, 9))
    assert [sample.handle for sample in aside] == [None, None]


def test_local_allocator_has_no_limit() -> None:
    allocator = LocalAllocator()
    samples = copy_samples(samples_of_lengths(4, 9), allocator.allocate)
    assert_alike(samples, samples_of_lengths(4, 9))
    assert all(map(allocator.holds, samples))
    allocator.clear(samples)
    assert_alike(samples, samples_of_lengths(4, 9))


def sampled_by(*policy_versions: int, weight: float = 1.0) -> Sample:
    """A sample with a prompt of two tokens; each token of its answer is by the given version."""
    versions = [-1, -1, *policy_versions]
    return new_sample(
        list(range(len(versions))),
        [int(each >= 0) for each in versions],
        policy_versions=np.array(versions, np.int32),
        runs=tuple(SampledRun(1, each, f"engine-{each % 2}") for each in policy_versions),
        weight=weight,
    )


def test_old_tokens_are_masked_and_runs_count_the_rest() -> None:
    sample = sampled_by(3, 4, 4, 5)
    [left] = without_versions([sample], {1, 3})
    assert left.loss_mask.tolist() == [False, False, False, True, True, True]
    assert left.policy_versions.tolist() == [-1, -1, -1, 4, 4, 5]
    assert left.logprobs.tolist() == [0.0, 0.0, 0.0, -1.0, -1.0, -1.0]
    assert left.runs == (SampledRun(2, 4, "engine-0"), SampledRun(1, 5, "engine-1"))
    assert left.token_ids.tolist() == sample.token_ids.tolist()
    assert sample.loss_mask.sum() == 4, "what was given is not written to"


def test_runs_beside_a_masked_run_are_joined() -> None:
    [left] = without_versions([sampled_by(6, 3, 6)], {3})
    assert left.runs == (SampledRun(2, 6, "engine-0"),)


def test_fully_masked_samples_are_removed_and_the_others_share_their_weight() -> None:
    rollout = [sampled_by(2, 2, weight=0.4), sampled_by(2, 5, 5, weight=0.6)]
    [left] = without_versions(rollout, {2})
    assert left.weight == 1.0
    assert without_versions(rollout, {2, 5}) == []


@given(
    rollout=st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=6), min_size=1, max_size=4),
    stale=st.sets(st.integers(0, 4)),
)
def test_weights_and_runs_add_up_whichever_tokens_are_masked(
    rollout: list[list[int]], stale: set[int]
) -> None:
    left = without_versions([sampled_by(*versions) for versions in rollout], stale)
    counts = [sum(each not in stale for each in versions) for versions in rollout]
    assert [int(each.loss_mask.sum()) for each in left] == [num for num in counts if num]
    for each in left:
        assert sum(run.num_tokens for run in each.runs) == each.loss_mask.sum()
        assert each.weight == pytest.approx(each.loss_mask.sum() / sum(counts))


def test_tokens_past_the_age_bound_are_masked_and_the_rest_trains(tmp_path: Path) -> None:
    stage = staged(tmp_path, "mask")
    stage.pacer.ask(MANY)
    old, mixed, *fresh = stage.open()
    stage.client.finish(old, policy_versions=(0, 1))
    stage.client.finish(mixed, policy_versions=(0, 3))
    for group_id in fresh:
        stage.client.finish(group_id, policy_versions=(3,))
    batch = stage.batch(step=3)
    assert batch.group_ids() == [mixed, fresh[0]]
    for sample in batch.groups[0].all_samples():
        assert sample.policy_versions.tolist() == [-1, -1, -1, -1, 3]
        assert sample.loss_mask.tolist() == [False, False, False, False, True]
        assert sample.logprobs[3] == 0.0
        assert [(run.num_tokens, run.policy_version) for run in sample.runs] == [(1, 3)]
        assert sample.weight == 1.0
    stage.pacer.trained(batch)
    assert set(stage.tally.ages) == {0}
    drops = stage.rows("drops.jsonl")
    assert [drop["reason"] for drop in drops] == ["stale: age 3"] * 4
    rows = [row for row in stage.rows("trajectories.jsonl") if row["step"] == 3]
    assert [row["num_masked"] for row in rows] == [1] * 4 + [0] * 4
    assert stage.lost() == 0
    stage.records.close()


def test_fully_masked_rollout_is_dropped_without_its_siblings(tmp_path: Path) -> None:
    stage = staged(tmp_path, "mask")
    stage.pacer.ask(MANY)
    first, *rest = stage.open()
    stage.client.finish(first, policy_versions=(3,), of_rollout={2: (0,)})
    for group_id in rest:
        stage.client.finish(group_id, policy_versions=(3,))
    batch = stage.batch(step=3)
    assert [len(group.all_samples()) for group in batch.groups] == [3, 4, 4]
    [drop] = stage.rows("drops.jsonl")
    assert drop["index"] == 2
    assert (drop["reason"], drop["age"]) == ("masked: no token of it is within the age bound", 3)
    stage.pacer.trained(batch)
    assert stage.lost() == 0
    stage.records.close()
