"""Incarnations of one run's trainer, with client, journal, policy and checkpoints, on a fake mesh.

An incarnation knows only what is in the run's folder; conftest.py has `begin`.
"""

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from rollmesh.core.clock import SystemClock
from rollmesh.core.config import Config, JournalConfig, load_config
from rollmesh.core.ids import GroupId
from rollmesh.core.types import GroupRecord, Outcome, Task
from rollmesh.engine.shared_memory import SharedSegment
from rollmesh.serve.client.client import RolloutClient
from rollmesh.serve.client.samples import Sample
from rollmesh.testing.client import ANSWER, PROMPT, rollout
from rollmesh.trainer.algorithms.step_report import StepReport
from rollmesh.trainer.checkpoints.recovery import (
    find_resume_point,
    restored_staleness,
    restored_tally,
)
from rollmesh.trainer.checkpoints.store import CheckpointStore, SavedCheckpoint
from rollmesh.trainer.loop import CheckpointSaver, TrainerDeps, TrainLoop
from rollmesh.trainer.pacing.pacer import Batch, Pacer
from rollmesh.trainer.pacing.ready_queue import LocalAllocator
from rollmesh.trainer.policy import Policy
from rollmesh.trainer.process import request_settings
from rollmesh.trainer.reports.records import RunRecords
from rollmesh.trainer.weights.folder import BackgroundLoop, WeightVersions
from rollmesh.trainer.weights.publisher import PublishReport
from rollmesh.trainer.weights.verdicts import Probe
from rollmesh.wire.frames import Packet, decode_ask, encode_record
from rollmesh.wire.messages import AskGroup
from rollmesh.wire.sockets import Dialer
from tests.unit.serve.client.fake_router import FakeRouter, finished, next_ack

PATIENCE_S = 60.0
LOGPROBS = (-5.5, -5.25)
"""Log-probs of the answer in each rollout."""
SAMPLES = 2
PERIOD_STEPS = 2
COMPLETED = (Outcome.COMPLETED,) * SAMPLES


class Killed(Exception):
    """Raised to end an incarnation."""


class KilledHard(BaseException):
    """Raised to end an incarnation as a signal does: nothing is written."""


class FailingPolicy(Policy):
    """A policy that may raise in a step or after it, and whose checkpoints may take long."""

    dies_in_step = -1
    raises_in_steps: Mapping[int, BaseException] = {}
    may_be_written: Callable[[], bool] = staticmethod(lambda: True)

    def step(
        self,
        samples: Sequence[Sample],
        step: int,
        minibatches: Sequence[int] | None = None,
        step_of_version: Mapping[int, int] | None = None,
    ) -> StepReport:
        if step in self.raises_in_steps:
            raise self.raises_in_steps[step]
        return super().step(samples, step, minibatches, step_of_version)

    def end_step(self, step: int) -> None:
        super().end_step(step)
        if step == self.dies_in_step:
            raise Killed

    def is_snapshot_written(self) -> bool:
        return self.may_be_written() and super().is_snapshot_written()


