"""Runs generations: sends their attempts to engines, queues those that wait, wakes their readers.

- The sampler owns every request, timer and task of its generations, and `close` ends them all. An
  attempt is no task: received tokens go straight into the generation's machine.
- A generation is kept until it and the stream of its attempt have ended. An attempt counts in the
  fleet view while its connection is open.
- An engine gets an eighth more requests of this process than it runs at a time, or
  `engine.max_inflight`. Other generations are queued, and sessions take turns for free places.
  While generations are queued for an engine, it has no free place.
"""

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from rollmesh.core.clock import Clock, SystemClock
from rollmesh.core.errors import EngineError
from rollmesh.core.fair_queue import FairQueue
from rollmesh.core.ids import new_id
from rollmesh.core.logs import get_logger
from rollmesh.engine.backend import (
    BackendFactory,
    EngineBackend,
    EngineRequest,
    RunningRequest,
    TokenChunk,
    backend_factory,
)
from rollmesh.engine.http import HttpClient
from rollmesh.engine.view import FleetView, is_leased, is_lost
from rollmesh.runtime.generation.events import (
    KIND_OF_ERROR,
    AbortAttempt,
    AttemptHeld,
    AttemptSampled,
    AvoidEngine,
    ChooseEngine,
    DropAttempt,
    EngineAttemptFailed,
    EngineChosen,
    EngineFull,
    EngineLost,
    EngineMissed,
    FellBack,
    FleetMoved,
    GenerationRequest,
    ReportFault,
    StartAttempt,
    StopMatcher,
    UpdateBegun,
    WakeReaders,
)
from rollmesh.runtime.generation.generation import (
    Action,
    Event,
    Generation,
    GenerationMachine,
)
from rollmesh.runtime.generation.sampling import GenerationSettings
from rollmesh.wire.fleet import EngineFaulted, EngineRow
from rollmesh.wire.machine import Ticked

MARGIN_DIVISOR = 8
"""An engine gets 1/8 more requests than it runs at a time, so that the next one is there when one
ends."""


