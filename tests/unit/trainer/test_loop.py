"""A trained batch, and rollouts that did not train, are freed; a full journal or disk pauses a run
and does not end it.

A real train loop with a real client, whose worker and router are the test.
"""

import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from structlog.testing import capture_logs

from rollmesh.core.clock import SystemClock
from rollmesh.core.config import Config, JournalConfig, load_config
from rollmesh.core.errors import CheckpointError
from rollmesh.core.ids import GroupId
from rollmesh.core.types import GroupRecord, Outcome, Task
from rollmesh.serve.client.client import RolloutClient
from rollmesh.serve.client.samples import Sample
from rollmesh.testing.client import ANSWER, PROMPT, rollout
from rollmesh.trainer.algorithms.packing import TokenBatch
from rollmesh.trainer.checkpoints.recovery import restored_staleness
from rollmesh.trainer.checkpoints.recovery_plan import plan_recovery
from rollmesh.trainer.checkpoints.store import CheckpointStore
from rollmesh.trainer.loop import TrainerDeps, TrainLoop
from rollmesh.trainer.pacing import pacer
from rollmesh.trainer.pacing.pacer import Batch, Pacer
from rollmesh.trainer.pacing.ready_queue import LocalAllocator, ReadyGroup
from rollmesh.trainer.policy import Policy
from rollmesh.trainer.process import request_settings
from rollmesh.trainer.reports.exactness import FenceRequested
from rollmesh.trainer.reports.records import RunRecords, Tally
from rollmesh.trainer.weights.folder import BackgroundLoop, WeightVersions
from rollmesh.wire.frames import Packet, encode_record
from rollmesh.wire.messages import (
    AskGroup,
    AttemptFailed,
    GroupFailed,
    GroupFinished,
    ResultRefused,
)
from rollmesh.wire.sockets import Dialer
from tests.disks import no_more_bytes, no_new_folders, small_disk
from tests.leftovers import MARK, assert_none_left
from tests.unit.serve.client.fake_router import FakeRouter, finished, next_ack, next_answer
from tests.unit.trainer.trainer_incarnations import (
    PATIENCE_S,
    SAMPLES,
    Killed,
    TrainerIncarnation,
    TrainerIncarnations,
    bring,
)

ROOMY = JournalConfig()
SMALL = JournalConfig(segment_bytes=512, max_bytes=2048)
ROUGH = (
    "good",
    "failed",
    "good",
    "incomplete",
    "good",
    "malformed",
    "twice",
    "stranger's",
    "good",
    "barren",
    "good",
    "foreign",
    "good",
    "old",
    "good",
    "good",
)
"""Outcomes of groups, one after the other."""
NUM_STEPS = 5
"""Steps made of the good ones."""


