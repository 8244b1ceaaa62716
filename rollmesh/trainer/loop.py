"""The train loop: ask, collect, take a batch, step, publish, record; until done or told to stop.

    REDOING -> PUBLISHING -> MEASURING -> TRAINING -> ENDED   (a stop leads to ENDED from anywhere)

Invariants: what a step consumes is in the journal before the step begins; what the journal holds
beyond the newest checkpoint is done again, each step with its own groups, before anything is
published; a step never waits for its publication, only the next publication does; generation goes
on while a step runs, since asks are made before it; a step ends when nothing of its batch is held
here, and while the loop waits for the next one, what it freed goes back to the system. Driven by
process.py, on the process's main thread.
"""

import collections
import contextlib
import itertools
import math
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rollmesh.core.config import Config
from rollmesh.core.errors import JournalError, NoRoom, RankGone, UserError, kind_and_place
from rollmesh.core.heap import Heap
from rollmesh.core.logs import get_logger
from rollmesh.engine.shared_memory import SharedSegment
from rollmesh.serve.client.journal_entries import NOT_COUNTED, StepTaken
from rollmesh.serve.client.samples import sibling_rewards
from rollmesh.trainer.algorithms.advantages import rewards_equal
from rollmesh.trainer.algorithms.optimizer import MAX_SKIPPED, skipped_too_often
from rollmesh.trainer.algorithms.step_report import StepReport
from rollmesh.trainer.checkpoints.recovery_plan import RecoveryPlan
from rollmesh.trainer.deps import TrainerDeps
from rollmesh.trainer.pacing.accounting import step_means
from rollmesh.trainer.pacing.pacer import Batch
from rollmesh.trainer.pacing.versions import spans_versions
from rollmesh.trainer.reports.exactness import FaultyEngineDetector, GapFindings, find_gaps
from rollmesh.trainer.reports.fencing import FenceRequested
from rollmesh.trainer.reports.records import restarts_of
from rollmesh.trainer.reports.summary import share, write_summary
from rollmesh.trainer.saver import CheckpointSaver
from rollmesh.trainer.weights.folder import RefusalMonitor

log = get_logger()

TRIM_S = 3.0
"""Between two times that free memory is given back; of a model that trains it takes 25 ms."""
NUM_NAMED = 4
"""Masked rollouts that a log line names."""
NOTE_AGAIN_S = 0.5
"""Between two times that anything is given to a disk that refuses it."""
COLLECT_S = 0.02
"""How long to wait for arrivals before looking at everything else again."""
COUNT_AGAIN_S = 1.0
"""Time between two times that summary.json is written while the run goes on."""
LEVEL_STEPS = 10
"""Steps in a row without a group whose rewards differ, after which the log warns."""
NO_GROUP_DIFFERS = "no group differs: in each group of the last 10 steps all rewards were equal"
MAKE_DIFFER = "nothing is learned: check what the environment's score returns, or its tasks"
UNTRAINED = -1
"""The step of what the untrained policy is measured by, in the books."""
MEASURE_S = 0.2
"""The same while an evaluation runs, beside which nothing waits."""