class EngineQueues:
    """The queues of one sampler: one for each engine that generations wait for."""

    def __init__(self, view: FleetView, max_inflight: int = 0) -> None:
        self._view = view
        self._max_inflight = max_inflight
        self._queues: dict[str, FairQueue[Generation]] = {}
        """By the engine's URL; none is empty."""
        self._urls: dict[Generation, str] = {}

    def __len__(self) -> int:
        """Number of waiting generations."""
        return len(self._urls)

    def urls(self) -> list[str]:
        """Engines that generations wait for."""
        return list(self._queues)

    def admit(self, generation: Generation, row: EngineRow) -> bool:
        """Whether its attempt may start at this engine now; if not, it is queued there."""
        url = self._urls.get(generation)
        if url == row.url:
            return False
        if url is not None:
            self.leave(generation)
        if not self._is_full(row):
            return True
        self._urls[generation] = row.url
        session_key = generation.machine.request.session_key
        self._queues.setdefault(row.url, FairQueue()).put(session_key, generation)
        self._view.count(row.url, queued=1)
        return False

    def leave(self, generation: Generation) -> None:
        """Remove it from its queue, if it is in one."""
        url = self._urls.pop(generation, None)
        if url is None:
            return
        self._view.count(url, queued=-1)
        queue = self._queues[url]
        queue.remove(generation)
        if not queue:
            del self._queues[url]

    def next(self, url: str) -> Generation | None:
        """Remove and return the next generation of the queue, if the engine has a free place."""
        queue, row = self._queues.get(url), self._view.find(url)
        if not queue or row is None or self._is_full(row):
            return None
        generation = queue.take()
        assert generation is not None
        del self._urls[generation]
        self._view.count(url, queued=-1)
        if not queue:
            del self._queues[url]
        return generation

    def _is_full(self, row: EngineRow) -> bool:
        limit = self._max_inflight
        if not limit and row.max_running:
            limit = row.max_running + max(1, row.max_running // MARGIN_DIVISOR)
        return bool(limit) and self._view.num_requests(row.url) >= limit


TICK_S = 0.1
FELL_BACK_LOG_S = 60.0
"""Fall-backs between the same two versions are logged once in this time."""
WAIT_LOG_AFTER_S = 5.0
WAIT_LOG_S = 30.0
"""Calls that wait for an engine are logged after this time, and then at this interval."""

log = get_logger()


class _AttemptReceiver:
    """Receives one attempt's tokens from its engine and passes them to the generation."""

    __slots__ = ("_sampler", "call", "generation", "number", "url")

    def __init__(self, sampler: "Sampler", generation: Generation, start: StartAttempt) -> None:
        self.generation = generation
        self.number = start.attempt
        self.url = start.url
        self.call: RunningRequest | None = None
        self._sampler = sampler

    def on_chunk(self, chunk: TokenChunk) -> None:
        sampled = AttemptSampled(
            self.number,
            chunk.token_ids,
            chunk.logprobs,
            chunk.policy_version,
            chunk.finish,
            chunk.policy_versions,
            chunk.top_logprobs,
        )
        self._sampler.on_answer(self, sampled)

    def on_end(self) -> None:
        self.call = None
        self._sampler.drop(self)

    def on_error(self, error: EngineError) -> None:
        self._sampler.drop(self)
        self._sampler.on_answer(self, _failed(self.number, error))


class EngineWait(msgspec.Struct, frozen=True):
    """Generations for which no engine is available, or no connection can be opened."""

    num_calls: int
    since_s: float
    """On the sampler's clock."""
    why: str


class SamplerDeps(msgspec.Struct, frozen=True, kw_only=True):
    """Dependencies of a sampler."""

    view: FleetView
    vocab_size: int
    """The model's; higher ids never reach an engine."""
    report: Callable[[EngineFaulted], None]
    """Reports an engine fault to the router."""
    new_matcher: Callable[[tuple[str, ...]], StopMatcher] | None = None
    """Creates a StopStrings with a new detokenizer; required for stop strings."""
    connect: BackendFactory = msgspec.field(default_factory=backend_factory)
    """Creates the client of an engine."""
    max_inflight: int = 0
    """Attempts that one engine gets at a time; 0: an eighth more than it runs at a time."""


class Sampler:
    """Starts and runs generations; one per worker, used from one event loop."""

    def __init__(
        self,
        parts: SamplerDeps,
        settings: GenerationSettings | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._parts = parts
        self._settings = settings or GenerationSettings()
        self._clock = clock or SystemClock()
        self._live: set[Generation] = set()
        self._attempts: dict[tuple[Generation, int], _AttemptReceiver] = {}
        """Attempts with an open connection, by their number within the generation."""
        self._queues = EngineQueues(parts.view, parts.max_inflight)
        self._tasks: set[asyncio.Task[None]] = set()
        self.clients: dict[str, EngineBackend] = {}
        """Clients of engines that are in the table, or still run attempts."""
        self._http = HttpClient(
            connect_timeout_s=self._settings.connect_timeout_s,
            shortage_wait_s=self._settings.engine_wait_s,
        )
        self._timer: asyncio.TimerHandle | None = None
        self._avoid_until_s: dict[str, float] = {}
        self._fell_back_s: dict[tuple[str, int, int], float] = {}
        """When a fall-back was logged, by engine, session's version and engine's version."""
        self._wait: EngineWait | None = None
        self._wait_logged_s = float("-inf")
        self._rid_prefix = new_id("g")
        self._num_started = 0
        parts.view.listeners.append(self._on_table)

    @functools.cached_property
    def _loop(self) -> asyncio.AbstractEventLoop:
        """The running event loop, cached: on CPython 3.11 each lookup costs a system call."""
        return asyncio.get_running_loop()

    def start(self, request: GenerationRequest) -> Generation:
        """Start sampling; the caller joins at once, since only a reader's leaving parks it."""
        rid = f"{self._rid_prefix}.{self._num_started}"
        self._num_started += 1
        make, stops = self._parts.new_matcher, request.params.stop
        machine = GenerationMachine(
            request,
            self._settings,
            rid,
            self._clock.now_s(),
            (lambda: make(stops)) if make and stops else None,
        )
        generation = Generation(machine, self._drive, self._loop)
        self._live.add(generation)
        # If all engines sleep or are updated, no new table may follow that says so.
        moved = FleetMoved(self._parts.view.is_paused(machine.min_policy_version))
        self._drive(generation, self._chosen(generation) or moved)
        if self._timer is None:
            self._timer = self._loop.call_later(TICK_S, self._tick)
        return generation

    def waiting(self) -> dict[str, Any] | None:
        """Number of calls that wait for an engine, for how long and why; None if none waits."""
        wait = self._wait
        if wait is None:
            return None
        waited_s = round(self._clock.now_s() - wait.since_s, 1)
        return {"num_calls": wait.num_calls, "waited_s": waited_s, "why": wait.why}

    def entries(self) -> dict[str, int]:
        """Sizes of the tables; all are empty when nothing is sampled."""
        return {
            "generations": len(self._live),
            "generations_queued": len(self._queues),
            "legs": len(self._attempts),
            "engine_tasks": len(self._tasks),
        }

    def cache_entries(self) -> dict[str, int]:
        """Numbers of cached clients and idle connections."""
        return {
            "engine_clients": len(self.clients),
            "engines_avoided": len(self._avoid_until_s),
            "engine_connections": self._http.num_connections,
            "sticky_sessions": self._parts.view.num_sticky,
        }

    async def close(self) -> None:
        """Seal running generations, abort their attempts, and close connections."""
        self._parts.view.listeners.remove(self._on_table)
        for generation in list(self._live):
            generation.seal("the worker stops")
        if self._timer:
            self._timer.cancel()
        aborts = [task for task in self._tasks if task.get_name().startswith("abort")]
        if aborts:
            await asyncio.wait(aborts, timeout=TICK_S)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._http.close()

    # events

    def on_answer(
        self, attempt: _AttemptReceiver, event: AttemptSampled | EngineAttemptFailed
    ) -> None:
        """Handle an engine's answer to an attempt."""
        try:
            self._drive(attempt.generation, event)
        except Exception as error:  # door: one attempt's fault must not end its connection's loop
            log.error("attempt.broken", url=attempt.url, exc_info=True)
            self.drop(attempt)
            self._drive(
                attempt.generation,
                EngineAttemptFailed(attempt.number, f"{type(error).__name__}: {error}"),
            )

    def drop(self, attempt: _AttemptReceiver) -> None:
        """Close the attempt's connection, if it is open, and give its place to the next
        generation."""
        if self._attempts.pop((attempt.generation, attempt.number), None) is None:
            return
        self._parts.view.count(attempt.url, requests=-1)
        if attempt.call:
            attempt.call.close()
            attempt.call = None
        if self._queues:
            self._fill(attempt.url)

    def _fill(self, url: str) -> None:
        """Start attempts of queued generations while their engine has free places."""
        while (generation := self._queues.next(url)) is not None:
            self._carry_out(generation, ChooseEngine(generation.machine.min_policy_version))

    def _drive(self, generation: Generation, event: Event) -> None:
        for action in generation.machine.step(event, self._clock.now_s()):
            self._carry_out(generation, action)
        if self._queues and not generation.machine.is_queued:
            self._queues.leave(generation)
        if generation.machine.is_settled:
            self._live.discard(generation)

    def _tick(self) -> None:
        # Set first: a fault below must not stop the timer of all generations.
        self._timer = None
        if self._live:
            self._timer = self._loop.call_later(TICK_S, self._tick)
        held = self._held_attempts()
        for generation, number in held:
            self._drive(generation, AttemptHeld(number))
        for generation in list(self._live):
            self._drive(generation, Ticked())
        self._note_wait(len(held))

    def _held_attempts(self) -> list[tuple[Generation, int]]:
        """Attempts that wait until a connection can be opened here."""
        calls = self._http.held
        return (
            [key for key, attempt in self._attempts.items() if attempt.call in calls]
            if calls
            else []
        )

    def _note_wait(self, num_held: int) -> None:
        """Update `waiting`, and log a long wait; `num_held` calls wait for a connection, which the
        HTTP client logs."""
        view, now_s = self._parts.view, self._clock.now_s()
        waiting = [
            each.machine.min_policy_version
            for each in self._live
            if each.machine.waits_for_engine and not view.serves(each.machine.min_policy_version)
        ]
        since_s = self._wait.since_s if self._wait else now_s
        if not waiting:
            why = next(iter(self._http.held.values()), "")
            self._wait = EngineWait(num_held, since_s, why) if num_held else None
            return
        why = view.why_waiting(max(waiting)) or "the fleet table has no engine"
        self._wait = EngineWait(len(waiting), since_s, why)
        if now_s >= max(since_s + WAIT_LOG_AFTER_S, self._wait_logged_s + WAIT_LOG_S):
            self._wait_logged_s = now_s
            log_wait = log.info if view.is_paused(max(waiting)) else log.warning
            log_wait(
                "engine.awaited", num_calls=len(waiting), waited_s=round(now_s - since_s), why=why
            )

    def _on_table(self) -> None:
        view = self._parts.view
        for url in list(self.clients):
            if view.find(url) is None and not view.num_requests(url):
                del self.clients[url]
        for generation in list(self._live):
            machine = generation.machine
            row = view.find(machine.attempt_url) if machine.attempt_url else None
            if machine.attempt_url and (row is None or is_lost(row, machine.attempt_incarnation)):
                self._drive(generation, EngineLost(machine.attempt_url))
            if machine.attempt_url and row:
                is_paused = is_leased(row)
            else:
                is_paused = view.is_paused(machine.min_policy_version)
            self._drive(generation, FleetMoved(is_paused))
            if machine.attempt_url and row and is_leased(row):
                self._drive(generation, UpdateBegun(row.url))
        for url in self._queues.urls():
            self._fill(url)

    # actions

    def _carry_out(self, generation: Generation, action: Action) -> None:
        match action:
            case WakeReaders():
                generation.wake()
            case ChooseEngine():
                machine, view = generation.machine, self._parts.view
                chosen = self._chosen(generation)
                least = machine.min_policy_version
                never = "" if chosen else view.why_never(least)
                why = never or view.why_waiting(least)
                missed = EngineMissed(why, bool(never), view.is_behind(least))
                self._drive(generation, chosen or missed)
            case StartAttempt():
                self._start_attempt(generation, action)
            case AbortAttempt():
                self._spawn(self._abort_attempt(action), f"abort {action.rid}")
                # An abort that came before its request has no effect, and ticks are far apart.
                wait_s = self._settings.abort_repeat_s
                self._loop.call_later(wait_s, self._drive, generation, Ticked())
            case DropAttempt():
                attempt = self._attempts.get((generation, action.attempt))
                if attempt:
                    self.drop(attempt)
            case FellBack():
                self._log_fall(action)
            case AvoidEngine() | ReportFault():
                self._avoid(action)

    def _log_fall(self, fall: FellBack) -> None:
        now_s = self._clock.now_s()
        key = (fall.url, fall.session_version, fall.policy_version)
        last_s = self._fell_back_s.get(key, float("-inf"))
        if now_s < last_s + FELL_BACK_LOG_S:
            return
        recent = self._fell_back_s.items()
        self._fell_back_s = {each: at for each, at in recent if now_s < at + FELL_BACK_LOG_S}
        self._fell_back_s[key] = now_s
        log.warning(
            "engine.fell_back",
            url=fall.url,
            session_version=fall.session_version,
            policy_version=fall.policy_version,
        )

    def _avoid(self, action: AvoidEngine | ReportFault) -> None:
        """Avoid an engine for a moment; logged once, whatever the number of its attempts."""
        now_s, url = self._clock.now_s(), action.url
        is_news = self._avoid_until_s.get(url, now_s) <= now_s
        self._avoid_until_s[url] = now_s + self._settings.avoid_s
        if isinstance(action, ReportFault):
            self._parts.report(EngineFaulted(url, action.incarnation, action.detail))
            if is_news:
                log.warning("engine.faulted", url=url, detail=action.detail)
        elif is_news:
            log.info("engine.avoided", url=url)

    def _chosen(self, generation: Generation) -> EngineChosen | EngineFull | None:
        """The engine of the next attempt, if there is one; the generation is queued if it has no
        free place."""
        machine = generation.machine
        avoid = self._avoid_until_s
        if avoid:
            now_s = self._clock.now_s()
            for url in [u for u, until_s in avoid.items() if until_s <= now_s]:
                del avoid[url]
        key = machine.request.session_key
        row = self._parts.view.choose(key, machine.min_policy_version, avoid)
        if row is None:
            return None
        if not self._queues.admit(generation, row):
            return EngineFull()
        return EngineChosen(
            row.url,
            row.incarnation,
            row.policy_version,
            row.adapter,
            self._parts.view.has_publisher,
        )

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = self._loop.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _start_attempt(self, generation: Generation, start: StartAttempt) -> None:
        request = generation.machine.request
        attempt = _AttemptReceiver(self, generation, start)
        asked = EngineRequest(
            rid=start.rid,
            prompt_ids=request.prompt_ids,
            prompt_json=request.prompt_json,
            sampled_ids=generation.token_ids,
            params=request.params,
            max_new_tokens=start.max_new_tokens,
            extra_key=start.extra_key,
            stream=start.stream,
            num_top_logprobs=request.num_top_logprobs,
            images=request.images,
            adapter=start.adapter,
        )
        try:
            attempt.call = self._client(start.url).generate(asked, attempt)
        except EngineError as error:
            self._drive(generation, _failed(start.attempt, error))
            return
        self._attempts[generation, start.attempt] = attempt
        self._parts.view.count(start.url, requests=1)

    async def _abort_attempt(self, action: AbortAttempt) -> None:
        try:
            await self._client(action.url).abort(action.rid)
        except EngineError as error:
            # The machine repeats the abort until the attempt's stream has ended.
            log.debug("abort.failed", rid=action.rid, error=str(error))

    def _client(self, url: str) -> EngineBackend:
        client = self.clients.get(url)
        if client is None:
            client = self._parts.connect(url, self._http, vocab_size=self._parts.vocab_size)
            self.clients[url] = client
        return client


def _failed(number: int, error: EngineError) -> EngineAttemptFailed:
    return EngineAttemptFailed(number, str(error), KIND_OF_ERROR.get(type(error), "fault"))
