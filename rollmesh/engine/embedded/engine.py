"""The engine without threads or sockets: requests and orders in, tokens out, one step at a time.

Owns the current weights and their policy version. Invariants: orders are obeyed between steps, so
every token was sampled by exactly one policy version; an update never cuts a request that was not
told to end or to wait. Driven by the step loop (steploop.py) and directly by tests.

    RUNNING --pause--> PAUSED --resume--> RUNNING
    HELD --release--> RELEASED --retake--> BARE (no weights) --update--> HELD

A pause in mode `abort` ends all requests, `retract` sends them back to the queue without their
memory, `in_place` leaves them where they are; what arrives while paused waits. The modes and what
is allowed in each are SGLang's (its /pause_generation).
"""

import enum
from collections.abc import Callable

import msgspec

from rollmesh.engine.embedded.memory import Memory
from rollmesh.engine.embedded.model import Model
from rollmesh.engine.embedded.request import QUEUE_FULL, Progress, Request
from rollmesh.engine.embedded.runner import Runner
from rollmesh.engine.embedded.scheduler import Scheduler


class Pace(enum.Enum):
    """Whether steps are made."""

    RUNNING = "running"
    PAUSED = "paused"


class Tenure(enum.Enum):
    """Whether the engine has its memory."""

    HELD = "held"
    RELEASED = "released"
    BARE = "bare"
    """Taken again, and without weights."""


class PauseMode(enum.StrEnum):
    """What a pause does to requests that are under way."""

    ABORT = "abort"
    RETRACT = "retract"
    IN_PLACE = "in_place"


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes that are fixed when the engine starts."""

    num_slots: int = 65_536
    """Tokens whose keys and values fit in memory."""
    max_running: int = 256
    """Requests that generate at the same time."""
    max_step_tokens: int = 512
    """Prompt tokens that one step computes beside the decoding requests."""
    max_queued: int | None = None
    """Requests that may wait; more are refused at once. None for no limit."""


class Update(msgspec.Struct, frozen=True):
    """New weights, loaded and waiting for the moment to take over."""

    model: Model
    policy_version: str | None
    """None keeps the present name."""
    flushes: bool
    """Whether all prefixes are forgotten with the old weights, as they should be."""
    when_done: Callable[[str], None]
    """Told once: '' if the weights took over, else why not."""


class Engine:
    """Scheduler, memory and runner around one model."""

    def __init__(self, model: Model, limits: Limits, policy_version: str) -> None:
        self.limits = limits
        self.policy_version = policy_version
        self.memory = Memory(model.architecture, model.dtype, limits.num_slots, limits.max_running)
        self.scheduler = Scheduler(self.memory, limits.max_step_tokens)
        self.runner = Runner(model, self.memory)
        self.pace = Pace.RUNNING
        self.tenure = Tenure.HELD
        self._update: Update | None = None
        self._held: list[Request] = []
        """Arrived while an update waited for those before them to end."""
        self._progress: list[Progress] = []

    @property
    def has_work(self) -> bool:
        """Whether a step would compute something."""
        may_step = self.pace is Pace.RUNNING and self.tenure is Tenure.HELD
        return may_step and not self.scheduler.is_idle

    def step(self) -> list[Progress]:
        """Compute one batch; what readers should know, of this step and of orders before it."""
        if self.has_work:
            batch = self.scheduler.schedule()
            sampled = self.runner.run(batch)
            self._progress += self.scheduler.settle(batch, sampled, self.policy_version)
            self._update_when_drained()
        progress, self._progress = self._progress, []
        return progress

    def submit(self, request: Request) -> None:
        """Queue `request`, or end it at once if too many wait already."""
        limit = self.limits.max_queued
        if limit is not None and len(self.scheduler.waiting) + len(self._held) >= limit:
            self._progress.append(Progress(request, 0, self.policy_version, QUEUE_FULL))
        elif self._update is None:
            self.scheduler.waiting.append(request)
        else:
            self._held.append(request)

    def abort(self, rid: str | None) -> None:
        """End the request of that id, or all; unknown ids are ignored, as SGLang does."""
        self.scheduler.waiting.extend(self._held)
        self._held.clear()
        self._progress += self.scheduler.abort(
            lambda request: rid is None or request.rid == rid, self.policy_version
        )
        self._update_when_drained()

    def pause(self, mode: PauseMode) -> None:
        """Make no more steps; `mode` says what becomes of requests under way."""
        self.pace = Pace.PAUSED
        if mode is PauseMode.ABORT:
            self.abort(None)
        elif mode is PauseMode.RETRACT:
            self.scheduler.retract_all()
        self._update_when_drained()

    def resume(self) -> None:
        """Go on after a pause; nothing if there was none."""
        self.pace = Pace.RUNNING

    def flush(self) -> bool:
        """Forget all prefixes; False, and nothing done, while requests run or are about to."""
        waits = self.scheduler.waiting and self.has_work
        if self.scheduler.running or waits:
            return False
        self.memory.reset()
        return True

    def release(self) -> str:
        """Give up the memory of weights, keys and values; '' or why not. Again does nothing."""
        if self.tenure is Tenure.RELEASED:
            return ""
        if self._update is not None or not self.flush():
            return "release_memory_occupation should be called only when no ongoing request"
        self.tenure = Tenure.RELEASED
        self.memory.release_slots()
        self.runner.model.drop_weights()
        return ""

    def retake(self) -> str:
        """Have room for keys and values again; the weights are gone until an update brings some."""
        if self.tenure is Tenure.RELEASED:
            self.tenure = Tenure.BARE
            self.memory.retake_slots()
        return ""

    def rename(self, policy_version: str) -> None:
        """What it serves is called so from the next token on."""
        self.policy_version = policy_version

    def update(self, update: Update) -> None:
        """Take over new weights: at once if paused or idle, else when what is under way has ended.

        Requests that arrive in between wait for the new weights.
        """
        if self._update is not None:
            update.when_done("another weight update is waiting")
            return
        if self.tenure is Tenure.RELEASED:
            update.when_done("its memory is released; resume_memory_occupation comes first")
            return
        self._update = update
        self._update_when_drained()

    def _update_when_drained(self) -> None:
        update = self._update
        if update is None or self.has_work:
            return
        self._update = None
        update.when_done(self._swap(update))
        self.scheduler.waiting.extend(self._held)
        self._held.clear()

    def _swap(self, update: Update) -> str:
        """Make the swap; '' or why it was refused."""
        assert update.model.architecture == self.runner.model.architecture, "memory is of its shape"
        if update.flushes and not self.flush():
            return (
                "cannot flush the cache while paused requests hold it; ask with flush_cache false"
            )
        self.runner.model = update.model
        self.tenure = Tenure.HELD
        if update.policy_version is not None:
            self.policy_version = update.policy_version
        return ""
