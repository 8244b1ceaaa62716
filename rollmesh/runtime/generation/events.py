"""Events and actions of the generation machine, its sampled tokens and its current attempt.

    no attempt --StartAttempt--> OPEN --AbortAttempt--> ABORTING
    ABORTING --its stream ends, or DropAttempt--> no attempt

An attempt is one `/generate` request, numbered from 0 within its generation. Events of another
attempt than the current one are ignored. Its times are of the generation's clock, which stops
during engine updates; aborts are repeated by the wall clock.
"""

import enum
from array import array
from collections.abc import Sequence
from typing import Literal, Protocol

import msgspec

from rollmesh.core.errors import (
    EngineBroke,
    EngineError,
    EngineOverloaded,
    EngineRefused,
    LocalShortage,
    RequestLost,
)
from rollmesh.core.types import UNVERSIONED, SamplingParams, VersionRun
from rollmesh.engine.backend import Finish, Image, TopLogprobs


class SampledTokens:
    """Sampled tokens, which grow at the end; `truncate` removes those after a stop.

    Its arrays and lists stay the same objects, since readers hold them.
    """

    def __init__(self) -> None:
        self.token_ids = array("i")
        self.logprobs = array("f")
        self.policy_versions: list[VersionRun] = []
        """Runs; their engines are positions in `engines`."""
        self.engines: list[str] = []
        """Engines of the attempts, in order."""
        self.top_logprobs: list[TopLogprobs] = []
        self._engine = -1
        """Position of the current attempt's engine."""

    def __len__(self) -> int:
        return len(self.token_ids)

    def begin_attempt(self, engine: str) -> None:
        """Set the engine that samples the following tokens."""
        if engine not in self.engines:
            self.engines.append(engine)
        self._engine = self.engines.index(engine)

    def append(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        policy_version: int,
        top_logprobs: Sequence[TopLogprobs] = (),
    ) -> None:
        """Add tokens of one version; the sequences have one length, the last may be empty."""
        if token_ids:
            # Creating an array and joining it is twice as fast as adding item by item.
            self.token_ids += array("i", token_ids)
            self.logprobs += array("f", logprobs)
            if top_logprobs:
                self.top_logprobs.extend(top_logprobs)
            self._add_run(VersionRun(policy_version, len(token_ids), self._engine))

    def restate(self, offset: int, runs: Sequence[VersionRun]) -> None:
        """Replace the versions of the attempt's tokens, from `offset` on.

        Only if `runs` add up to their number.
        """
        moved = [VersionRun(run.policy_version, run.num_tokens, self._engine) for run in runs]
        if not offset and self.policy_versions == moved:
            return
        if sum(run.num_tokens for run in runs) == len(self) - offset:
            self._truncate_runs(offset)
            for run in moved:
                self._add_run(run)

    def truncate(self, num_tokens: int) -> None:
        """Keep the first `num_tokens`."""
        del self.token_ids[num_tokens:]
        del self.logprobs[num_tokens:]
        del self.top_logprobs[num_tokens:]
        self._truncate_runs(num_tokens)

    def _add_run(self, run: VersionRun) -> None:
        runs = self.policy_versions
        if runs and _is_like(runs[-1], run):
            runs[-1] = _of(runs[-1], runs[-1].num_tokens + run.num_tokens)
        else:
            runs.append(run)

    def _truncate_runs(self, num_tokens: int) -> None:
        total = sum(run.num_tokens for run in self.policy_versions)
        while total > num_tokens:
            last = self.policy_versions.pop()
            total -= last.num_tokens
            if total < num_tokens:
                self.policy_versions.append(_of(last, num_tokens - total))
                total = num_tokens


def fall_back(runs: Sequence[VersionRun], seen: int) -> tuple[int, int]:
    """(the version that the session requires next, number of moves to older weights) of a turn that
    began when the session had `seen` this version; unnumbered runs are not compared."""
    num_falls = 0
    for run in runs:
        if run.policy_version != UNVERSIONED:
            num_falls += run.policy_version < seen
            seen = run.policy_version
    return seen, num_falls


def _is_like(run: VersionRun, other: VersionRun) -> bool:
    return run.policy_version == other.policy_version and run.engine == other.engine


