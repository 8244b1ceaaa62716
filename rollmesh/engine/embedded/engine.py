"""The engine: requests and commands in, tokens out, one step at a time; and the thread that steps
it.

    RUNNING --pause--> PAUSED --resume--> RUNNING
    HELD --release--> RELEASED --resume_memory--> BARE (no weights) --update--> HELD

- Engine has no threads or sockets; StepLoop owns it, and all access runs on its thread.
- Commands run between steps, so each token is sampled by exactly one policy version. An update
  never cuts a request that was not asked to end or to wait.
- A pause in mode `abort` ends all requests, `retract` returns them to the queue without memory,
  `in_place` keeps them; new requests wait. Modes and rules are SGLang's (/pause_generation).
- Progress is delivered in batches: one wake-up of the event loop per step.
"""

import asyncio
import enum
import queue
import threading
from collections.abc import Callable
from typing import TypeVar

import msgspec

from rollmesh.core.logs import get_logger
from rollmesh.engine.embedded.model import Model
from rollmesh.engine.embedded.request import QUEUE_FULL, Progress, Request
from rollmesh.engine.embedded.runner import ModelRunner
from rollmesh.engine.embedded.scheduler import Memory, Scheduler


class EngineRunState(enum.Enum):
    """Whether steps run."""

    RUNNING = "running"
    PAUSED = "paused"


class MemoryOccupation(enum.Enum):
    """Whether the engine holds its memory."""

    HELD = "held"
    RELEASED = "released"
    BARE = "bare"
    """Allocated again, without weights."""


class PauseMode(enum.StrEnum):
    """Effect of a pause on requests in progress."""

    ABORT = "abort"
    RETRACT = "retract"
    IN_PLACE = "in_place"


class EngineLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes that are fixed when the engine starts."""

    num_slots: int = 65_536
    """Tokens whose keys and values fit in memory."""
    max_running: int = 256
    """Requests that generate at the same time."""
    max_step_tokens: int = 512
    """Prompt tokens that one step computes besides the decoding requests."""
    max_queued: int | None = None
    """Requests that may wait; more are refused at once. None for no limit."""


class WeightUpdate(msgspec.Struct, frozen=True):
    """New weights that are loaded and wait for their swap."""

    model: Model
    policy_version: str | None
    """None keeps the current name."""
    flushes: bool
    """Whether cached prefixes are dropped with the old weights, as they should be."""
    when_done: Callable[[str], None]
    """Called once: '' if the weights took over, else the reason."""


class Engine:
    """Scheduler, memory and runner around one model."""

    def __init__(self, model: Model, limits: EngineLimits, policy_version: str) -> None:
        self.limits = limits
        self.policy_version = policy_version
        self.memory = Memory(model.architecture, model.dtype, limits.num_slots, limits.max_running)
        self.scheduler = Scheduler(self.memory, limits.max_step_tokens)
        self.runner = ModelRunner(model, self.memory)
        self.run_state = EngineRunState.RUNNING
        self.occupation = MemoryOccupation.HELD
        self._update: WeightUpdate | None = None
        self._held: list[Request] = []
        """Requests that arrived while an update waited for earlier ones to end."""
        self._progress: list[Progress] = []

    @property
    def has_work(self) -> bool:
        """Whether a step would compute something."""
        may_step = (
            self.run_state is EngineRunState.RUNNING and self.occupation is MemoryOccupation.HELD
        )
        return may_step and not self.scheduler.is_idle

    def step(self) -> list[Progress]:
        """Compute one batch; return the progress of this step and of commands before it."""
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
        """End the request with that id, or all; unknown ids are ignored, as in SGLang."""
        self.scheduler.waiting.extend(self._held)
        self._held.clear()
        self._progress += self.scheduler.abort(
            lambda request: rid is None or request.rid == rid, self.policy_version
        )
        self._update_when_drained()

    def pause(self, mode: PauseMode) -> None:
        """Stop stepping; `mode` decides about requests in progress."""
        self.run_state = EngineRunState.PAUSED
        if mode is PauseMode.ABORT:
            self.abort(None)
        elif mode is PauseMode.RETRACT:
            self.scheduler.retract_all()
        self._update_when_drained()

    def resume(self) -> None:
        """Continue after a pause; no effect without one."""
        self.run_state = EngineRunState.RUNNING

    def flush(self) -> bool:
        """Drop all cached prefixes; return False, without effect, while requests run or are about
        to."""
        waits = self.scheduler.waiting and self.has_work
        if self.scheduler.running or waits:
            return False
        self.memory.reset()
        return True

    def release(self) -> str:
        """Free the memory of weights, keys and values; return why it is refused, else ''.
        Idempotent."""
        if self.occupation is MemoryOccupation.RELEASED:
            return ""
        if self._update is not None or not self.flush():
            return "release_memory_occupation should be called only when no ongoing request"
        self.occupation = MemoryOccupation.RELEASED
        self.memory.release_slots()
        self.runner.model.drop_weights()
        return ""

    def resume_memory(self) -> str:
        """Allocate keys and values again; weights are missing until an update brings some."""
        if self.occupation is MemoryOccupation.RELEASED:
            self.occupation = MemoryOccupation.BARE
            self.memory.allocate_slots()
        return ""

    def rename(self, policy_version: str) -> None:
        """Name the weights differently from the next token on."""
        self.policy_version = policy_version

    def update(self, update: WeightUpdate) -> None:
        """Swap weights: at once if paused or idle, else when requests in progress have ended.

        Requests that arrive in between wait for the new weights.
        """
        if self._update is not None:
            update.when_done("another weight update is waiting")
            return
        if self.occupation is MemoryOccupation.RELEASED:
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

    def _swap(self, update: WeightUpdate) -> str:
        """Swap; return why it was refused, else ''."""
        assert update.model.architecture == self.runner.model.architecture, "memory is of its shape"
        if update.flushes and not self.flush():
            return (
                "cannot flush the cache while paused requests hold it; ask with flush_cache false"
            )
        self.runner.model = update.model
        self.occupation = MemoryOccupation.HELD
        if update.policy_version is not None:
            self.policy_version = update.policy_version
        return ""


Result = TypeVar("Result")
Command = Callable[[Engine], object]

log = get_logger()


class ProgressReader:
    """Progress of one request for its HTTP exchange; used on the event loop."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.latest: Progress | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def next(self) -> Progress:
        """Wait for and return the newest progress that was not returned yet."""
        if self.latest is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        assert self.latest is not None, "woken without progress"
        progress, self.latest = self.latest, None
        return progress

    def put(self, progress: Progress) -> None:
        """Replace older progress; the newer one includes it."""
        self.latest = progress
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class StepLoop:
    """Runs an engine in a thread of its own."""

    def __init__(self, engine: Engine, loop: asyncio.AbstractEventLoop) -> None:
        self._engine = engine
        self._loop = loop
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._readers: dict[str, ProgressReader] = {}
        self._thread = threading.Thread(target=self._run, name="step-loop")
        self.failed: asyncio.Future[None] = loop.create_future()
        """Completes with the error that ended the thread, if any."""

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread after its current step."""
        self._commands.put(None)
        self._thread.join()

    def knows(self, rid: str) -> bool:
        """Whether a request with that id is in progress."""
        return rid in self._readers

    def submit(self, request: Request) -> ProgressReader:
        """Queue `request`; the returned reader gets its progress."""
        reader = self._readers[request.rid] = ProgressReader(request)
        self._commands.put(lambda engine: engine.submit(request))
        return reader

    def leave(self, reader: ProgressReader) -> None:
        """Abort the request of a reader that is gone, unless it has ended."""
        rid = reader.request.rid
        if self._readers.get(rid) is reader:  # the id may belong to another request by now
            self.abort(rid)

    def abort(self, rid: str | None) -> None:
        """Abort one request, or all."""
        self._commands.put(lambda engine: engine.abort(rid))

    async def call(self, command: Callable[[Engine], Result]) -> Result:
        """Run `command` between two steps and return its result."""
        answer: asyncio.Future[Result] = self._loop.create_future()

        def run(engine: Engine) -> None:
            result = command(engine)
            self._loop.call_soon_threadsafe(settle, answer, result)

        self._commands.put(run)
        return await answer

    def _run(self) -> None:
        try:
            while self._run_commands():
                progress = self._engine.step()
                if progress:
                    self._loop.call_soon_threadsafe(self._deliver, progress)
        except Exception as error:  # door: the step thread; its error ends the process
            log.error("step_loop.failed", exc_info=error)
            self._loop.call_soon_threadsafe(self._fail, error)

    def _run_commands(self) -> bool:
        """Run all commands, waiting for one if there is nothing to compute; return False to end."""
        commands = self._commands
        while not commands.empty() or not self._engine.has_work:
            command = commands.get()
            if command is None:
                return False
            command(self._engine)
            if commands.empty():
                break  # a command may have left progress to deliver
        return True

    def _deliver(self, batch: list[Progress]) -> None:
        for progress in batch:
            rid = progress.request.rid
            reader = self._readers.get(rid)
            if reader is not None:
                reader.put(progress)
            if progress.finish is not None:
                self._readers.pop(rid, None)

    def _fail(self, error: Exception) -> None:
        if not self.failed.done():
            self.failed.set_exception(error)


def settle(answer: asyncio.Future[Result], result: Result) -> None:
    """Set the result of a future whose waiter may be gone."""
    if not answer.done():
        answer.set_result(result)
