"""The train loop: ask, collect, take a batch, step, publish, record; until done or told to stop.

    PUBLISHING -> MEASURING -> TRAINING -> ENDED          (a stop leads to ENDED from anywhere)

Invariants: what a step consumes is in the journal before the step begins; a step never waits for
its publication, only the next publication does; generation goes on while a step runs, since asks
are made before it; a step ends when nothing of its batch is held here, and while the loop waits for
the next one, what it freed goes back to the system. Driven by process.py, on the process's main
thread.
"""

import collections
import math
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from rollmesh.core.config import Config
from rollmesh.core.heap import Heap
from rollmesh.core.logs import get_logger
from rollmesh.serve.client.client import RolloutClient
from rollmesh.serve.client.samples import Sample
from rollmesh.trainer.exactness import Findings, find
from rollmesh.trainer.fencing import FenceAsked
from rollmesh.trainer.pacer import Batch, Pacer, spans_versions, successes_of
from rollmesh.trainer.policy import StepReport
from rollmesh.trainer.publisher import Probe
from rollmesh.trainer.records import RunRecords, Tally, mean, share
from rollmesh.trainer.rooms import Room
from rollmesh.trainer.suspicion import Suspicion
from rollmesh.trainer.weights import Bring, Weights

log = get_logger()

TRIM_S = 3.0
"""Between two times that free memory is given back; of a model that trains it takes 25 ms."""
NUM_NAMED = 4
"""Masked rollouts that a log line names."""
COLLECT_S = 0.02
"""How long to wait for arrivals before looking at everything else again."""


class Trainee(Protocol):
    """A policy, in this process or on ranks of its own."""

    @property
    def room(self) -> Room:
        """Where it wants samples to lie."""

    def step(self, samples: Sequence[Sample], step: int) -> StepReport:
        """Train once on a batch; the samples stay until the step ends."""

    def end_step(self, step: int) -> None:
        """Nothing here looks at the samples of `step` any more: they may be freed everywhere."""

    def save(self, folder: Path, policy_version: int | None = None) -> None:
        """Write the weights, from now on known as `policy_version`, or as none."""

    def probe(self) -> Probe:
        """What the weights held now say of a fixed text."""

    def close(self) -> None:
        """It is not needed any more."""


class Parts(msgspec.Struct):
    """What the loop drives."""

    client: RolloutClient
    pacer: Pacer
    policy: Trainee
    weights: Weights
    bring: Bring
    records: RunRecords
    tally: Tally
    fence: Callable[[FenceAsked], None]
    """Have an engine fenced; returns at once."""