class TrainLoop:
    """One run."""

    def __init__(self, config: Config, parts: TrainerDeps, stop: threading.Event) -> None:
        self._config = config
        self._parts = parts
        self._stop = stop
        self._suspicion = FaultyEngineDetector()
        self._refusals = RefusalMonitor(parts.records, config.publish.accept_timeout_s)
        self._saver = CheckpointSaver(parts, config.trainer.checkpoint_steps)
        # Rows, as well as notes: a checkpoint under way may be what fills the disk.
        parts.records.set_retry(self._tries_again)
        self._heap = Heap()
        self._trimmed_s = -math.inf
        self._counted_s = -math.inf
        self._num_skipped_in_row = 0
        """Optimiser steps since the last one that changed the weights."""
        self._num_level_steps = 0
        """Steps in a row in which no group's rewards differed."""
        self._may_trim_s = math.inf
        """When that is worth its time again; not before a step."""

    def run(self, recovery: RecoveryPlan) -> bool:
        """Go on from there: do again what is not in the weights, measure the untrained policy,
        train until `num_steps` steps are done, save. Whether they are."""
        self._saver.resume_from(recovery.saved)
        if recovery.next_step and self._parts.tally.measured:
            self._end_evaluation()  # all of it was there before the first step
        named = {step: each for each, step in recovery.step_of_version.items()}
        if not all(self._redo(again, recovery, named.get(again.step)) for again in recovery.redo):
            return False  # stopped: checkpoints and journal hold what the next life needs
        num_done, num_steps = recovery.next_step, self._config.trainer.num_steps
        # Whatever the engines were started with: from here on they sample from our weights.
        self._publish(num_done)
        self._parts.gpu_lease.release_until_step()
        self._await_publication()
        if num_done or self._has_measured():
            num_done += sum(1 for _ in itertools.takewhile(self._do, range(num_done, num_steps)))
            self._write_counts()  # what comes next may take longer than launch waits
            self._saver.finish(num_done)
        is_done = num_done >= num_steps
        if is_done:
            self._parts.pacer.cancel_open("its run is done")
        return is_done

    def _redo(self, again: StepTaken, recovery: RecoveryPlan, policy_version: int | None) -> bool:
        """A step that an earlier life took; False where the run is to end before it.

        The weights are known by the name that they had: whose gaps are exact depends on it.
        """
        if self._stop.is_set() or not self._may_train(again.step):
            return False
        self._parts.policy.set_policy_version(policy_version)
        self._parts.client.redo.begun(again.step, self._tries_again)
        self._train_again(again, recovery)
        self._parts.client.redo.ended(again.step, again=self._tries_again)
        self._parts.policy.end_step(again.step)
        # So that a life that ends before the redo does leaves less of it to the next.
        self._saver.after_step(again.step + 1)
        return True

    def _train_again(self, again: StepTaken, recovery: RecoveryPlan) -> None:
        batch = self._parts.pacer.retake(again, recovery.results)
        if batch:
            self._record(batch, self._train(batch, 0.0))

    def _do(self, step: int) -> bool:
        """One step; False where the run is to end before it."""
        # A call of its own, with which its batch goes, so that it can be freed everywhere.
        was_done = self._train_next(step)
        if was_done:
            self._parts.policy.end_step(step)
            self._saver.after_step(step + 1)
        return was_done

    def _train_next(self, step: int) -> bool:
        started_s = time.monotonic()
        batch = self._next_batch(step)
        if batch is None or not self._may_train(step):
            return False
        wait_s = time.monotonic() - started_s
        self._parts.client.note_step(step, batch.group_ids(), batch.oldest_step, self._tries_again)
        told = self._train(batch, wait_s)
        if (step + 1) % self._config.publish.every_steps == 0:
            self._publish(step + 1)
        self._record(batch, told)
        return True

    def _has_measured(self) -> bool:
        """Whether the untrained policy is known, if it is to be; not where the run was stopped."""
        num_rollouts, tally = self._config.trainer.eval_rollouts, self._parts.tally
        if not num_rollouts or tally.reward_untrained is not None:
            return True
        pacer, gpu_lease = self._parts.pacer, self._parts.gpu_lease
        while num_to_come := self._num_to_measure(num_rollouts):
            if self._stop.is_set():
                return False
            if gpu_lease.may_request(UNTRAINED, num_to_come, "eval"):
                pacer.measure(num_rollouts)
            self._saver.poll(0)  # a full journal holds asks back until there is one
            self._look_at_publication(0.0)
            pacer.collect(MEASURE_S)
        self._end_evaluation()
        self._saver.save(0)
        return True

    def _num_to_measure(self, num_rollouts: int) -> int:
        """Of an evaluation of so many, those that have not ended or are still to be asked for."""
        num_left = num_rollouts - self._parts.tally.num_evals
        return self._parts.pacer.lifecycle.num_measuring + max(0, num_left)

    def _end_evaluation(self) -> None:
        """Record the mean reward of the untrained policy."""
        self._parts.records.step({"step": UNTRAINED} | self._parts.tally.end_evaluation())

    def _next_batch(self, step: int) -> Batch | None:
        pacer, trainer, gpu_lease = self._parts.pacer, self._config.trainer, self._parts.gpu_lease
        while not self._stop.is_set():
            self._look_at_publication(0.0)
            self._saver.poll(step)
            batch = pacer.take(step)
            num_to_come = self._num_to_come(step + bool(batch))
            gpu_lease.finish_step(step, num_to_come, is_next_there=batch is not None)
            # Before the step, so that workers are busy while it computes.
            if gpu_lease.may_request(step, num_to_come):
                num_steps_left = trainer.num_steps - step - bool(batch)
                pacer.ask(num_steps_left * trainer.groups_per_step)
            if batch:
                return batch
            self._trim(time.monotonic())
            pacer.collect(COLLECT_S)
        return None

    def _num_to_come(self, step: int) -> int:
        """Rollouts that are to come for this step and, as far as may be known, for later ones."""
        trainer = self._config.trainer
        return self._parts.pacer.num_to_come((trainer.num_steps - step) * trainer.groups_per_step)

    def _may_train(self, step: int) -> bool:
        """Once the GPUs for it are there; not where the run is to end meanwhile."""
        while not self._parts.gpu_lease.may_train(step):
            if self._stop.is_set():
                return False
            self._saver.settle()
            self._look_at_publication(0.0)
        return True

    def _trim(self, now_s: float) -> None:
        """Have the system take back what steps have freed."""
        if now_s >= self._may_trim_s:
            self._heap.trim()
            self._trimmed_s, self._may_trim_s = now_s, math.inf

    def _train(self, batch: Batch, wait_s: float) -> dict[str, Any]:
        """What is told of the step."""
        started_s = time.monotonic()
        made = self._parts.pacer.lifecycle.versions.steps
        with self._death_noted(batch.step):
            report = self._parts.policy.step(batch.samples(), batch.step, step_of_version=made)
        step_s = time.monotonic() - started_s
        self._num_skipped_in_row = report.num_skipped_in_row
        self._parts.tally.num_skipped += report.num_skipped
        if report.num_skipped:
            log.warning(
                "step.skipped",
                step=batch.step,
                num=report.num_skipped,
                why=f"step {batch.step}: the loss or the gradient was not finite",
                fix=f"the weights stay as they were; {MAX_SKIPPED} in a row end the run",
            )
        # Before the weights are published: an engine is fenced for those that it has now.
        findings = self._look_at_gaps(batch, report)
        times = {"wait_s": round(wait_s, 4), "step_s": round(step_s, 4)}
        return report.figures() | {"exactness": findings.rows()} | times

    @contextlib.contextmanager
    def _death_noted(self, step: int) -> Iterator[None]:
        """Write down which exception ended `step` and where.

        A step that ends every trainer alike is not redone forever. A UserError is the user's to
        fix, and the loss of a rank may have any cause, so neither counts.
        """
        try:
            yield
        except Exception as error:
            is_counted = not isinstance(error, UserError | RankGone)
            with contextlib.suppress(JournalError):
                self._parts.client.redo.ended(
                    step, kind_and_place(error) if is_counted else NOT_COUNTED
                )
            raise

    def _publish(self, num_steps: int) -> None:
        weights = self._parts.weights
        self._await_publication()
        if weights.is_publishing:
            return
        policy, folder = self._parts.policy, weights.next_folder()
        self._parts.pacer.publishing(weights.policy_version, num_steps)
        # Before there is a folder of that name: engines of a later life may begin with it.
        self._parts.client.note_published(weights.policy_version, num_steps, self._tries_again)
        parts = self._export(folder, weights.policy_version)
        if parts is not None:
            weights.publish(num_steps, folder, parts, self._parts.bring, policy.probe())

    def _export(self, folder: Path, policy_version: int) -> tuple[SharedSegment, ...] | None:
        """As the policy does; a full disk is waited for. None where the run is to end meanwhile."""
        is_told = False
        while True:
            try:
                return self._parts.policy.export(folder, policy_version)
            except NoRoom as error:
                if not is_told:
                    is_told = True
                    log.error("weights.wait", error=str(error), fix="make room; nothing is lost")
            if not self._tries_again():
                return None

    def _await_publication(self) -> None:
        """Until it is over, or the run is to end: it may be waiting for room on the disk, which a
        checkpoint that ends makes."""
        while self._parts.weights.is_publishing and not self._stop.is_set():
            self._look_at_publication(timeout_s=0.5)
            self._saver.settle()

    def _tries_again(self) -> bool:
        """What a full disk has refused, once there may be room; not where the run is to end."""
        is_stopped = self._stop.wait(NOTE_AGAIN_S)
        self._saver.settle()
        return not is_stopped

    def _look_at_publication(self, timeout_s: float) -> None:
        weights = self._parts.weights
        step = weights.settled(timeout_s)
        if step is not None:
            self._parts.pacer.published(step)
        self._refusals.observe(weights.refusal, all_asleep=weights.fleet.all_asleep)

    def _look_at_gaps(self, batch: Batch, report: StepReport) -> GapFindings:
        """Book them, and say which samples were masked and which engines are not to be trusted."""
        samples, bound = batch.samples(), self._config.trainer.max_logprob_gap
        findings = find_gaps(samples, report.gaps, report.held_policy_version, bound)
        self._parts.tally.exactness.add(findings)
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
            self._parts.fence(FenceRequested(fault.engine, fault.policy_version, fault.why))
        return findings

    def _write_counts(self) -> None:
        """Write summary.json as it is now, for a trainer that is killed before its end."""
        self._counted_s = time.monotonic()
        tally, folder = self._parts.tally, self._parts.records.folder
        tally.num_open = self._parts.pacer.num_open()
        with contextlib.suppress(OSError):  # a full disk: the end tries again, and says so
            write_summary(folder, tally.summary() | restarts_of(folder))

    def _count_equal(self, batch: Batch) -> int:
        """Count the groups whose siblings all have the same reward; warn where no group differs."""
        num_groups = len(batch.groups)
        num_equal = sum(rewards_equal(sibling_rewards(group.record)) for group in batch.groups)
        tally = self._parts.tally
        tally.num_groups += num_groups
        tally.num_equal_groups += num_equal
        self._num_level_steps = self._num_level_steps + 1 if num_equal == num_groups else 0
        if self._num_level_steps == LEVEL_STEPS:
            log.warning("rewards.equal", step=batch.step, why=NO_GROUP_DIFFERS, fix=MAKE_DIFFER)
        return num_equal

    def _record(self, batch: Batch, told: dict[str, Any]) -> None:
        samples, pacer = batch.samples(), self._parts.pacer
        tally = self._parts.tally
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
        self._parts.records.step(row | told)
        times = {name: told[name] for name in ("wait_s", "step_s")}
        log.info("step.trained", step=batch.step, reward=figures["reward"], **times)
        pacer.trained(batch)
        for group in batch.groups:
            self._parts.gpu_lease.report_moved(group.record)
        self._may_trim_s = self._trimmed_s + TRIM_S
        self._parts.records.flush()
        if time.monotonic() - self._counted_s >= COUNT_AGAIN_S:
            self._write_counts()
        if self._num_skipped_in_row >= MAX_SKIPPED:
            raise skipped_too_often(self._num_skipped_in_row, batch.step)
