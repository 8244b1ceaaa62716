"""What the publisher is asked, told and asks for, as small frozen structs.

Invariant: values only. Driven by publisher.py and by whoever carries its actions out: publish.py,
and the simulator.
"""

import enum

import msgspec

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
    """What the new weights say of a fixed text, by the trainer's own reckoning."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Of all tokens but the first."""


class PublishReport(msgspec.Struct, frozen=True, kw_only=True):
    """How a publication went."""

    policy_version: int
    updated: tuple[str, ...]
    """Engines that serve it."""
    failed: tuple[str, ...]
    """`url: why` of engines that do not; they are fenced and tried again."""
    wall_s: float
    gap_s: float
    """Longest time for which one engine was given no turns."""


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


class Superseded(msgspec.Struct, frozen=True):
    """A living publisher, another one, is further, and keeps the engines it has."""

    policy_version: int
    """Of the target that this one wants them at."""
    by: int


Event = PublishAsked | EngineCalled | Received | Ticked
Action = Send | CallEngine | PublishEnded | Superseded
