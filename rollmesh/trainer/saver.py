"""Makes checkpoints when they are due, and lets the journal release what they cover.

- A checkpoint is of one moment between two steps; no moment is saved twice at the end of a run.
- The journal keeps everything that only a checkpoint covers which is not durable yet.
- The loop waits only for the last checkpoint, and for one before an evaluation.
"""

import time

import msgspec

from rollmesh.core.errors import UserError
from rollmesh.serve.client.journal_entries import StateSaved, num_in
from rollmesh.trainer.checkpoints.recovery_plan import CheckpointSchedule, LoopState
from rollmesh.trainer.checkpoints.store import MODEL_FOLDER, SavedCheckpoint
from rollmesh.trainer.deps import TrainerDeps

WAIT_S = 1.0
"""Interval between polls while waiting for a checkpoint."""


class CheckpointSaver:
    """Makes checkpoints of the train loop's state."""

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
