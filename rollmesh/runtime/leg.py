"""The leg that a generation has open: where it runs, since when, and what it may still be given.

    none --StartLeg--> OPEN --AbortLeg--> ABORTING --its stream ends, or it is dropped--> none

Invariant: its times are of the generation's clock, which stands still while engines are updated;
only the repeats of an abort, for whose end an update waits, go by the wall's. Pure; owned and
driven by generation.py.
"""

import enum

from rollmesh.core.types import SamplingParams
from rollmesh.runtime.generation_events import AbortLeg, EngineChosen, StartLeg

SLOWEST_TOKEN_S = 0.1
"""A plain leg shows no sign of life before its end, so it is given this much more per token."""


MAX_ABORT_REPEAT_S = 0.25


class LegPhase(enum.Enum):
    """See the module's drawing."""

    OPEN = "open"
    ABORTING = "aborting"


class Leg:
    """See the module. `offset` is how many tokens the generation had when it began."""

    def __init__(self, start: StartLeg, chosen: EngineChosen, offset: int, now_s: float) -> None:
        self.number = start.leg
        self.url = start.url
        self.incarnation = chosen.incarnation
        self.policy_version = chosen.policy_version
        """The engine's when it was chosen; an older one has it only if it was started again or
        serves a run that counts anew."""
        self.has_publisher = chosen.has_publisher
        """Whether tokens of older weights are refused."""
        self.offset = offset
        self.phase = LegPhase.OPEN
        self.sign_s = now_s
        """When it showed a sign of life last, or was known to wait here."""
        self._start = start
        self._aborted_s = 0.0
        self.leaves_for_update = False
        """Its engine is to get new weights: an abort is no sign of anything."""
        self._repeated_s = 0.0
        """By the wall's clock."""
        self._num_aborts = 0

    def is_silent(self, now_s: float, answer_timeout_s: float) -> bool:
        """Whether an open leg has shown no sign of life for too long."""
        patience_s = answer_timeout_s
        if not self._start.stream:
            patience_s += SLOWEST_TOKEN_S * self._start.max_new_tokens
        return now_s - self.sign_s >= patience_s

    def abort(self, now_s: float, wall_s: float) -> AbortLeg:
        """Ask for its end, again if it was asked for already."""
        if self.phase is LegPhase.OPEN:
            self.phase = LegPhase.ABORTING
            self._aborted_s = now_s
        self._repeated_s = wall_s
        self._num_aborts += 1
        return AbortLeg(self.number, self._start.rid, self.url)

    def is_deaf(self, now_s: float, abort_timeout_s: float) -> bool:
        """Whether it has ignored aborts for too long."""
        return now_s - self._aborted_s >= abort_timeout_s

    def wants_repeat(self, wall_s: float, abort_repeat_s: float) -> bool:
        """Whether an abort that may have come too early is due again; each time a little later."""
        wait_s = abort_repeat_s * 2.0 ** (self._num_aborts - 1)
        return wall_s - self._repeated_s >= min(wait_s, MAX_ABORT_REPEAT_S)


def is_resumable(params: SamplingParams) -> bool:
    """Whether a leg that begins with sampled tokens as its prompt samples on as if uncut.

    Engines count penalties over a request's own output only (SGLang, penaltylib), which a resumed
    leg has none of, and hold a grammar against that output from its begin.
    """
    no_additive = params.frequency_penalty == 0.0 and params.presence_penalty == 0.0
    return no_additive and params.repetition_penalty == 1.0 and params.grammar is None
