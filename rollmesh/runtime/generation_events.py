"""What the generation machine is asked, told and asks for, as small frozen structs.

A leg is one `/generate` call, numbered from 0 within its generation; what concerns a leg that is no
longer the current one is ignored. Invariant: values only. Driven by generation.py and by whoever
carries its actions out: legs.py, and the simulator.
"""

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
from rollmesh.core.types import SamplingParams, VersionRun
from rollmesh.engine.answers import Finish, TopLogprobs
from rollmesh.engine.leg import Image


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One turn to be sampled."""

    generation_id: str
    """For logs."""
    session_key: str
    """Legs of one session stay with one engine while it serves."""
    prompt_ids: Sequence[int]
    """Exact tokens; the caller changes them no more."""
    prompt_json: bytes | memoryview = b""
    """`1,2,3`: the same ids as JSON, checked; then legs send this and never look at the ids."""
    params: SamplingParams
    min_policy_version: int = -1
    """Newest version that the session has seen. Older weights never continue it where a publisher
    is known; elsewhere they do, and it is counted."""
    stream: bool = False
    """Readers want tokens as they come; else one plain call, which costs both sides far less."""
    num_top_logprobs: int = 0
    """So many likeliest tokens are kept for each place."""
    images: tuple[Image, ...] = ()
    """In the order of their placeholders in the prompt."""


class StopHit(msgspec.Struct, frozen=True):
    """A stop string was completed."""

    num_tokens: int
    """Tokens up to and with the one that completed it."""
    stop: str


class StopMatcher(Protocol):
    """Finds stop strings in what one generation sampled; see stops.py."""

    def push(self, token_ids: Sequence[int]) -> StopHit | None:
        """Take the next tokens; the first hit, if they complete one."""


# events


class Joined(msgspec.Struct, frozen=True):
    """A reader came."""


class Left(msgspec.Struct, frozen=True):
    """A reader went."""


class Sealed(msgspec.Struct, frozen=True):
    """The session is over."""

    reason: str


class EngineChosen(msgspec.Struct, frozen=True):
    """The answer to ChooseEngine, when there is one; none is needed otherwise, see EngineMissed."""

    url: str
    incarnation: str
    policy_version: int
    adapter: str = ""
    """Whose weights they are with the engine's own, if it has one."""
    has_publisher: bool = True
    """Whether tokens of older weights are refused; see FleetChanged."""


class EngineMissed(msgspec.Struct, frozen=True):
    """The answer to ChooseEngine where there is none, if anybody knows why."""

    why: str
    """Why no engine serves the session, in a line; '' where no reason is known."""
    is_for_good: bool = False
    """None will come."""
    is_behind: bool = False
    """Engines are READY with older weights than the session has seen."""


class EngineFull(msgspec.Struct, frozen=True):
    """The answer to ChooseEngine where the engine has as many requests of ours as it may have.

    EngineChosen follows when it is the turn of the generation's session; until then no deadline
    runs.
    """


class FleetMoved(msgspec.Struct, frozen=True):
    """The fleet table changed."""

    is_paused: bool
    """What this generation waits for is an engine that is being updated: time stands still."""


class UpdateBegun(msgspec.Struct, frozen=True):
    """The engine at `url` is to get new weights: what can go on elsewhere leaves it."""

    url: str


class EngineLost(msgspec.Struct, frozen=True):
    """The engine at `url` is fenced, gone, or was restarted."""

    url: str


class LegSampled(msgspec.Struct, frozen=True):
    """The engine answered; each event brings only its own tokens."""

    leg: int
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    policy_version: int
    finish: Finish | None = None
    policy_versions: tuple[VersionRun, ...] = ()
    """With `finish`, where the engine knows: the versions of all of the leg's tokens."""
    top_logprobs: Sequence[TopLogprobs] = ()
    """One per token where they were asked for."""


LegFailure = Literal["fault", "broke", "refused", "lost", "local", "overloaded"]
"""`refused`: the engine says that the request is wrong, so another try would fail alike.
`lost`: the request could not be read, so another try would fail alike; no engine's fault.
`local`: no connection could be opened here for as long as a call waits; no engine's fault.
`overloaded`: the engine's queue is full, which is no fault.
`broke`: the engine failed at the request before the first token."""
KIND_OF_ERROR: dict[type[EngineError], LegFailure] = {
    EngineBroke: "broke",
    EngineOverloaded: "overloaded",
    EngineRefused: "refused",
    LocalShortage: "local",
    RequestLost: "lost",
}


class LegHeld(msgspec.Struct, frozen=True):
    """The leg waits until a connection can be opened here: the engine has not got it."""

    leg: int


class LegFailed(msgspec.Struct, frozen=True):
    """The leg's stream ended without a finish."""

    leg: int
    detail: str
    kind: LegFailure = "fault"


# actions


class ChooseEngine(msgspec.Struct, frozen=True):
    """Answer with EngineChosen if an engine with these weights or newer is READY."""

    min_policy_version: int


class StartLeg(msgspec.Struct, frozen=True):
    """Call `/generate` with the prompt and all tokens so far (`machine.context()`)."""

    leg: int
    rid: str
    url: str
    max_new_tokens: int
    extra_key: str
    """Isolates the prefix cache of one policy version."""
    stream: bool
    adapter: str = ""
    """Of the engine's row."""


class AbortLeg(msgspec.Struct, frozen=True):
    """Ask the engine to end the leg; comes again until its stream has ended."""

    leg: int
    rid: str
    url: str


class DropLeg(msgspec.Struct, frozen=True):
    """Close the leg's connection; nothing more is expected of it."""

    leg: int


class ReportFault(msgspec.Struct, frozen=True):
    """Tell the router; this engine should not be chosen for a moment."""

    url: str
    incarnation: str
    detail: str


class AvoidEngine(msgspec.Struct, frozen=True):
    """This engine should not be chosen for a moment, by no fault of its own."""

    url: str


class FellBack(msgspec.Struct, frozen=True):
    """Without a publisher, tokens came from older weights than the session had seen; they count."""

    url: str
    session_version: int
    policy_version: int


class WakeReaders(msgspec.Struct, frozen=True):
    """There are new tokens, or the generation is at an end."""
