"""The train loop: request, collect, take a batch, step, publish, record; until done or stopped.

    REDOING -> PUBLISHING -> MEASURING -> TRAINING -> ENDED   (a stop leads to ENDED from anywhere)

- The groups of a step are in the journal before it begins. Steps of the journal beyond the newest
  checkpoint are redone with their own groups before anything is published.
- A step never waits for its publication; only the next publication does. Generation continues
  during a step, since requests are made before it.
- A step ends when the loop holds nothing of its batch; freed memory is then returned to the system
  while the loop waits for the next batch.
- The loop waits only for the last checkpoint, and for one before an evaluation.
"""

import collections
import contextlib
import itertools
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from rollmesh.core.config import Config
from rollmesh.core.errors import JournalError, NoRoom, RankGone, UserError, kind_and_place
from rollmesh.core.heap import Heap
from rollmesh.core.logs import get_logger
from rollmesh.engine.shared_memory import SharedSegment
from rollmesh.serve.client.client import RolloutClient
from rollmesh.serve.client.journal_entries import NOT_COUNTED, StateSaved, StepTaken, num_in
from rollmesh.serve.client.samples import Sample, sibling_rewards
from rollmesh.trainer.algorithms.advantages import rewards_equal
from rollmesh.trainer.algorithms.optimizer import MAX_SKIPPED, skipped_too_often
from rollmesh.trainer.algorithms.step_report import StepReport
from rollmesh.trainer.checkpoints.recovery_plan import CheckpointSchedule, LoopState, RecoveryPlan
from rollmesh.trainer.checkpoints.store import (
    MODEL_FOLDER,
    Checkpointable,
    CheckpointStore,
    SavedCheckpoint,
)
from rollmesh.trainer.gpu_lease import ExclusiveGpus, GpuLease, Offloadable
from rollmesh.trainer.pacing.lifecycle import spans_versions
from rollmesh.trainer.pacing.pacer import Batch, Pacer, step_means
from rollmesh.trainer.pacing.ready_queue import SampleAllocator
from rollmesh.trainer.reports.exactness import (
    FaultyEngineDetector,
    FenceRequested,
    GapFindings,
    find_gaps,
)
from rollmesh.trainer.reports.records import RunRecords, Tally, restarts_of, share, write_summary
from rollmesh.trainer.weights.folder import PublishFn, RefusalMonitor, WeightVersions
from rollmesh.trainer.weights.verdicts import Probe


class TrainablePolicy(Checkpointable, Offloadable, Protocol):
    """A policy in this process, or on ranks."""

    @property
    def allocator(self) -> SampleAllocator:
        """Allocates samples where the policy reads them."""

    def step(
        self, samples: Sequence[Sample], step: int, *, step_of_version: Mapping[int, int]
    ) -> StepReport:
        """Train once on a batch, whose samples stay allocated until `end_step`. `step_of_version`
        has the number of train steps after which each policy version was made."""

    def end_step(self, step: int) -> None:
        """Free the samples of `step` everywhere; the caller no longer reads them."""

    def save(self, folder: Path) -> None:
        """Write the weights."""

    def export(self, folder: Path, policy_version: int) -> tuple[SharedSegment, ...]:
        """Copy the weights, `policy_version` from now on, to memory that transports can read until
        the next call; return nothing if they are in `folder` already. Raises NoRoom if the disk is
        full; the call may be repeated."""

    def set_policy_version(self, policy_version: int | None) -> None:
        """Set the version under which the weights held now were published, or None."""

    def probe(self) -> Probe:
        """Score a fixed text by the weights held now."""

    def close(self) -> None:
        """Free everything."""


class TrainerDeps(msgspec.Struct):
    """Components of the train loop."""

    client: RolloutClient
    pacer: Pacer
    policy: TrainablePolicy
    weights: WeightVersions
    bring: PublishFn
    records: RunRecords
    tally: Tally
    checkpoints: CheckpointStore
    fence: Callable[[FenceRequested], None]
    """Fence an engine, without waiting."""
    gpu_lease: GpuLease = ExclusiveGpus()


WAIT_S = 1.0
"""Interval between polls while waiting for a checkpoint."""


