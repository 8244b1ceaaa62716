"""A generation: one sampled turn, gathered over as many engine requests (attempts) as it takes.

    RUNNING --last reader leaves--> PARKED --a reader joins--> RUNNING
    RUNNING | PARKED --stop, length--> COMMITTED
    RUNNING | PARKED --sealed, refused, no engine or no capacity in time, retry window over--> VOID

- No token is lost or doubled between attempts; an attempt resumes from the exact tokens so far.
- An abort that was not requested is resumed and never becomes `length`. A requested abort is
  repeated until its stream ends, since an engine ignores an abort for a rid that it does not know
  yet.
- With a publisher, tokens of weights older than the session has seen, or than the engine's row in
  the fleet table, are dropped. Without one no token is dropped, and a fall-back is reported.
- Readers are woken at every end. Deadlines exclude updates of engines and the wait for a free place
  at an engine.
"""

import asyncio
import enum
from array import array
from collections.abc import Callable

from rollmesh.core.errors import (
    EngineError,
    EngineRefused,
    EngineUnavailable,
    LocalShortage,
    RequestLost,
)
from rollmesh.core.types import UNVERSIONED, VersionRun
from rollmesh.engine.backend import TopLogprobs
from rollmesh.runtime.generation.events import (
    AbortAttempt,
    AttemptHeld,
    AttemptPhase,
    AttemptSampled,
    AvoidEngine,
    ChooseEngine,
    DropAttempt,
    EngineAttempt,
    EngineAttemptFailed,
    EngineChosen,
    EngineFull,
    EngineLost,
    EngineMissed,
    FellBack,
    FleetMoved,
    GenerationRequest,
    ReaderJoined,
    ReaderLeft,
    ReportFault,
    SampledTokens,
    Sealed,
    StartAttempt,
    StopMatcher,
    UpdateBegun,
    WakeReaders,
    is_resumable,
)
from rollmesh.runtime.generation.sampling import GenerationSettings, RetryState
from rollmesh.wire.machine import Ticked

_FINAL: dict[str, type[EngineError]] = {
    "refused": EngineRefused,
    "lost": RequestLost,
    "local": LocalShortage,
}
"""Failures that another attempt would repeat, or that were retried for long enough."""
_CANNOT_RESUME = "its engine was lost; a turn with penalties or a grammar cannot be resumed"


class GenerationState(enum.StrEnum):
    """State of a generation."""

    RUNNING = "running"
    PARKED = "parked"
    COMMITTED = "committed"
    VOID = "void"


Event = (
    ReaderJoined
    | ReaderLeft
    | Sealed
    | EngineChosen
    | FleetMoved
    | UpdateBegun
    | EngineLost
    | EngineMissed
    | EngineFull
    | AttemptSampled
    | AttemptHeld
    | EngineAttemptFailed
    | Ticked
)
Action = (
    ChooseEngine
    | StartAttempt
    | AbortAttempt
    | DropAttempt
    | ReportFault
    | AvoidEngine
    | FellBack
    | WakeReaders
)


