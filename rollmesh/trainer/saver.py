"""Makes savepoints as they are due: what the loop knows then, and what the journal then lets go of.

Invariants: what is saved is of one moment between two steps, and no moment is saved twice at a
run's end; the journal lets go of nothing that only a savepoint knows which is not durable yet; the
loop waits for none but the last, and for one that an evaluation stands before. Driven by loop.py.
"""

import time

import msgspec

from rollmesh.core.errors import UserError
from rollmesh.serve.client.journal_entries import StateSaved, num_in
from rollmesh.trainer.deps import TrainerDeps
from rollmesh.trainer.savepoints.due import Due
from rollmesh.trainer.savepoints.shelf import CHECKPOINT, Saved
from rollmesh.trainer.savepoints.state import LoopState

WAIT_S = 1.0
"""Between two looks at one that is waited for."""


class Saver:
    """See the module."""

    def __init__(self, parts: TrainerDeps, period_steps: int) -> None:
        self._parts = parts
        self._period_steps = period_steps
        self._due = Due(period_steps, 0)
        self._newest: Saved | None = None

    def go_on(self, saved: StateSaved) -> None:
        """Begin with this savepoint: what has left since then may be worth another."""
        self._due = Due(self._period_steps, num_in(saved.gone))

    def stepped(self, num_steps: int) -> None:
        """So many steps are done."""
        self._due.stepped(num_steps)
        self.tend(num_steps)

    def tend(self, num_steps: int) -> None:
        """Between two steps: begin what is due, unless one is being written, and see what is."""
        self.settle()
        if self._is_due() and not self._parts.savepoints.is_writing:
            self._begin(num_steps)

    def settle(self, timeout_s: float = 0.0) -> None:
        """See what has become of one that is being written: as it is durable the journal lets go of
        what it knows, and what could not be written is removed, so either makes room."""
        saved = self._parts.savepoints.settled(timeout_s)
        if saved is None:
            return
        self._newest, state = saved, saved.state
        self._due.settled(num_in(state.ended))
        self._parts.client.note_saved(state.told())

    def save(self, num_steps: int) -> None:
        """Now, and return when it is durable, or was refused."""
        self._wait()
        self._newest = None
        self._begin(num_steps)
        self._wait()

    def finish(self, num_steps: int) -> None:
        """The run ends with these weights: leave them for people, too. UserError where the disk
        refuses."""
        self._wait()
        if self._newest is None or self._newest.state != self._state(num_steps):
            self.save(num_steps)
        folder = self._parts.records.folder
        if self._newest is None:
            raise UserError(
                f"{folder}: its last savepoint could not be written; logs/trainer.log says why; "
                "fix that, then --resume"
            )
        if self._newest.model is None:
            self._parts.policy.save(folder / CHECKPOINT)

    def _is_due(self) -> bool:
        num_gone, is_full = self._parts.pacer.lifecycle.num_gone, self._parts.client.is_journal_full
        return self._due.is_now(num_gone, time.monotonic(), is_full=is_full)

    def _begin(self, num_steps: int) -> None:
        self._due.begun(time.monotonic())
        self._parts.savepoints.begin(self._state(num_steps), self._parts.policy)

    def _wait(self) -> None:
        while self._parts.savepoints.is_writing:
            self.settle(WAIT_S)

    def _state(self, num_steps: int) -> LoopState:
        parts = self._parts
        return LoopState(
            num_steps=num_steps,
            policy_version=parts.weights.policy_version,
            step_of_version=dict(parts.pacer.lifecycle.versions.steps),
            num_tasks=parts.pacer.requester.num_drawn,
            ended=parts.pacer.lifecycle.gone,
            waiting=parts.pacer.lifecycle.to_ask_again,
            staleness=msgspec.to_builtins(parts.pacer.pacing, str_keys=True),
            tally=parts.tally.state(),
            offsets=parts.records.offsets(),
        )