class NotifyingCheckpoints(CheckpointStore):
    """Checkpoints that notify the test when one is durable."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.are_durable = threading.Event()

    def settled(self, timeout_s: float = 0.0) -> SavedCheckpoint | None:
        saved = super().settled(timeout_s)
        if saved:
            self.are_durable.set()
        return saved


class TrainerIncarnation:
    """One trainer without a mesh, which continues from the contents of the run folder."""

    def __init__(
        self,
        config: Config,
        journal: JournalConfig,
        router: FakeRouter,
        allocator: LocalAllocator | None = None,
    ) -> None:
        folder = config.run_folder()
        self.folder = folder
        self.router = router
        self.client = RolloutClient(router.hub.address, journal, folder, keep=True)
        self.checkpoints = NotifyingCheckpoints(folder)
        with ExitStack() as undo:
            undo.callback(self.client.close)
            revival = find_resume_point(self.client, self.checkpoints)
            undo.pop_all()
        self.recovery = revival.recovery
        self.client.start(self.recovery.saved)
        self.policy = FailingPolicy(config.model.path, config.trainer)
        self.records = RunRecords(folder, SystemClock(), revival.covered)
        self.tally = restored_tally(config, revival)
        num_tasks = self.recovery.num_tasks
        tasks = (Task(id=f"t{number}") for number in itertools.count(num_tasks))
        staleness = restored_staleness(config, revival)
        reports = (self.records, self.tally)
        requests = request_settings(config)
        self.pacer = Pacer(self.client, staleness, tasks, requests, reports, allocator)
        self.pacer.resume(self.recovery)
        self._background = BackgroundLoop("publisher")
        self.parts = TrainerDeps(
            client=self.client,
            pacer=self.pacer,
            policy=self.policy,
            weights=WeightVersions(folder / "weights", self._background),
            bring=bring,
            records=self.records,
            tally=self.tally,
            checkpoints=self.checkpoints,
            fence=lambda _: None,
        )
        self.stop = threading.Event()
        self.loop = TrainLoop(config, self.parts, self.stop)
        self.saver = CheckpointSaver(self.parts, PERIOD_STEPS)
        self.saver.resume_from(self.recovery.saved)

    def end(self) -> None:
        """End the incarnation as kill -9 does: nothing more is saved."""
        self.client.close()
        self.records.close()
        self._background.close()

    def rows(self, name: str) -> list[dict[str, Any]]:
        """Return the rows of a record file without their times."""
        self.records.flush()
        lines = (self.folder / name).read_bytes().splitlines()
        return [msgspec.json.decode(line, type=dict[str, Any]) | {"time_s": 0} for line in lines]

    def next_ask(self) -> GroupId:
        self.pacer.ask(num_needed=1)
        return self.receive_ask()[0]

    def receive_ask(self) -> tuple[GroupId, Task]:
        """Return the next request to the mesh."""
        _, ask, packet = self.router.expect(AskGroup)
        return ask.group_id, decode_ask(packet.body).task

    def fail_a_group(self) -> None:
        self.client.cancel(self.next_ask(), "of no use")
        self.pacer.collect(PATIENCE_S)

    def finish(
        self,
        group_id: GroupId,
        task_id: str = "t",
        outcomes: Sequence[Outcome] = COMPLETED,
        policy_versions: tuple[int, ...] = (0,),
        reason: str = "",
    ) -> None:
        """Deliver a result; an incomplete one if `reason` is given."""
        rollouts = [rollout(at, outcome, policy_versions) for at, outcome in enumerate(outcomes)]
        self.deliver(group_id, GroupRecord(task=Task(id=task_id), rollouts=rollouts, reason=reason))

    def deliver(
        self, group_id: GroupId, record: GroupRecord, logprobs: tuple[float, ...] = LOGPROBS
    ) -> None:
        """Deliver a result as a worker does, with these log-probs in each rollout."""
        num, worker = len(record.rollouts), Dialer(self.client.address, "w1")
        token_ids = np.array((PROMPT + ANSWER) * num, np.int32).tobytes()
        recorded = np.array(logprobs * num, np.float32).tobytes()
        message = finished(group_id, complete=not record.reason)
        worker.send(Packet(message, "", encode_record(record), (token_ids, recorded)))
        next_ack(worker)
        worker.close()

    def train(self, step: int) -> None:
        """Train a step: change the whole state except the weights."""
        self.pacer.trained(self.take_step(step))

    def take_step(self, step: int) -> Batch:
        """Request a batch, receive it, and record that it is trained."""
        self.finish(self.next_ask())
        self.pacer.collect(PATIENCE_S)
        batch = self.pacer.take(step)
        assert batch is not None
        self.client.note_step(step, batch.group_ids(), batch.oldest_step)
        return batch


class TrainerIncarnations:
    """Makes an incarnation after ending the previous one; `config` is the run's."""

    def __init__(self, model: Path, folder: Path) -> None:
        self._settings = [
            f"model.path={model}",
            f"run.folder={folder}",
            "trainer.groups_per_step=1",
            f"trainer.samples_per_group={SAMPLES}",
            "trainer.max_staleness=4",
            "trainer.eval_rollouts=0",
            f"trainer.checkpoint_steps={PERIOD_STEPS}",
            "trainer.max_logprob_gap=100",
            "trainer.max_token_gap=100",
        ]
        self._router = FakeRouter()
        self._life: TrainerIncarnation | None = None

    def __call__(
        self, journal: JournalConfig, *settings: str, allocator: LocalAllocator | None = None
    ) -> TrainerIncarnation:
        """Begin with the run's settings, overridden by these."""
        if self._life:
            self._life.end()
            self._life = None
        config = load_config(None, [*self._settings, *settings])
        self._life = TrainerIncarnation(config, journal, self._router, allocator)
        return self._life

    def close(self) -> None:
        if self._life:
            self._life.end()
        self._router.hub.close()


async def bring(
    policy_version: int, folder: Path, probe: Probe, parts: tuple[SharedSegment, ...]
) -> PublishReport:
    del folder, probe, parts
    return PublishReport(
        policy_version=policy_version, updated=(), failed=(), wall_s=0.0, gap_s=0.0
    )