class CheckpointSaver:
    """Makes checkpoints when they are due, and lets the journal release what they cover.

    - A checkpoint is of one moment between two steps; no moment is saved twice at the end of a run.
    - The journal keeps everything that only a checkpoint covers which is not durable yet.
    """

    def __init__(self, deps: TrainerDeps, period_steps: int) -> None:
        self._deps = deps
        self._period_steps = period_steps
        self._schedule = CheckpointSchedule(period_steps, 0)
        self._newest: SavedCheckpoint | None = None

    def resume_from(self, saved: StateSaved) -> None:
        """Start from this checkpoint: groups that have left since may justify another."""
        self._schedule = CheckpointSchedule(self._period_steps, num_in(saved.gone))

    def after_step(self, num_steps: int) -> None:
        """Record that `num_steps` steps are done, and poll."""
        self._schedule.stepped(num_steps)
        self.poll(num_steps)

    def poll(self, num_steps: int) -> None:
        """Between two steps: begin a checkpoint if one is due and none is being written."""
        self.settle()
        if self._is_due() and not self._deps.checkpoints.is_writing:
            self._begin(num_steps)

    def settle(self, timeout_s: float = 0.0) -> None:
        """Process the checkpoint being written: once durable, the journal releases what it covers;
        if it failed, it is removed. Both free disk space."""
        saved = self._deps.checkpoints.settled(timeout_s)
        if saved is None:
            return
        self._newest, state = saved, saved.state
        self._schedule.settled(num_in(state.ended))
        self._deps.client.note_saved(state.to_journal())

    def save(self, num_steps: int) -> None:
        """Save now; return when the checkpoint is durable or has failed."""
        self._wait()
        self._newest = None
        self._begin(num_steps)
        self._wait()

    def finish(self, num_steps: int) -> None:
        """End the run with these weights, also as a model folder for users; UserError if the disk
        refuses."""
        self._wait()
        if self._newest is None or self._newest.state != self._state(num_steps):
            self.save(num_steps)
        folder = self._deps.records.folder
        if self._newest is None:
            raise UserError(
                f"{folder}: the last checkpoint could not be written; logs/trainer.log says why; "
                "fix the cause, then use --resume"
            )
        if self._newest.model is None:
            self._deps.policy.save(folder / MODEL_FOLDER)

    def _is_due(self) -> bool:
        num_gone, is_full = self._deps.pacer.lifecycle.num_gone, self._deps.client.is_journal_full
        return self._schedule.is_now(num_gone, time.monotonic(), is_full=is_full)

    def _begin(self, num_steps: int) -> None:
        self._schedule.begun(time.monotonic())
        self._deps.checkpoints.begin(self._state(num_steps), self._deps.policy)

    def _wait(self) -> None:
        while self._deps.checkpoints.is_writing:
            self.settle(WAIT_S)

    def _state(self, num_steps: int) -> LoopState:
        deps = self._deps
        return LoopState(
            num_steps=num_steps,
            policy_version=deps.weights.policy_version,
            step_of_version=dict(deps.pacer.lifecycle.versions.steps),
            num_tasks=deps.pacer.requester.num_drawn,
            ended=deps.pacer.lifecycle.gone,
            waiting=deps.pacer.lifecycle.to_ask_again,
            staleness=msgspec.to_builtins(deps.pacer.pacing, str_keys=True),
            tally=deps.tally.state(),
            offsets=deps.records.offsets(),
        )


log = get_logger()

TRIM_S = 3.0
"""Interval between returns of free memory to the system, which take 25 ms beside a large model."""
NUM_NAMED = 4
"""Masked rollouts named in a log line."""
NOTE_AGAIN_S = 0.5
"""Interval between tries to write to a full disk."""
COLLECT_S = 0.02
"""Longest wait for arrivals in one turn of the loop."""
COUNT_AGAIN_S = 1.0
"""Interval between writes of summary.json during the run."""
EQUAL_STEPS = 10
"""Steps in a row without different rewards in any group, after which a warning is logged."""
ALL_EQUAL = "in each group of the last 10 steps all rewards were equal"
EQUAL_FIX = "nothing is learned: check the environment's score and its tasks"
UNTRAINED = -1
"""Step number of the untrained policy in metrics.jsonl."""
MEASURE_S = 0.2
"""Longest wait for arrivals during an evaluation."""


