"""What all sessions of a process share, and what one session is opened with.

Values and doors only; totals and openings are what sessions write to. Made by registry.py, read
by session.py.
"""

import sys
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from rollmesh.core.clock import Clock
from rollmesh.core.errors import SessionError
from rollmesh.core.ids import RolloutId
from rollmesh.core.types import SamplingPolicy
from rollmesh.runtime.chat import Rotating
from rollmesh.runtime.deeds import Scribe
from rollmesh.runtime.generation_events import GenerationRequest
from rollmesh.runtime.openings import Openings
from rollmesh.runtime.prompts import Prompts
from rollmesh.runtime.reply import LiveGeneration


class AnySampler(Protocol):
    """What starts generations; legs.Sampler is the real one."""

    def start(self, request: GenerationRequest) -> LiveGeneration: ...
    def waiting(self) -> dict[str, Any] | None:
        """How many calls wait for an engine, for how long and why; None where none does."""


class Totals(msgspec.Struct):
    """Plain integers, counted on the hot path and read by a collector."""

    num_calls: int = 0
    """Generations started."""
    num_tokens: int = 0
    """Sampled."""


class SessionKit(msgspec.Struct, frozen=True):
    """What all sessions of a process share."""

    sampler: AnySampler
    prompts: Prompts
    clock: Clock
    max_context_tokens: int
    totals: Totals
    openings: Openings
    rotating: Rotating = None
    on_sealed: list[Callable[[RolloutId], None]] = []
    """Told of each session that is sealed, by its rollout."""
    max_session_bytes: int = sys.maxsize
    max_turns_at_once: int = sys.maxsize

    def check_fits(self, num_choices: int) -> None:
        """SessionError 400 if one call asks for more choices than a session may sample at once."""
        limit = self.max_turns_at_once
        if num_choices > limit:
            why = f"the call asks for {num_choices} answers (prompts x n), at most {limit} are"
            why = f"{why} sampled at once for one session (interception.max_turns_at_once)"
            raise SessionError(400, "too_many_choices", why)

    def over_limit(self, held_bytes: int) -> str:
        """Why a session that holds so much, which is more than it may, is to end."""
        limit = self.max_session_bytes
        return f"the session holds {held_bytes} bytes, interception.max_session_bytes = {limit}"


class SessionAsk(msgspec.Struct, frozen=True):
    """What a session is opened with."""

    session_id: str
    rollout_id: RolloutId
    sampling: SamplingPolicy
    seed: int
    scribe: Scribe | None = None
    """Writes down what the session does; None where nothing of it outlives the process."""
    min_policy_version: int = -1
    """The oldest weights that may answer its first call; -1: any."""