class TrainLoop:
    """One run."""

    def __init__(self, config: Config, parts: Parts, stop: threading.Event) -> None:
        self._config = config
        self._parts = parts
        self._stop = stop
        self._suspicion = Suspicion()
        self._heap = Heap()
        self._trimmed_s = -math.inf
        self._may_trim_s = math.inf
        """When that is worth its time again; not before a step."""

    def run(self) -> None:
        """Measure the untrained policy, train `num_steps` steps, save the checkpoint."""
        trainer = self._config.trainer
        # Whatever the engines were started with: from here on they sample from our weights.
        self._publish(num_steps=0)
        while self._parts.weights.is_publishing and not self._stop.is_set():
            self._look_at_publication(timeout_s=0.5)
        if trainer.eval_rollouts:
            self._measure(trainer.eval_rollouts)
        all(self._do(step) for step in range(trainer.num_steps))
        self._checkpoint()

    def _do(self, step: int) -> bool:
        """One step; False where the run is to end before it."""
        # A call of its own, with which its batch goes, so that it can be freed everywhere.
        was_done = self._train_next(step)
        if was_done:
            self._parts.policy.end_step(step)
        return was_done

    def _train_next(self, step: int) -> bool:
        started_s = time.monotonic()
        batch = self._next_batch(step)
        if batch:
            self._train(batch, time.monotonic() - started_s)
        return batch is not None

    def _measure(self, num_rollouts: int) -> None:
        success = mean(self._parts.pacer.evaluate(num_rollouts, self._stop))
        self._parts.tally.success_untrained = success
        self._parts.records.step({"step": -1, "success_untrained": success})
        self._parts.records.flush()

    def _next_batch(self, step: int) -> Batch | None:
        pacer, trainer = self._parts.pacer, self._config.trainer
        while not self._stop.is_set():
            self._look_at_publication(0.0)
            batch = pacer.take(step)
            # Before the step, so that workers are busy while it computes.
            num_steps_left = trainer.num_steps - step - bool(batch)
            pacer.ask(num_steps_left * trainer.groups_per_step)
            if batch:
                return batch
            self._trim(time.monotonic())
            pacer.collect(COLLECT_S)
        return None

    def _trim(self, now_s: float) -> None:
        """Have the system take back what steps have freed."""
        if now_s >= self._may_trim_s:
            self._heap.trim()
            self._trimmed_s, self._may_trim_s = now_s, math.inf

    def _train(self, batch: Batch, wait_s: float) -> None:
        started_s = time.monotonic()
        self._parts.client.note_step(batch.step, batch.group_ids())
        report = self._parts.policy.step(batch.samples(), batch.step)
        step_s = time.monotonic() - started_s
        # Before the weights are published: an engine is fenced for those that it has now.
        findings = self._look_at_gaps(batch, report)
        num_steps = batch.step + 1
        if num_steps % self._config.publish.every_steps == 0:
            self._publish(num_steps)
        times = {"wait_s": round(wait_s, 4), "step_s": round(step_s, 4)}
        self._record(batch, report.figures() | {"exactness": findings.rows()} | times)
        self._parts.pacer.trained(batch)
        self._may_trim_s = self._trimmed_s + TRIM_S
        self._parts.records.flush()
        if num_steps % self._config.trainer.checkpoint_steps == 0:
            self._checkpoint()

    def _publish(self, num_steps: int) -> None:
        weights = self._parts.weights
        while weights.is_publishing and not self._stop.is_set():
            self._look_at_publication(timeout_s=0.5)
        if weights.is_publishing:
            return
        policy, folder = self._parts.policy, weights.next_folder()
        policy.save(folder, weights.policy_version)
        self._parts.pacer.publishing(weights.policy_version, num_steps)
        self._parts.client.note_published(weights.policy_version, num_steps)
        weights.publish(num_steps, folder, self._parts.bring, policy.probe())

    def _look_at_publication(self, timeout_s: float) -> None:
        step = self._parts.weights.settled(timeout_s)
        if step is not None:
            self._parts.pacer.published(step)

    def _checkpoint(self) -> None:
        self._parts.policy.save(self._config.run_folder() / "checkpoint")
        self._parts.client.free(self._parts.pacer.oldest_position())

    def _look_at_gaps(self, batch: Batch, report: StepReport) -> Findings:
        """Book them, and say which samples were masked and which engines are not to be trusted."""
        samples, bound = batch.samples(), self._config.trainer.max_logprob_gap
        findings = find(samples, report.gaps, report.held_policy_version, bound)
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
            self._parts.fence(FenceAsked(fault.engine, fault.policy_version, fault.why))
        return findings

    def _record(self, batch: Batch, told: dict[str, Any]) -> None:
        samples = batch.samples()
        successes = [s for group in batch.groups for s in successes_of(group.record)]
        success = mean(successes) or 0.0
        self._parts.tally.add_step(success)
        ages = collections.Counter(self._parts.pacer.age(s, batch.step) for s in samples)
        row: dict[str, Any] = {
            "step": batch.step,
            "policy_version": self._parts.weights.policy_version,
            "success": success,
            "reward": mean([sample.reward for sample in samples]),
            "num_samples": len(samples),
            "num_rollouts": sum(len(group.samples) for group in batch.groups),
            "age_histogram": {str(age): num for age, num in sorted(ages.items())},
            "max_age": max(ages),
            "share_two_versions": share(sum(map(spans_versions, samples)), len(samples)),
            "num_dropped": self._parts.tally.num_dropped,
        }
        self._parts.records.step(row | told)
        times = {name: told[name] for name in ("wait_s", "step_s")}
        log.info("step.trained", step=batch.step, success=round(success, 3), **times)
