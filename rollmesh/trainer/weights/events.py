"""What the publisher is asked, told and asks for, as small frozen structs.

Invariant: values only. Driven by publisher.py and by whoever carries its actions out: publish.py,
and the simulator.
"""

import enum

import msgspec

from rollmesh.engine.answers import UNVERSIONED
from rollmesh.wire.machine import Received, Send, Ticked


class UpdatePhase(enum.StrEnum):
    """Where one engine is on its way; publisher.py draws it."""

    WAITING = "waiting"
    BEGINNING = "beginning"
    DRAINING = "draining"
    PAUSING = "pausing"
    FLUSHING = "flushing"
    LOADING = "loading"
    RESUMING = "resuming"
    SCORING = "scoring"
    FINISHING = "finishing"
    UNDOING = "undoing"
    FAILING = "failing"


class Probe(msgspec.Struct, frozen=True):
    """A fixed text, and its log-probs under the new weights as the trainer computes them."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Log-probs of all tokens but the first."""
    coarse: tuple[float, ...] = ()
    """The same with every weight rounded to bfloat16, as most engines hold them; () if unknown."""


class PublishReport(msgspec.Struct, frozen=True, kw_only=True):
    """How a publication went."""

    policy_version: int
    updated: tuple[str, ...]
    """Engines that serve it."""
    failed: tuple[str, ...]
    """`url: why` of engines that do not; they are fenced and tried again."""
    doubted: tuple[str, ...] = ()
    """Engines that serve it and seem to ignore updates; no other serves."""
    wall_s: float
    gap_s: float
    """Longest time for which one engine was given no turns."""

    @property
    def is_refused(self) -> bool:
        """Whether no engine serves it and some have failed; an empty or sleeping fleet has not."""
        return bool(self.failed) and not self.updated


class FleetState(msgspec.Struct):
    """The publisher's last view of the engines; written on its thread, read from any."""

    accepted_version: int = UNVERSIONED
    """The newest policy version that an engine serves, be it since its publication ended."""
    all_asleep: bool = False
    """There are engines, and the GPUs of all are used by others."""


# events


class PublishAsked(msgspec.Struct, frozen=True):
    """Bring the weights in `folder` to all engines; a newer target replaces an older one."""

    policy_version: int
    folder: str
    probe: Probe | None = None
    adapter: str = ""
    """The folder holds an adapter, which engines know by this name, and no whole weights."""


class EngineCalled(msgspec.Struct, frozen=True):
    """The answer to CallEngine; a late one is ignored."""

    url: str
    serial: int
    ok: bool
    detail: str = ""
    logprobs: tuple[float, ...] = ()
    """After SCORING."""
    num_requests: int = 0
    """After DRAINING: that it runs, or that wait there."""
    policy_version: int = UNVERSIONED
    """After SCORING: the version that the engine names."""
    is_local: bool = False
    """No connection could be opened here, by no fault of the engine, which did not get the call."""


# actions


class CallEngine(msgspec.Struct, frozen=True):
    """Do what `phase` says at the engine: DRAINING looks how much it runs, UNDOING resumes."""

    url: str
    serial: int
    phase: UpdatePhase
    target: PublishAsked
    after_s: float = 0.0
    """Wait so long first."""


class PublishEnded(msgspec.Struct, frozen=True):
    """The publication is over."""

    report: PublishReport


class Accepted(msgspec.Struct, frozen=True):
    """The first engine serves this version, perhaps after its publication ended without one."""

    policy_version: int


class Doubted(msgspec.Struct, frozen=True):
    """The engine seems to ignore updates. It is used all the same, since no other serves."""

    url: str
    why: str


class Superseded(msgspec.Struct, frozen=True):
    """A living publisher, another one, is further, and keeps the engines it has."""

    policy_version: int
    """Of the target that this one wants them at."""
    by: int


Event = PublishAsked | EngineCalled | Received | Ticked
Action = Send | CallEngine | PublishEnded | Accepted | Doubted | Superseded
