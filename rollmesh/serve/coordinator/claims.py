"""Claims: requests of a pipeline's program to the scheduler, until their last answer, and its
progress.

    claim      OPEN -> GRANTED | RELEASED | REFUSED | WITHDRAWN   (then it is forgotten here)
               OPEN <-> OFFERED, answered by TakeGpus, repeated each second -> any of these
               OPEN, OFFERED -> WITHDRAWING -> any but GRANTED, or no answer for
                                      withdraw_timeout_s from a scheduler that is reachable
    stream     REPORTED -> RETIRED -> forgotten, when generation is requested again
    scheduler  REACHABLE <-> SILENT   (nothing came from it for SILENT_S)

- HooksWired is sent first. Waiting claims are repeated each second, and all open ones at once, in
  order, to a restarted scheduler. A silent scheduler gets only HooksWired, so that nothing piles
  up.
- Offered GPUs must not be used before they are granted: an offer may have expired
  (scheduler/service/tickets.py).
- A claim with a final answer is never repeated: the scheduler's journal knows it.
- Pure.
"""

import math

import msgspec

from rollmesh.core.config import TrainerConfig
from rollmesh.wire.machine import ROUTER, Received, Send, Ticked
from rollmesh.wire.messages import AnyMessage
from rollmesh.wire.scheduling import (
    GENERATION_CLUSTER,
    ClearProgress,
    HooksWired,
    NotifyReleaseGpus,
    NotifyReleaseThenRequestGpus,
    ReportPreempt,
    ReportProgress,
    RequestGpus,
    SchedulerHello,
    TakeGpus,
    TicketMoved,
    TicketState,
    WithdrawRequest,
)

RENEW_S = 1.0
SILENT_S = 5.0
WARN_S = 30.0
"""Interval of warnings about a waiting claim."""
WITHDRAW_TIMEOUT_S = TrainerConfig().withdraw_timeout_s
"""A withdrawal is repeated for this long to a reachable scheduler: one that is away may have
granted the claim, and only the withdrawal gives it back."""
NUM_BUCKETS = 50
"""Progress is sent when it enters another bucket: 2 % each."""
NUM_CLEARS = 3
"""Times that a retirement is sent, since it is not answered."""

GpuClaim = RequestGpus | NotifyReleaseGpus | NotifyReleaseThenRequestGpus
ProgramMessage = GpuClaim | WithdrawRequest | ReportProgress | ClearProgress | ReportPreempt
"""Messages of a program."""


class ClaimSettled(msgspec.Struct, frozen=True):
    """Action: this claim has its final answer."""

    key: str
    state: TicketState
    gpus: tuple[int, ...] = ()
    reason: str = ""


class StillWaiting(msgspec.Struct, frozen=True):
    """Action: warn that this claim has waited for long."""

    claim: GpuClaim
    waited_s: float
    reason: str


class SchedulerSilent(msgspec.Struct, frozen=True):
    """Action: warn that the scheduler is silent."""

    silent_s: float


class SchedulerReachable(msgspec.Struct, frozen=True):
    """Action: log that it answers again."""


ClaimEvent = ProgramMessage | Received | Ticked
ClaimAction = Send | ClaimSettled | StillWaiting | SchedulerSilent | SchedulerReachable


class _OpenClaim(msgspec.Struct):
    """A claim without its final answer."""

    claim: GpuClaim
    asked_s: float
    warned_s: float
    reason: str = ""
    is_acknowledged: bool = False
    """The scheduler knows it."""
    offer: int = 0
    """Number of the offer, if any."""
    withdrawn_s: float | None = None

    def is_last(self, state: TicketState) -> bool:
        """Whether the claim ends with that state. A grant that crossed its withdrawal does not end
        it, except for generation: only the withdrawal gives it back, should it be lost."""
        if state is TicketState.GRANTED and self.withdrawn_s is not None:
            return self.claim.cluster == GENERATION_CLUSTER
        return state not in (TicketState.QUEUED, TicketState.OFFERED)

    @property
    def messages(self) -> list[GpuClaim | TakeGpus | WithdrawRequest]:
        """Messages to send now; a claim that releases first must be acknowledged before it is
        withdrawn."""
        if self.withdrawn_s is None:
            takes = [TakeGpus(self.claim.key, self.offer)] if self.offer else []
            return [self.claim, *takes]
        gives_up = isinstance(self.claim, NotifyReleaseThenRequestGpus)
        first = [self.claim] if gives_up and not self.is_acknowledged else []
        return [*first, WithdrawRequest(self.claim.key)]