class GenerationMachine:
    """The pure state machine of one generation; others only read its attributes."""

    def __init__(
        self,
        request: GenerationRequest,
        settings: GenerationSettings,
        rid: str,
        now_s: float,
        new_matcher: Callable[[], StopMatcher] | None = None,
    ) -> None:
        """`rid` is unique among all running requests of the engines; attempts append their number.

        Start it with `step(EngineChosen(...))` if an engine is available, else with
        `step(Ticked())`. `new_matcher` is required for stop strings.
        """
        self.request = request
        self.state = GenerationState.RUNNING
        self.sampled = SampledTokens()
        self.finish_reason = ""
        self.matched_stop: int | str | None = None
        self.error: EngineError | None = None
        self.num_readers = 0
        self.num_legs = 0
        self._settings = settings
        self._rid = rid
        self._new_matcher = new_matcher if request.params.stop else None
        self._matcher = self._new_matcher() if self._new_matcher else None
        self._attempt: EngineAttempt | None = None
        self.min_policy_version = request.min_policy_version
        """The newest version that the session has seen; without a publisher, the last."""
        self._patience = RetryState(settings)
        self._is_paused = False
        self._is_queued = False
        self._seen_s = now_s
        self._clock_s = 0.0
        """Unpaused seconds since the start, the clock of all times below."""
        self._waiting_since_s = 0.0
        self._parked_s = 0.0

    @property
    def is_settled(self) -> bool:
        """Whether it has ended and has no open attempt, so that nothing can happen any more."""
        return self._attempt is None and self._is_ended

    @property
    def attempt_url(self) -> str | None:
        """The engine of the current attempt."""
        return self._attempt.url if self._attempt else None

    @property
    def attempt_incarnation(self) -> str:
        """Incarnation of that engine, or ''."""
        return self._attempt.incarnation if self._attempt else ""

    def context(self) -> list[int]:
        """The prompt and all tokens so far, which an attempt begins with."""
        return [*self.request.prompt_ids, *self.sampled.token_ids]

    def step(self, event: Event, now_s: float) -> list[Action]:
        """Apply one event; events of an earlier attempt change nothing."""
        if not self._is_paused and not self.is_queued:
            self._clock_s += max(0.0, now_s - self._seen_s)
        self._seen_s = now_s
        match event:
            case AttemptSampled():
                return self._on_sampled(event)
            case EngineChosen() | EngineMissed() | EngineFull():
                return self._on_choice(event)
            case ReaderJoined():
                return self._on_joined()
            case ReaderLeft():
                return self._on_left()
            case EngineAttemptFailed() | AttemptHeld():
                return self._on_failed(event)
            case UpdateBegun() | EngineLost():
                return self._on_engine(event)
            case Sealed():
                return self._on_sealed(event)
            case FleetMoved():
                self._is_paused = event.is_paused
                self._is_queued = False
        return self._tend()

    # readers

    def _on_joined(self) -> list[Action]:
        self.num_readers += 1
        if self.state is not GenerationState.PARKED:
            return []
        self.state = GenerationState.RUNNING
        self._waiting_since_s = self._clock_s
        return self._go_on()

    def _on_left(self) -> list[Action]:
        self.num_readers = max(0, self.num_readers - 1)
        if self.num_readers or self.state is not GenerationState.RUNNING:
            return []
        self.state = GenerationState.PARKED
        self._is_queued = False
        self._parked_s = self._clock_s
        return self._abort()

    def _on_sealed(self, event: Sealed) -> list[Action]:
        return [] if self._is_ended else self._void(EngineError(event.reason))

    # attempts

    def _on_choice(self, chosen: EngineChosen | EngineMissed | EngineFull) -> list[Action]:
        self._is_queued = isinstance(chosen, EngineFull)
        if isinstance(chosen, EngineFull):
            return []
        if isinstance(chosen, EngineMissed):
            self._patience.on_missing(chosen.why, is_behind=chosen.is_behind)
            is_over = chosen.is_for_good and not self._is_ended
            return self._void(EngineUnavailable(chosen.why)) if is_over else []
        if self.state is not GenerationState.RUNNING or self._attempt:
            return []
        if chosen.has_publisher and chosen.policy_version < self.min_policy_version:
            return []
        params = self.request.params
        start = StartAttempt(
            attempt=self.num_legs,
            rid=f"{self._rid}.{self.num_legs}",
            url=chosen.url,
            max_new_tokens=params.max_tokens - len(self.sampled),
            extra_key=str(chosen.policy_version),
            stream=self.request.stream or bool(params.stop),
            adapter=chosen.adapter,
        )
        self._is_paused = False
        self._attempt = EngineAttempt(start, chosen, len(self.sampled), self._clock_s)
        self.sampled.begin_attempt(chosen.url)
        self.num_legs += 1
        return [start]

    def _on_sampled(self, event: AttemptSampled) -> list[Action]:
        attempt = self._attempt
        if attempt is None or event.attempt != attempt.number:
            return []
        attempt.sign_s = self._clock_s
        if event.finish:
            self._attempt = None
        if self._is_ended:
            return []
        least = max(self.min_policy_version, attempt.policy_version)
        if attempt.has_publisher and event.token_ids and event.policy_version < least:
            return self._on_older_weights(attempt, event.policy_version)
        fallen = self._append(event, attempt)
        self._patience.on_tokens()
        hit = self._matcher.push(event.token_ids) if self._matcher else None
        if hit:
            self.sampled.truncate(hit.num_tokens)
            return fallen + self._commit("stop", hit.stop)
        woken: list[Action] = [WakeReaders()] if event.token_ids else []
        if event.finish is None:
            return fallen + woken
        if event.finish.kind == "abort":
            is_excused = attempt.leaves_for_update
            cut = self._on_cut(len(self.sampled) > attempt.offset, is_excused=is_excused)
            return fallen + woken + cut
        return fallen + self._commit(event.finish.kind, event.finish.matched)

    def _append(self, event: AttemptSampled, attempt: EngineAttempt) -> list[Action]:
        """Add tokens; report a fall-back to older weights."""
        room = self.request.params.max_tokens - len(self.sampled.token_ids)
        token_ids, logprobs, top = event.token_ids, event.logprobs, event.top_logprobs
        if len(token_ids) > room:
            token_ids, logprobs, top = token_ids[:room], logprobs[:room], top[:room]
        self.sampled.append(token_ids, logprobs, event.policy_version, top)
        if event.policy_versions:
            # The engine's own account of the attempt is exact if its weights changed meanwhile.
            self.sampled.restate(attempt.offset, event.policy_versions)
        fallen: list[Action] = []
        seen = self.min_policy_version
        for run in self.sampled.policy_versions[-1:]:
            if UNVERSIONED < run.policy_version < seen and not attempt.has_publisher:
                fallen.append(FellBack(attempt.url, seen, run.policy_version))
                self.min_policy_version = run.policy_version
            self.min_policy_version = max(self.min_policy_version, run.policy_version)
        return fallen

    def _on_older_weights(self, attempt: EngineAttempt, policy_version: int) -> list[Action]:
        """A fault if the session has seen newer weights. If only the engine's row had newer ones,
        the engine was restarted, which a probe will find, or serves another run: no fault."""
        self._attempt = None
        stop: list[Action] = [
            attempt.abort(self._clock_s, self._seen_s),
            DropAttempt(attempt.number),
        ]
        leave: Action = AvoidEngine(attempt.url)
        if policy_version < self.min_policy_version:
            detail = f"serves version {policy_version}, the session saw {self.min_policy_version}"
            leave = ReportFault(attempt.url, attempt.incarnation, detail)
        self._patience.on_older_weights(attempt.url, policy_version, attempt.policy_version)
        return [*stop, leave, *self._on_cut(False)]

    def _on_failed(self, failed: EngineAttemptFailed | AttemptHeld) -> list[Action]:
        attempt = self._attempt
        if attempt is None or failed.attempt != attempt.number:
            return []
        if isinstance(failed, AttemptHeld):
            attempt.sign_s = self._clock_s
            return []
        self._attempt = None
        if final := _FINAL.get(failed.kind):
            return [] if self._is_ended else self._void(final(failed.detail))
        if failed.kind == "overloaded":
            end = self._patience.on_full_queue(failed.detail)
            return [AvoidEngine(attempt.url), *self._on_cut(False, end)]
        if failed.kind == "broke" and self.request.images and len(self.sampled) == attempt.offset:
            end = self._patience.on_broken(failed.detail)
            return [AvoidEngine(attempt.url), *self._on_cut(False, end)]
        return self._on_fault(attempt, failed.detail)

    def _on_fault(self, attempt: EngineAttempt, detail: str) -> list[Action]:
        """The engine failed the attempt, and is avoided for a moment."""
        is_fruitful, incarnation = (
            len(self.sampled) > attempt.offset,
            (attempt.url, attempt.incarnation),
        )
        end = None
        if not is_fruitful and self.state is GenerationState.RUNNING:
            end = self._patience.on_fault(incarnation, detail, self._clock_s)
        report = ReportFault(attempt.url, attempt.incarnation, detail)
        return [report, *self._on_cut(is_fruitful, end)]

    def _on_engine(self, event: UpdateBegun | EngineLost) -> list[Action]:
        attempt = self._attempt
        if attempt is None or attempt.url != event.url:
            return []
        if isinstance(event, EngineLost):
            if self._is_bound:
                return []  # no other engine can take over, so its own connection decides
            self._attempt = None
            return [DropAttempt(attempt.number), *self._on_cut(len(self.sampled) > attempt.offset)]
        # The publisher waits for running requests for a while, and then cuts them.
        attempt.leaves_for_update = True
        return self._abort() if is_resumable(self.request.params) else []

    def _on_cut(
        self, is_fruitful: bool, end: EngineError | None = None, *, is_excused: bool = False
    ) -> list[Action]:
        """End the attempt without ending the turn, unless the tokens or `end` end it."""
        if self._is_ended:
            return []
        if end:
            return self._void(end)
        self._waiting_since_s = self._clock_s
        if self.state is GenerationState.PARKED:
            return self._go_on()
        if not is_excused:
            end = self._patience.on_cut(is_fruitful, self._clock_s)
        return self._void(end) if end else self._go_on()

    def _go_on(self) -> list[Action]:
        """Without an attempt: end the turn if the tokens do, else ask for an engine."""
        if self._attempt or self._is_ended:
            return []
        params = self.request.params
        token_ids = self.sampled.token_ids
        if token_ids and token_ids[-1] in params.stop_token_ids:
            return self._commit("stop", token_ids[-1])
        if len(self.sampled) >= params.max_tokens:
            return self._commit("length", None)
        is_parked = self.state is GenerationState.PARKED
        if self._is_bound:
            return self._void(EngineUnavailable(_CANNOT_RESUME))
        if token_ids and not is_resumable(params):
            self._restart()
        if is_parked:
            return []
        if self._clock_s < self._patience.not_before_s:
            return []
        return [ChooseEngine(self.min_policy_version)]

    @property
    def waits_for_engine(self) -> bool:
        """Whether it needs an engine and has none."""
        return self.state is GenerationState.RUNNING and self._attempt is None

    @property
    def is_queued(self) -> bool:
        """Whether it waits for a free place at its engine."""
        return self._is_queued and self.waits_for_engine

    @property
    def _is_bound(self) -> bool:
        """Whether a reader saw tokens that no other attempt can continue."""
        is_seen = self.request.stream and self.state is GenerationState.RUNNING
        return is_seen and len(self.sampled) > 0 and not is_resumable(self.request.params)

    def _restart(self) -> None:
        """Sample from the start: no remaining reader saw the tokens, and no attempt can continue
        them."""
        self.sampled.truncate(0)
        self._matcher = self._new_matcher() if self._new_matcher else None

    # ends

    @property
    def _is_ended(self) -> bool:
        return self.state in (GenerationState.COMMITTED, GenerationState.VOID)

    def _commit(self, finish_reason: str, matched: int | str | None) -> list[Action]:
        self.state = GenerationState.COMMITTED
        self.finish_reason = finish_reason
        self.matched_stop = matched
        return [WakeReaders(), *self._abort()]

    def _void(self, error: EngineError) -> list[Action]:
        self.state = GenerationState.VOID
        self.error = error
        return [WakeReaders(), *self._abort()]

    def _abort(self) -> list[Action]:
        attempt = self._attempt
        if attempt is None or attempt.phase is AttemptPhase.ABORTING:
            return []
        return [attempt.abort(self._clock_s, self._seen_s)]

    # time

    def _tend(self) -> list[Action]:
        if self._attempt:
            actions = self._tend_leg(self._attempt)
        elif self.is_queued:
            actions = []
        elif self.state is GenerationState.RUNNING:
            if self._clock_s - self._waiting_since_s >= self._settings.engine_wait_s:
                return self._void(self._patience.without_engine())
            actions = self._go_on()
        else:
            actions = []
        is_parked = self.state is GenerationState.PARKED
        if is_parked and self._clock_s - self._parked_s >= self._settings.retry_window_s:
            actions += self._void(EngineError("no client resumed it in time"))
        return actions

    def _tend_leg(self, attempt: EngineAttempt) -> list[Action]:
        now_s, settings = self._clock_s, self._settings
        if attempt.phase is AttemptPhase.OPEN:
            if not attempt.is_silent(now_s, settings.answer_timeout_s):
                return []
            self._attempt = None
            stop: list[Action] = [attempt.abort(now_s, self._seen_s), DropAttempt(attempt.number)]
            return [*stop, *self._on_fault(attempt, "a request shows no progress")]
        if attempt.is_deaf(now_s, settings.abort_timeout_s):
            self._attempt = None
            return [DropAttempt(attempt.number), *self._on_cut(len(self.sampled) > attempt.offset)]
        repeats = attempt.wants_repeat(self._seen_s, settings.abort_repeat_s)
        return [attempt.abort(now_s, self._seen_s)] if repeats else []