class TrainLoop:
    """The loop of one run."""

    def __init__(self, config: Config, deps: TrainerDeps, stop: threading.Event) -> None:
        self._config = config
        self._deps = deps
        self._stop = stop
        self._suspicion = FaultyEngineDetector()
        self._refusals = RefusalMonitor(deps.records, config.publish.accept_timeout_s)
        self._saver = CheckpointSaver(deps, config.trainer.checkpoint_steps)
        # Records wait too: a checkpoint in progress may be what fills the disk.
        deps.records.set_retry(self._wait_for_room)
        self._heap = Heap()
        self._trimmed_s = -math.inf
        self._counted_s = -math.inf
        self._num_skipped_in_row = 0
        """Optimiser steps since the last one that changed the weights."""
        self._num_equal_steps = 0
        """Steps in a row in which each group's rewards were equal."""
        self._may_trim_s = math.inf
        """Earliest time of the next trim; infinite until a step."""

    def run(self, recovery: RecoveryPlan) -> bool:
        """Redo the steps of `recovery`, measure the untrained policy, train until `num_steps` steps
        are done, and save; return whether all steps are done."""
        self._saver.resume_from(recovery.saved)
        if recovery.next_step and self._deps.tally.measured:
            self._end_evaluation()  # it was complete before the first step
        named = {step: each for each, step in recovery.step_of_version.items()}
        if not all(self._redo(again, recovery, named.get(again.step)) for again in recovery.redo):
            return False  # stopped: checkpoints and journal have the state for the next process
        num_done, num_steps = recovery.next_step, self._config.trainer.num_steps
        # From here on all engines sample with these weights, whatever they were started with.
        self._publish(num_done)
        self._deps.gpu_lease.release_until_step()
        self._await_publication()
        if num_done or self._has_measured():
            num_done += sum(1 for _ in itertools.takewhile(self._do, range(num_done, num_steps)))
            self._write_counts()  # saving may take longer than launch waits
            self._saver.finish(num_done)
        is_done = num_done >= num_steps
        if is_done:
            self._deps.pacer.cancel_open("its run is done")
        return is_done

    def _redo(self, again: StepTaken, recovery: RecoveryPlan, policy_version: int | None) -> bool:
        """Redo a step that an earlier process took; return False if the run is stopped before it.

        The weights get the version that they had then, which decides whose gaps are exact.
        """
        if self._stop.is_set() or not self._may_train(again.step):
            return False
        self._deps.policy.set_policy_version(policy_version)
        self._deps.client.redo.begun(again.step, self._wait_for_room)
        self._train_again(again, recovery)
        self._deps.client.redo.ended(again.step, again=self._wait_for_room)
        self._deps.policy.end_step(again.step)
        # If this process ends during the redo, the next one has less to redo.
        self._saver.after_step(again.step + 1)
        return True

    def _train_again(self, again: StepTaken, recovery: RecoveryPlan) -> None:
        batch = self._deps.pacer.retake(again, recovery.results)
        if batch:
            self._record(batch, self._train(batch, 0.0))

    def _do(self, step: int) -> bool:
        """Do one step; return False if the run is stopped before it."""
        # In a call of its own, which drops the batch, so that it can be freed everywhere.
        was_done = self._train_next(step)
        if was_done:
            self._deps.policy.end_step(step)
            self._saver.after_step(step + 1)
        return was_done

    def _train_next(self, step: int) -> bool:
        started_s = time.monotonic()
        batch = self._next_batch(step)
        if batch is None or not self._may_train(step):
            return False
        wait_s = time.monotonic() - started_s
        self._deps.client.note_step(step, batch.group_ids(), batch.oldest_step, self._wait_for_room)
        row = self._train(batch, wait_s)
        if (step + 1) % self._config.publish.every_steps == 0:
            self._publish(step + 1)
        self._record(batch, row)
        return True

    def _has_measured(self) -> bool:
        """Measure the untrained policy, if configured; return False if the run is stopped."""
        num_rollouts, tally = self._config.trainer.eval_rollouts, self._deps.tally
        if not num_rollouts or tally.reward_untrained is not None:
            return True
        pacer, gpu_lease = self._deps.pacer, self._deps.gpu_lease
        while num_to_come := self._num_to_measure(num_rollouts):
            if self._stop.is_set():
                return False
            if gpu_lease.may_request(UNTRAINED, num_to_come, "eval"):
                pacer.measure(num_rollouts)
            self._saver.poll(0)  # a full journal blocks requests until a checkpoint
            self._poll_publication(0.0)
            pacer.collect(MEASURE_S)
        self._end_evaluation()
        self._saver.save(0)
        return True

    def _num_to_measure(self, num_rollouts: int) -> int:
        """Rollouts of an evaluation that have not ended, or are not requested yet."""
        num_left = num_rollouts - self._deps.tally.num_evals
        return self._deps.pacer.lifecycle.num_measuring + max(0, num_left)

    def _end_evaluation(self) -> None:
        """Record the mean reward of the untrained policy."""
        self._deps.records.step({"step": UNTRAINED} | self._deps.tally.end_evaluation())

    def _next_batch(self, step: int) -> Batch | None:
        pacer, trainer, gpu_lease = self._deps.pacer, self._config.trainer, self._deps.gpu_lease
        while not self._stop.is_set():
            self._poll_publication(0.0)
            self._saver.poll(step)
            batch = pacer.take(step)
            num_to_come = self._num_to_come(step + bool(batch))
            gpu_lease.finish_step(step, num_to_come, is_next_there=batch is not None)
            # Before the step, so that workers are busy during it.
            if gpu_lease.may_request(step, num_to_come):
                num_steps_left = trainer.num_steps - step - bool(batch)
                pacer.ask(num_steps_left * trainer.groups_per_step)
            if batch:
                return batch
            self._trim(time.monotonic())
            pacer.collect(COLLECT_S)
        return None

    def _num_to_come(self, step: int) -> int:
        """Rollouts expected for this step and, as far as known, for later ones."""
        trainer = self._config.trainer
        return self._deps.pacer.num_to_come((trainer.num_steps - step) * trainer.groups_per_step)

    def _may_train(self, step: int) -> bool:
        """Wait for the GPUs of `step`; return False if the run is stopped meanwhile."""
        while not self._deps.gpu_lease.may_train(step):
            if self._stop.is_set():
                return False
            self._saver.settle()
            self._poll_publication(0.0)
        return True

    def _trim(self, now_s: float) -> None:
        """Return memory that steps have freed to the system."""
        if now_s >= self._may_trim_s:
            self._heap.trim()
            self._trimmed_s, self._may_trim_s = now_s, math.inf

    def _train(self, batch: Batch, wait_s: float) -> dict[str, Any]:
        """Do the step, and return its row of metrics."""
        started_s = time.monotonic()
        made = self._deps.pacer.lifecycle.versions.steps
        with self._failure_recorded(batch.step):
            report = self._deps.policy.step(batch.samples(), batch.step, step_of_version=made)
        step_s = time.monotonic() - started_s
        self._num_skipped_in_row = report.num_skipped_in_row
        self._deps.tally.num_skipped += report.num_skipped
        if report.num_skipped:
            log.warning(
                "step.skipped",
                step=batch.step,
                num=report.num_skipped,
                why=f"step {batch.step}: the loss or the gradient was not finite",
                fix=f"none: the weights did not change; {MAX_SKIPPED} in a row end the run",
            )
        # Before the weights are published: a fence is for the weights that an engine has now.
        findings = self._check_gaps(batch, report)
        times = {"wait_s": round(wait_s, 4), "step_s": round(step_s, 4)}
        return report.figures() | {"exactness": findings.rows()} | times

    @contextlib.contextmanager
    def _failure_recorded(self, step: int) -> Iterator[None]:
        """Record which exception ended `step`, and where.

        A step that always ends the trainer is not redone forever. A UserError is for the user to
        fix, and the loss of a rank may have any cause, so neither counts.
        """
        try:
            yield
        except Exception as error:
            is_counted = not isinstance(error, UserError | RankGone)
            with contextlib.suppress(JournalError):
                self._deps.client.redo.ended(
                    step, kind_and_place(error) if is_counted else NOT_COUNTED
                )
            raise

    def _publish(self, num_steps: int) -> None:
        weights = self._deps.weights
        self._await_publication()
        if weights.is_publishing:
            return
        policy, folder = self._deps.policy, weights.next_folder()
        self._deps.pacer.publishing(weights.policy_version, num_steps)
        # Before the folder exists: engines of a later process may start with it.
        self._deps.client.note_published(weights.policy_version, num_steps, self._wait_for_room)
        parts = self._export(folder, weights.policy_version)
        if parts is not None:
            weights.publish(num_steps, folder, parts, self._deps.bring, policy.probe())

    def _export(self, folder: Path, policy_version: int) -> tuple[SharedSegment, ...] | None:
        """Export the weights, waiting while the disk is full; return None if the run is stopped."""
        is_logged = False
        while True:
            try:
                return self._deps.policy.export(folder, policy_version)
            except NoRoom as error:
                if not is_logged:
                    is_logged = True
                    log.error("weights.wait", error=str(error), fix="make room; nothing is lost")
            if not self._wait_for_room():
                return None

    def _await_publication(self) -> None:
        """Wait until it ends or the run is stopped; it may wait for room on the disk, which the end
        of a checkpoint makes."""
        while self._deps.weights.is_publishing and not self._stop.is_set():
            self._poll_publication(timeout_s=0.5)
            self._saver.settle()

    def _wait_for_room(self) -> bool:
        """Wait until the disk may have room; return False if the run is stopped."""
        is_stopped = self._stop.wait(NOTE_AGAIN_S)
        self._saver.settle()
        return not is_stopped

    def _poll_publication(self, timeout_s: float) -> None:
        weights = self._deps.weights
        step = weights.settled(timeout_s)
        if step is not None:
            self._deps.pacer.published(step)
        self._refusals.observe(weights.refusal, all_asleep=weights.fleet.all_asleep)

    def _check_gaps(self, batch: Batch, report: StepReport) -> GapFindings:
        """Record log-prob gaps; log masked samples, and fence engines that cannot be trusted."""
        samples, bound = batch.samples(), self._config.trainer.max_logprob_gap
        findings = find_gaps(samples, report.gaps, report.held_policy_version, bound)
        self._deps.tally.exactness.add(findings)
        if findings.masked:
            log.warning(
                "samples.masked",
                num=len(findings.masked),
                of=len(samples),
                policy_version=report.held_policy_version,
                max_gap=findings.max_gap,
                bound=bound,
                rollouts=[str(samples[at].rollout_id) for at in findings.masked[:NUM_NAMED]],
                **findings.only,
            )
        for fault in self._suspicion.judge(findings):
            log.warning("engine.distrusted", url=fault.engine, why=fault.why)
            self._deps.fence(FenceRequested(fault.engine, fault.policy_version, fault.why))
        return findings

    def _write_counts(self) -> None:
        """Write summary.json now, in case the trainer is killed."""
        self._counted_s = time.monotonic()
        tally, folder = self._deps.tally, self._deps.records.folder
        tally.num_open = self._deps.pacer.num_open()
        with contextlib.suppress(OSError):  # a full disk: the end of the run tries again
            write_summary(folder, tally.summary() | restarts_of(folder))

    def _count_equal(self, batch: Batch) -> int:
        """Count groups in which all rewards are equal; warn if all groups are, for EQUAL_STEPS."""
        num_groups = len(batch.groups)
        num_equal = sum(rewards_equal(sibling_rewards(group.record)) for group in batch.groups)
        tally = self._deps.tally
        tally.num_groups += num_groups
        tally.num_equal_groups += num_equal
        self._num_equal_steps = self._num_equal_steps + 1 if num_equal == num_groups else 0
        if self._num_equal_steps == EQUAL_STEPS:
            log.warning("rewards.equal", step=batch.step, why=ALL_EQUAL, fix=EQUAL_FIX)
        return num_equal

    def _record(self, batch: Batch, report: dict[str, Any]) -> None:
        samples, pacer = batch.samples(), self._deps.pacer
        tally = self._deps.tally
        figures = step_means((group.record for group in batch.groups), tally.rule)
        tally.add_step(figures["reward"], figures.get("success"))
        num_equal = self._count_equal(batch)
        ages = collections.Counter(pacer.lifecycle.versions.age([s], batch.step) for s in samples)
        made = pacer.lifecycle.versions.steps.items()
        row: dict[str, Any] = {
            "step": batch.step,
            "policy_version": max(each for each, step in made if step <= batch.step + 1),
            **figures,
            "frac_equal_groups": share(num_equal, len(batch.groups)),
            "num_samples": len(samples),
            "num_rollouts": sum(len(group.samples) for group in batch.groups),
            "age_histogram": {str(age): num for age, num in sorted(ages.items())},
            "max_age": max(ages),
            "share_two_versions": share(sum(map(spans_versions, samples)), len(samples)),
            "num_dropped": tally.num_dropped,
        }
        self._deps.records.step(row | report)
        times = {name: report[name] for name in ("wait_s", "step_s")}
        log.info("step.trained", step=batch.step, reward=figures["reward"], **times)
        pacer.trained(batch)
        for group in batch.groups:
            self._deps.gpu_lease.report_moved(group.record)
        self._may_trim_s = self._trimmed_s + TRIM_S
        self._deps.records.flush()
        if time.monotonic() - self._counted_s >= COUNT_AGAIN_S:
            self._write_counts()
        if self._num_skipped_in_row >= MAX_SKIPPED:
            raise skipped_too_often(self._num_skipped_in_row, batch.step)