class _ProgressStream(msgspec.Struct):
    """One stream of progress."""

    newest: ReportProgress
    sent_bucket: int = -1
    is_retired: bool = False
    num_clears: int = 0
    """Still to be sent."""


class _Batches:
    """Numbers of batches, which must grow across restarts of a program.

    They are taken from the clock, which may have gone back since the last process: then numbers
    continue above what the scheduler knows.
    """

    def __init__(self) -> None:
        self._above = 0
        self._foreign = self._own = 0

    def note_newest(self, newest: int) -> None:
        """Record the newest batch that the scheduler knows."""
        if newest > self._own:
            self._foreign = newest

    def number(self, batch: int) -> int:
        """Number to send."""
        if batch + self._above <= self._foreign:
            self._above = self._foreign + 1 - batch
        self._own = max(self._own, batch + self._above)
        return batch + self._above


class Claims:
    def __init__(self, pipeline_id: str, withdraw_timeout_s: float = WITHDRAW_TIMEOUT_S) -> None:
        self.pipeline_id = pipeline_id
        self._withdraw_timeout_s = withdraw_timeout_s
        self._open: dict[str, _OpenClaim] = {}
        self._streams: dict[str, _ProgressStream] = {}
        self._scheduler = ""
        """Its incarnation."""
        self._is_silent = False
        self._last_seen_s: float | None = None
        """None before the first event, from which patience counts."""
        self._renewed_s = -math.inf
        self._batches = _Batches()

    def step(self, event: ClaimEvent, now_s: float) -> list[ClaimAction]:
        """Handle an event; a program's messages are sent at once if they are news."""
        if self._last_seen_s is None:
            self._last_seen_s = now_s
        actions = self._update(now_s)
        match event:
            case RequestGpus() | NotifyReleaseGpus() | NotifyReleaseThenRequestGpus():
                actions += self._on_claim(event, now_s)
            case WithdrawRequest(key):
                actions += self._on_withdrawn(key, now_s)
            case ReportProgress():
                actions += self._on_progress(event)
            case ClearProgress(stream=stream):
                actions += self._on_retired(stream)
            case ReportPreempt():
                actions += self._send(event)
            case Received(message=message):
                actions += self._on_received(message, now_s)
        return actions

    # messages of the program

    def _on_claim(self, claim: GpuClaim, now_s: float) -> list[ClaimAction]:
        if opens_generation(claim):
            # A new demand: a late retirement must not close it.
            retired = [name for name, each in self._streams.items() if each.is_retired]
            for name in retired:
                del self._streams[name]
        self._open[claim.key] = _OpenClaim(claim, now_s, now_s)
        return self._send(claim)

    def _on_withdrawn(self, key: str, now_s: float) -> list[ClaimAction]:
        waiting = self._open.get(key)
        if waiting is None:
            return []
        waiting.withdrawn_s = now_s
        return self._send(*waiting.messages)

    def _on_progress(self, report: ReportProgress) -> list[ClaimAction]:
        stream = self._streams.get(report.stream)
        if stream is None or stream.is_retired or stream.newest.batch != report.batch:
            stream = self._streams[report.stream] = _ProgressStream(report)
        stream.newest = report
        bucket = bucket_of(report)
        if bucket == stream.sent_bucket:
            return []
        stream.sent_bucket = bucket
        return self._send(report)

    def _on_retired(self, name: str) -> list[ClaimAction]:
        stream = self._streams.get(name)
        if stream is None or stream.is_retired:
            return []
        stream.is_retired, stream.num_clears = True, NUM_CLEARS
        return self._clear(stream)

    # messages of the scheduler

    def _on_received(self, message: AnyMessage, now_s: float) -> list[ClaimAction]:
        self._last_seen_s = now_s
        actions: list[ClaimAction] = []
        was_silent, self._is_silent = self._is_silent, False
        if was_silent:
            actions.append(SchedulerReachable())
        match message:
            case SchedulerHello(scheduler, newest_batch=newest_batch):
                self._batches.note_newest(newest_batch)
                is_another, self._scheduler = scheduler != self._scheduler, scheduler
                if was_silent or is_another:
                    for stream in self._streams.values():
                        stream.num_clears = NUM_CLEARS if stream.is_retired else 0
                    actions += self._send_all(now_s)
            case TicketMoved(key) if key in self._open:
                actions += self._on_moved(self._open[key], message)
        return actions

    def _on_moved(self, waiting: _OpenClaim, moved: TicketMoved) -> list[ClaimAction]:
        waiting.reason, waiting.is_acknowledged = moved.reason, True
        if waiting.is_last(moved.state):
            del self._open[moved.key]
            return [ClaimSettled(moved.key, moved.state, moved.gpus, moved.reason)]
        before, waiting.offer = waiting.offer, 0
        if moved.state is not TicketState.OFFERED or waiting.withdrawn_s is not None:
            return []
        waiting.offer = moved.offer
        return self._send(TakeGpus(moved.key, moved.offer)) if moved.offer != before else []

    # time

    def _update(self, now_s: float) -> list[ClaimAction]:
        if now_s - self._renewed_s < RENEW_S:
            return []
        actions = self._check_silence(now_s)
        for key, waiting in [*self._open.items()]:
            if waiting.withdrawn_s is None:
                actions += self._warn(waiting, now_s)
            elif self._is_silent:
                waiting.withdrawn_s = now_s
            elif now_s - waiting.withdrawn_s >= self._withdraw_timeout_s:
                del self._open[key]
                actions.append(ClaimSettled(key, TicketState.WITHDRAWN))
        return actions + self._send_all(now_s)

    def _warn(self, waiting: _OpenClaim, now_s: float) -> list[ClaimAction]:
        if now_s - waiting.warned_s < WARN_S:
            return []
        waiting.warned_s = now_s
        why = "the scheduler does not answer" if self._is_silent else waiting.reason
        return [StillWaiting(waiting.claim, now_s - waiting.asked_s, why)]

    def _check_silence(self, now_s: float) -> list[ClaimAction]:
        assert self._last_seen_s is not None
        silent_s = now_s - self._last_seen_s
        if self._is_silent or silent_s < SILENT_S:
            return []
        self._is_silent = True
        return [SchedulerSilent(silent_s)]

    def _send_all(self, now_s: float) -> list[ClaimAction]:
        """Send HooksWired, and all open claims and progress if the scheduler is reachable."""
        self._renewed_s = now_s
        actions: list[ClaimAction] = [Send(ROUTER, HooksWired(self.pipeline_id))]
        for waiting in self._open.values():
            actions += self._send(*waiting.messages)
        for stream in self._streams.values():
            if not stream.is_retired:
                actions += self._send(stream.newest)
            elif stream.num_clears:
                actions += self._clear(stream)
        return actions

    def _clear(self, stream: _ProgressStream) -> list[ClaimAction]:
        sent = self._send(
            ClearProgress(self.pipeline_id, stream.newest.stream, stream.newest.batch)
        )
        stream.num_clears -= len(sent)
        return sent

    def _send(self, *messages: AnyMessage) -> list[ClaimAction]:
        if self._is_silent:
            return []
        return [Send(ROUTER, self._numbered(message)) for message in messages]

    def _numbered(self, message: AnyMessage) -> AnyMessage:
        if not isinstance(message, ReportProgress | ClearProgress):
            return message
        return msgspec.structs.replace(message, batch=self._batches.number(message.batch))


def opens_generation(claim: GpuClaim) -> bool:
    """Whether it requests engines."""
    is_release = isinstance(claim, NotifyReleaseGpus)
    return not is_release and claim.cluster == GENERATION_CLUSTER


def bucket_of(report: ReportProgress) -> int:
    """Bucket of 2 % of its target; the last only when nothing is left."""
    return NUM_BUCKETS * report.completed // max(1, report.target)