Drive = Callable[["Generation", Event], None]


class Generation:
    """A generation for its readers; new tokens and every end wake those that wait."""

    def __init__(
        self, machine: GenerationMachine, drive: Drive, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.machine = machine
        sampled = machine.sampled
        self.token_ids: array[int] = sampled.token_ids
        """All sampled tokens so far, including the stop token."""
        self.logprobs: array[float] = sampled.logprobs
        """One per token."""
        self.top_logprobs: list[TopLogprobs] = sampled.top_logprobs
        """One per token, if requested."""
        self.policy_versions: list[VersionRun] = sampled.policy_versions
        """Runs that add up to the tokens."""
        self.engines: list[str] = sampled.engines
        """The engines that sampled them; runs refer to positions here."""
        self._drive = drive
        self._loop = loop
        self._waiters: list[asyncio.Future[None]] = []

    @property
    def state(self) -> GenerationState:
        return self.machine.state

    @property
    def finish_reason(self) -> str:
        """`stop` or `length` once COMMITTED, else ''."""
        return self.machine.finish_reason

    @property
    def matched_stop(self) -> int | str | None:
        """The token or string that stopped it."""
        return self.machine.matched_stop

    @property
    def error(self) -> EngineError | None:
        """Why it is VOID."""
        return self.machine.error

    def join(self) -> None:
        """Add a reader; a parked generation continues from its exact tokens."""
        self._drive(self, ReaderJoined())

    def leave(self) -> None:
        """Remove a reader; the last one parks a running generation."""
        self._drive(self, ReaderLeft())

    def seal(self, reason: str) -> None:
        """End it as VOID, unless it is COMMITTED; every waiter is woken."""
        self._drive(self, Sealed(reason))

    async def wait(self, num_tokens: int) -> bool:
        """Wait until there are more than `num_tokens` tokens (True) or no more will come
        (False)."""
        while len(self.token_ids) <= num_tokens:
            if self.state in (GenerationState.COMMITTED, GenerationState.VOID):
                return False
            self._waiters.append(waiter := self._loop.create_future())
            await waiter
        return True

    def wake(self) -> None:
        """Wake every waiter; called by the sampler."""
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