def _of(run: VersionRun, num_tokens: int) -> VersionRun:
    return VersionRun(run.policy_version, num_tokens, run.engine)


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One turn to be sampled."""

    generation_id: str
    """For logs."""
    session_key: str
    """Attempts of one session stay at one engine while it serves."""
    prompt_ids: Sequence[int]
    """Exact tokens; the caller does not change them any more."""
    prompt_json: bytes | memoryview = b""
    """`1,2,3`: the same ids as checked JSON; if set, attempts send it and do not read the ids."""
    params: SamplingParams
    min_policy_version: int = -1
    """Newest version that the session has seen. Older weights never continue it if a publisher is
    known; otherwise they do, and it is counted."""
    stream: bool = False
    """Readers want tokens as they come; otherwise one plain request, which costs both sides much
    less."""
    num_top_logprobs: int = 0
    """Number of likeliest tokens that are kept for each position."""
    images: tuple[Image, ...] = ()
    """In the order of their placeholders in the prompt."""


class StopHit(msgspec.Struct, frozen=True):
    """A stop string was completed."""

    num_tokens: int
    """Tokens up to and including the one that completed it."""
    stop: str


class StopMatcher(Protocol):
    """Finds stop strings in one generation's tokens; see tool_calls.py."""

    def push(self, token_ids: Sequence[int]) -> StopHit | None:
        """Add the next tokens; return the first hit that they complete."""


# events


class ReaderJoined(msgspec.Struct, frozen=True):
    """A reader joined."""


class ReaderLeft(msgspec.Struct, frozen=True):
    """A reader left."""


class Sealed(msgspec.Struct, frozen=True):
    """The session is over."""

    reason: str


class EngineChosen(msgspec.Struct, frozen=True):
    """An engine for ChooseEngine; see EngineMissed for the case of none."""

    url: str
    incarnation: str
    policy_version: int
    adapter: str = ""
    """The adapter whose weights are used with the engine's own; '' for none."""
    has_publisher: bool = True
    """Whether tokens of older weights are refused."""


class EngineMissed(msgspec.Struct, frozen=True):
    """No engine for ChooseEngine, with the reason if it is known."""

    why: str
    """Why no engine serves the session, in one line; '' if unknown."""
    is_for_good: bool = False
    """No engine will come."""
    is_behind: bool = False
    """Engines are READY with older weights than the session has seen."""


class EngineFull(msgspec.Struct, frozen=True):
    """The chosen engine has as many requests of this process as it may have.

    EngineChosen follows when it is the session's turn; until then no deadline runs.
    """


class FleetMoved(msgspec.Struct, frozen=True):
    """The fleet table changed."""

    is_paused: bool
    """The generation waits for an engine that is being updated: its clock stops."""


class UpdateBegun(msgspec.Struct, frozen=True):
    """The engine at `url` is about to get new weights: attempts that can continue elsewhere leave
    it."""

    url: str


class EngineLost(msgspec.Struct, frozen=True):
    """The engine at `url` was fenced, has gone, or was restarted."""

    url: str


class AttemptSampled(msgspec.Struct, frozen=True):
    """The engine sent tokens; each event has only new ones."""

    attempt: int
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    policy_version: int
    finish: Finish | None = None
    policy_versions: tuple[VersionRun, ...] = ()
    """With `finish`, if the engine knows them: the versions of all tokens of the attempt."""
    top_logprobs: Sequence[TopLogprobs] = ()
    """One per token, if requested."""


AttemptFailure = Literal["fault", "broke", "refused", "lost", "local", "overloaded"]
"""`refused`: the engine considers the request invalid, so another attempt would fail, too. `lost`:
the request could not be read, so another attempt would fail, too; no fault of the engine. `local`:
no connection could be opened here for as long as a call waits; no fault of the engine.
`overloaded`: the engine's queue is full, which is no fault. `broke`: the engine failed at the
request before the first token."""
KIND_OF_ERROR: dict[type[EngineError], AttemptFailure] = {
    EngineBroke: "broke",
    EngineOverloaded: "overloaded",
    EngineRefused: "refused",
    LocalShortage: "local",
    RequestLost: "lost",
}


class AttemptHeld(msgspec.Struct, frozen=True):
    """The attempt waits until a connection can be opened here: the engine has not received it."""

    attempt: int


class EngineAttemptFailed(msgspec.Struct, frozen=True):
    """The attempt's stream ended without a finish."""

    attempt: int
    detail: str
    kind: AttemptFailure = "fault"


# actions