class WatchedRecords(RunRecords):
    """Records that keep weak references to the arrays of written samples."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, SystemClock())
        self.arrays: list[weakref.ref[Any]] = []

    def rollout(self, *arguments: Any, **more: Any) -> None:
        for sample in arguments[3]:
            arrays = (sample.token_ids, sample.logprobs, sample.loss_mask, sample.policy_versions)
            self.arrays += map(weakref.ref, arrays)
        super().rollout(*arguments, **more)


class WatchedPolicy(Policy):
    """A policy that counts, after each step, how many written arrays are still referenced."""

    def __init__(self, config: Config, records: WatchedRecords) -> None:
        super().__init__(config.model.path, config.trainer)
        self.records = records
        self.ends: list[tuple[int, int]] = []
        self.ended = threading.Condition()

    def end_step(self, step: int) -> None:
        super().end_step(step)
        num_held = sum(array() is not None for array in self.records.arrays)
        with self.ended:
            self.ends.append((step, num_held))
            self.ended.notify_all()


class Site:
    """A trainer in a thread, and a fake mesh."""

    def __init__(self, config: Config, folder: Path) -> None:
        self.folder = folder
        self.router = FakeRouter()
        self.client = RolloutClient(self.router.hub.address, config.journal, folder, keep=True)
        recovery = plan_recovery(None, self.client.history)
        self.client.start(recovery.saved)
        self.worker = Dialer(self.client.address, "w1")
        self.records, self.tally = WatchedRecords(folder), Tally()
        tasks = (Task(id=f"t{number}") for number in itertools.count())
        reports = (self.records, self.tally)
        requests = request_settings(config)
        pacer = Pacer(self.client, restored_staleness(config), tasks, requests, reports)
        self.background = BackgroundLoop("publisher")
        self.weights = WeightVersions(folder / "weights", self.background)
        self.policy = policy = WatchedPolicy(config, self.records)
        self.fenced: list[FenceRequested] = []
        parts = TrainerDeps(
            client=self.client,
            pacer=pacer,
            policy=policy,
            weights=self.weights,
            bring=bring,
            records=self.records,
            tally=self.tally,
            checkpoints=CheckpointStore(folder),
            fence=self.fenced.append,
        )
        self.stop = threading.Event()
        loop = TrainLoop(config, parts, self.stop)
        self.loop = threading.Thread(target=loop.run, args=[recovery])
        self.loop.start()

    def close(self) -> None:
        self.stop.set()
        self.loop.join()
        self.background.close()
        self.client.close()
        self.records.close()
        self.worker.close()
        self.router.hub.close()

    def next_ask(self) -> tuple[bytes, AskGroup]:
        route, ask, _ = self.router.expect(AskGroup)
        return route, ask

    def end_next(self, how: str) -> None:
        """End the next requested group, as `how` says."""
        route, ask = self.next_ask()
        group_id, num_samples = ask.group_id, ask.num_samples
        if how == "failed":
            self.router.send(route, GroupFailed(group_id, "env_failed: no such module"))
            return
        newest = self.tally.num_steps + 1
        policy_version = {"foreign": 99, "old": 1}.get(how, newest)
        outcome = Outcome.INFRA_ERROR if how == "barren" else Outcome.COMPLETED
        rollouts = [rollout(at, outcome, (policy_version,)) for at in range(num_samples)]
        body = encode_record(GroupRecord(task=Task(id=MARK.decode()), rollouts=rollouts))
        if how == "malformed":
            self.worker.send(Packet(finished(group_id), "", body[:-3], (b"", b"")))
            assert isinstance(next_answer(self.worker), ResultRefused)
            _, failed, _ = self.router.expect(AttemptFailed)
            reason = f"attempts_exhausted: 3 have begun; {failed.reason}"
            self.router.send(route, GroupFailed(group_id, reason))
            return
        if how == "stranger's":
            unasked = GroupFinished(GroupId("another-run", 0), 1, "w1", True)
            self.worker.send(Packet(unasked, "", body, (b"", b"")))
            assert isinstance(next_answer(self.worker), ResultRefused)
        self.send(group_id, body, num_samples, complete=how != "incomplete")
        if how == "twice":
            self.send(group_id, body, num_samples)

    def send(self, group_id: GroupId, body: bytes, num_samples: int, complete: bool = True) -> None:
        token_ids = np.array((PROMPT + ANSWER) * num_samples, np.int32).tobytes()
        logprobs = np.array((-5.5, -5.25) * num_samples, np.float32).tobytes()
        message = finished(group_id, complete=complete)
        self.worker.send(Packet(message, "", body, (token_ids, logprobs)))
        next_ack(self.worker)

    def wait_for_steps(self, num_steps: int) -> None:
        policy = self.policy
        with policy.ended:
            assert policy.ended.wait_for(lambda: len(policy.ends) >= num_steps, PATIENCE_S)


@pytest.fixture
def site(tiny_folder: Path, tmp_path: Path, young_heap: None) -> Iterator[Site]:
    del young_heap
    settings = [
        f"model.path={tiny_folder}",
        f"run.folder={tmp_path}",
        "trainer.groups_per_step=2",
        f"trainer.samples_per_group={SAMPLES}",
        "trainer.max_staleness=1",
        "trainer.eval_rollouts=3",
        "trainer.checkpoint_steps=2",
        "trainer.max_logprob_gap=100",
        "trainer.max_token_gap=100",
    ]
    site = Site(load_config(None, settings), tmp_path)
    yield site
    site.close()


def assert_nothing_is_left(site: Site) -> None:
    assert_none_left(ReadyGroup, Batch, TokenBatch)
    assert site.records.arrays
    assert not [array() for array in site.records.arrays if array() is not None]


def test_trained_and_dropped_groups_are_garbage_collected(site: Site) -> None:
    for _ in range(3):
        site.end_next("good")  # the evaluation's
    for how in ROUGH:
        site.end_next(how)
    site.wait_for_steps(NUM_STEPS)
    assert_nothing_is_left(site)
    assert site.policy.ends == [(step, 0) for step in range(NUM_STEPS)]
    assert site.loop.is_alive()
    reasons = (site.folder / "drops.jsonl").read_text()
    for reason in ("env_failed", "infra_error", "malformed", "foreign", "stale"):
        assert reason in reasons


@contextmanager
def running(incarnation: TrainerIncarnation) -> Iterator[None]:
    """Run the loop until it is stopped."""
    thread = threading.Thread(target=incarnation.loop.run, args=[incarnation.recovery])
    thread.start()
    try:
        yield
    finally:
        incarnation.stop.set()
        thread.join()


def test_evaluation_ends_although_it_fills_the_journal(
    begin: TrainerIncarnations, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pacer, "EVAL_WINDOW", 4)
    num_rollouts = 16
    incarnation = begin(SMALL, f"trainer.eval_rollouts={num_rollouts}")
    with running(incarnation):
        for _ in range(num_rollouts):
            group_id, task = incarnation.receive_ask()
            incarnation.finish(group_id, task.id, (Outcome.COMPLETED,))
        incarnation.receive_ask()  # the first that trains
    assert incarnation.tally.reward_untrained == 0.0
    again = begin(SMALL, "trainer.eval_rollouts=3")
    assert (again.tally.num_evals, again.pacer.lifecycle.num_measuring) == (num_rollouts, 0)
    assert again.tally.reward_untrained == 0.0
    assert len(again.rows("trajectories.jsonl")) == num_rollouts


def test_evaluation_continues_after_a_checkpoint_during_it(
    begin: TrainerIncarnations,
) -> None:
    incarnation = begin(ROOMY, "trainer.eval_rollouts=4")
    assert not incarnation.pacer.measure(4)
    asked = [incarnation.receive_ask() for _ in range(4)]
    for group_id, task in asked[:2]:
        incarnation.finish(group_id, task.id, (Outcome.COMPLETED,))
        incarnation.pacer.collect(PATIENCE_S)
    incarnation.saver.save(0)
    incarnation.finish(asked[2][0], asked[2][1].id, (Outcome.COMPLETED,))
    incarnation.pacer.collect(PATIENCE_S)
    again = begin(ROOMY, "trainer.eval_rollouts=4")
    assert again.tally.measured == [0.0] * 3
    assert not again.pacer.measure(4)
    again.finish(asked[3][0], asked[3][1].id, (Outcome.COMPLETED,))
    again.pacer.collect(PATIENCE_S)
    assert again.pacer.measure(4)
    assert (again.tally.measured, again.tally.num_evals) == ([0.0] * 4, 4)
    assert (again.tally.num_asked, again.tally.num_dropped) == (0, 0)


@pytest.mark.parametrize("eval_rollouts", [2, 0])
def test_an_evaluation_that_ended_before_a_step_is_reported_without_a_checkpoint(
    begin: TrainerIncarnations, eval_rollouts: int
) -> None:
    incarnation = begin(ROOMY, "trainer.eval_rollouts=2")
    assert not incarnation.pacer.measure(2)
    for group_id, task in [incarnation.receive_ask() for _ in range(2)]:
        incarnation.finish(group_id, task.id, (Outcome.COMPLETED,))
        incarnation.pacer.collect(PATIENCE_S)
    incarnation.take_step(0)
    again = begin(ROOMY, f"trainer.eval_rollouts={eval_rollouts}")
    with running(again):
        again.receive_ask()
    assert (again.tally.reward_untrained, again.tally.measured) == (0.0, [])
    steps = [(row["step"], row.get("reward_untrained")) for row in again.rows("metrics.jsonl")]
    assert steps == [(-1, 0.0), (0, None)]


def test_run_that_began_without_an_evaluation_continues_without_one(
    begin: TrainerIncarnations,
) -> None:
    incarnation = begin(ROOMY)
    incarnation.take_step(0)
    again = begin(ROOMY, "trainer.eval_rollouts=2")
    with running(again):
        again.receive_ask()
    assert (again.tally.reward_untrained, again.tally.num_evals) == (None, 0)
    assert [row["step"] for row in again.rows("metrics.jsonl")] == [0]


class FillingRoom(LocalAllocator):
    """An allocator that calls a function when the batch of the second step is taken."""

    def __init__(self, fill: Callable[[], object]) -> None:
        self.is_full = threading.Event()
        self._fill = fill
        self._num_looks = 0

    def holds(self, sample: Sample) -> bool:
        self._num_looks += 1
        if self._num_looks > SAMPLES and not self.is_full.is_set():
            self._fill()
            self.is_full.set()
        return super().holds(sample)


def test_a_checkpoint_is_settled_while_a_full_disk_refuses_a_note(
    begin: TrainerIncarnations, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with ExitStack() as full:
        disk = small_disk(monkeypatch, tmp_path / "run" / "journal", 0)
        allocator = FillingRoom(lambda: full.enter_context(disk))
        incarnation = begin(
            ROOMY, "run.name=run", "trainer.checkpoint_steps=1", allocator=allocator
        )
        incarnation.policy.may_be_written = allocator.is_full.is_set
        with running(incarnation):
            for _ in range(2):
                group_id, task = incarnation.receive_ask()
                incarnation.finish(group_id, task.id)
            assert incarnation.checkpoints.are_durable.wait(PATIENCE_S)
            incarnation.checkpoints.are_durable.clear()
            full.close()
            assert incarnation.checkpoints.are_durable.wait(PATIENCE_S), "it went on"


def test_a_checkpoint_that_fails_is_removed_while_a_full_disk_refuses_rows(
    begin: TrainerIncarnations, tmp_path: Path
) -> None:
    rows = tmp_path / "run" / "metrics.jsonl"
    with ExitStack() as full, capture_logs() as logs:
        allocator = FillingRoom(lambda: full.enter_context(no_more_bytes(rows)))
        # Nothing is published between the two steps, which would look after checkpoints as well.
        settings = ("run.name=run", "trainer.checkpoint_steps=1", "publish.every_steps=5")
        incarnation = begin(ROOMY, *settings, allocator=allocator)
        part = incarnation.checkpoints.folder / "000001-step-1.part"

        has_failed = threading.Event()  # what it leaves is removed behind the loop, in its own time

        def finds_no_room() -> bool:
            if allocator.is_full.is_set() and not has_failed.is_set():
                has_failed.set()
                full.close()
                raise CheckpointError(f"{part}: No space left on device")
            return allocator.is_full.is_set()

        incarnation.policy.may_be_written = finds_no_room
        with running(incarnation):
            for _ in range(2):
                group_id, task = incarnation.receive_ask()
                incarnation.finish(group_id, task.id)
            assert incarnation.checkpoints.are_durable.wait(PATIENCE_S), "it went on"
    assert [each["event"] for each in logs if each["log_level"] == "error"] == [
        "records.wait",
        "checkpoint.failed",
    ]
    assert [row["step"] for row in incarnation.rows("metrics.jsonl")] == [0, 1]
    assert not part.exists()


def test_run_pauses_while_the_disk_has_no_space_for_weights(
    begin: TrainerIncarnations, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    incarnation = begin(ROOMY, "run.name=run")
    folder = tmp_path / "run" / "weights"
    with ExitStack() as full, capture_logs() as logs:
        has_refused = full.enter_context(no_new_folders(monkeypatch, folder))
        with running(incarnation):
            assert has_refused.wait(PATIENCE_S)
            has_refused.clear()
            assert has_refused.wait(PATIENCE_S), "it is tried again"
            full.close()
            incarnation.receive_ask()
    assert [each["event"] for each in logs].count("weights.wait") == 1
    assert [path.name for path in folder.iterdir()] == ["v000001.part"]


def test_stop_ends_the_wait_for_disk_space(
    begin: TrainerIncarnations, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    incarnation = begin(ROOMY, "run.name=run")
    folder = tmp_path / "run" / "weights"
    with no_new_folders(monkeypatch, folder) as has_refused, running(incarnation):
        assert has_refused.wait(PATIENCE_S)
    assert not folder.exists()


def test_a_trainer_that_is_killed_after_a_step_leaves_its_counts(
    begin: TrainerIncarnations,
) -> None:
    incarnation = begin(ROOMY, "run.name=run")
    incarnation.policy.dies_in_step = 0
    ends: list[BaseException] = []

    def train() -> None:
        try:
            incarnation.loop.run(incarnation.recovery)
        except Killed as error:
            ends.append(error)

    thread = threading.Thread(target=train)
    thread.start()
    group_id, task = incarnation.receive_ask()
    incarnation.finish(group_id, task.id)
    thread.join(PATIENCE_S)
    assert ends
    summary = msgspec.json.decode((incarnation.folder / "summary.json").read_bytes())
    assert (summary["num_steps"], summary["num_trained"], summary["num_lost"]) == (1, SAMPLES, 0)


def test_a_stopped_trainer_leaves_its_counts_before_it_saves(begin: TrainerIncarnations) -> None:
    incarnation = begin(ROOMY, "run.name=run")
    found: list[bool] = []

    def note() -> bool:
        found.append((incarnation.folder / "summary.json").exists())
        return True

    incarnation.policy.may_be_written = note
    with running(incarnation):
        incarnation.receive_ask()
    assert found
    assert all(found)