class ChooseEngine(msgspec.Struct, frozen=True):
    """Answer with EngineChosen if an engine with these weights or newer is READY."""

    min_policy_version: int


class StartAttempt(msgspec.Struct, frozen=True):
    """Call `/generate` with the prompt and all tokens so far (`machine.context()`)."""

    attempt: int
    rid: str
    url: str
    max_new_tokens: int
    extra_key: str
    """Isolates the prefix cache of one policy version."""
    stream: bool
    adapter: str = ""
    """The adapter of the engine's row."""


class AbortAttempt(msgspec.Struct, frozen=True):
    """Ask the engine to end the attempt; repeated until its stream has ended."""

    attempt: int
    rid: str
    url: str


class DropAttempt(msgspec.Struct, frozen=True):
    """Close the attempt's connection; nothing more is expected of it."""

    attempt: int


class ReportFault(msgspec.Struct, frozen=True):
    """Report an engine fault to the router, and avoid this engine for a moment."""

    url: str
    incarnation: str
    detail: str


class AvoidEngine(msgspec.Struct, frozen=True):
    """Avoid this engine for a moment, without a fault."""

    url: str


class FellBack(msgspec.Struct, frozen=True):
    """Without a publisher, tokens came from older weights than the session had seen; they count."""

    url: str
    session_version: int
    policy_version: int


class WakeReaders(msgspec.Struct, frozen=True):
    """There are new tokens, or the generation has ended."""


SLOWEST_TOKEN_S = 0.1
"""A plain attempt gives no sign of progress before its end, so it gets this much more per token."""


MAX_ABORT_REPEAT_S = 0.25


class AttemptPhase(enum.Enum):
    """Phase of an attempt."""

    OPEN = "open"
    ABORTING = "aborting"


class EngineAttempt:
    """The open attempt of a generation, which had `offset` tokens when it began."""

    def __init__(
        self, start: StartAttempt, chosen: EngineChosen, offset: int, now_s: float
    ) -> None:
        self.number = start.attempt
        self.url = start.url
        self.incarnation = chosen.incarnation
        self.policy_version = chosen.policy_version
        """The engine's version when it was chosen; an older one means that the engine was restarted
        or serves another run."""
        self.has_publisher = chosen.has_publisher
        """Whether tokens of older weights are refused."""
        self.offset = offset
        self.phase = AttemptPhase.OPEN
        self.sign_s = now_s
        """When it last gave a sign of progress, or was known to wait here."""
        self._start = start
        self._aborted_s = 0.0
        self.leaves_for_update = False
        """Its engine is about to get new weights: an abort means nothing."""
        self._repeated_s = 0.0
        """By the wall clock."""
        self._num_aborts = 0

    def is_silent(self, now_s: float, answer_timeout_s: float) -> bool:
        """Whether an open attempt has given no sign of progress for too long."""
        patience_s = answer_timeout_s
        if not self._start.stream:
            patience_s += SLOWEST_TOKEN_S * self._start.max_new_tokens
        return now_s - self.sign_s >= patience_s

    def abort(self, now_s: float, wall_s: float) -> AbortAttempt:
        """Request its end, again if it was requested already."""
        if self.phase is AttemptPhase.OPEN:
            self.phase = AttemptPhase.ABORTING
            self._aborted_s = now_s
        self._repeated_s = wall_s
        self._num_aborts += 1
        return AbortAttempt(self.number, self._start.rid, self.url)

    def is_deaf(self, now_s: float, abort_timeout_s: float) -> bool:
        """Whether it has ignored aborts for too long."""
        return now_s - self._aborted_s >= abort_timeout_s

    def wants_repeat(self, wall_s: float, abort_repeat_s: float) -> bool:
        """Whether an abort that may have come too early should be repeated; intervals grow."""
        wait_s = abort_repeat_s * 2.0 ** (self._num_aborts - 1)
        return wall_s - self._repeated_s >= min(wait_s, MAX_ABORT_REPEAT_S)


def is_resumable(params: SamplingParams) -> bool:
    """Whether an attempt whose prompt ends with sampled tokens samples as if it were uncut.

    Engines count penalties over a request's own output only (SGLang, penaltylib), which a resumed
    attempt lacks, and match a grammar against that output from its begin.
    """
    no_additive = params.frequency_penalty == 0.0 and params.presence_penalty == 0.0
    return no_additive and params.repetition_penalty == 1.0 and params.grammar is None
