"""What a pipeline's program has said to the scheduler, and what it waits to hear.

    claim      OPEN -> GRANTED | RELEASED | REFUSED | WITHDRAWN   (then it is forgotten here)
               OPEN <-> OFFERED, which is answered by TakeGpus, again each second -> any of these
               OPEN, OFFERED -> WITHDRAWING -> any but GRANTED, or nothing heard of it for
                                      PATIENCE_S from who is heard
    stream     REPORTED -> RETIRED -> forgotten, when generation is asked for anew
    scheduler  HEARD <-> SILENT   (nothing came from it for SILENT_S)

Owns the asks that have no last answer, and the newest word of each stream of progress. Invariants:
HooksWired is said before anything else; who waits says its ask again each second, and all that is
open at once to a scheduler that was started anew, in the order in which it was asked; to a silent
one only HooksWired is said, so that nothing piles up on the way. What is offered is nobody's to
compute on until it is granted: an offer may have lapsed (service/tickets.py draws that). A claim
that was answered for good is never said again: the scheduler's journal knows it. Pure; driven by
hooks.py and by simulators.
"""

import math

import msgspec

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
TELL_S = 30.0
"""Who waits for so long says so, and why; and again after as long."""
PATIENCE_S = 10.0
"""So long a withdrawal is said again, to a scheduler that is there: one that is not may know it as
granted, and nobody else would give that back."""
NUM_BUCKETS = 50
"""Progress is told where it enters another one: 2 % each."""
NUM_CLEARS = 3
"""A stream that is retired is said to be so many times: nothing answers that."""

Claim = RequestGpus | NotifyReleaseGpus | NotifyReleaseThenRequestGpus
Said = Claim | WithdrawRequest | ReportProgress | ClearProgress | ReportPreempt
"""What a program says."""


class Settled(msgspec.Struct, frozen=True):
    """Action: this claim has its last answer."""

    key: str
    state: TicketState
    gpus: tuple[int, ...] = ()
    reason: str = ""


class Waits(msgspec.Struct, frozen=True):
    """Action: tell people that this claim has waited for long."""

    claim: Claim
    waited_s: float
    reason: str


class SchedulerSilent(msgspec.Struct, frozen=True):
    """Action: tell people that the scheduler is not heard."""

    silent_s: float


class SchedulerHeard(msgspec.Struct, frozen=True):
    """Action: tell people that it is heard again."""


Event = Said | Received | Ticked
Action = Send | Settled | Waits | SchedulerSilent | SchedulerHeard


class _Open(msgspec.Struct):
    """A claim without its last answer."""

    claim: Claim
    asked_s: float
    told_s: float
    reason: str = ""
    is_heard: bool = False
    """The scheduler knows it."""
    offer: int = 0
    """Its number, where there is one."""
    withdrawn_s: float | None = None

    def is_last(self, state: TicketState) -> bool:
        """Whether it ends with that. A grant that has crossed its withdrawal does not, but of
        generation: nobody else would give it back, should the withdrawal be lost."""
        if state is TicketState.GRANTED and self.withdrawn_s is not None:
            return self.claim.cluster == GENERATION_CLUSTER
        return state not in (TicketState.QUEUED, TicketState.OFFERED)

    @property
    def words(self) -> list[Claim | TakeGpus | WithdrawRequest]:
        """What is said of it now; what gives up something first has to be heard of."""
        if self.withdrawn_s is None:
            takes = [TakeGpus(self.claim.key, self.offer)] if self.offer else []
            return [self.claim, *takes]
        gives_up = isinstance(self.claim, NotifyReleaseThenRequestGpus)
        first = [self.claim] if gives_up and not self.is_heard else []
        return [*first, WithdrawRequest(self.claim.key)]


class _Stream(msgspec.Struct):
    """One stream of progress."""

    newest: ReportProgress
    told_bucket: int = -1
    is_retired: bool = False
    num_clears: int = 0
    """Still to be said."""


class _Batches:
    """Numbers of batches, which have to grow over the lives of a program.

    They are of its clock, which may have gone back since its last life: then what the scheduler
    knows lies above all that was said in this one, and so do numbers from then on.
    """

    def __init__(self) -> None:
        self._above = 0
        self._foreign = self._own = 0

    def hear(self, newest: int) -> None:
        """The scheduler knows of this one."""
        if newest > self._own:
            self._foreign = newest

    def number(self, batch: int) -> int:
        """What the scheduler is told."""
        if batch + self._above <= self._foreign:
            self._above = self._foreign + 1 - batch
        self._own = max(self._own, batch + self._above)
        return batch + self._above


class Claims:
    """See the module."""

    def __init__(self, pipeline_id: str) -> None:
        self.pipeline_id = pipeline_id
        self._open: dict[str, _Open] = {}
        self._streams: dict[str, _Stream] = {}
        self._scheduler = ""
        """Its incarnation."""
        self._is_silent = False
        self._heard_s: float | None = None
        """None before the first event: patience counts from then."""
        self._renewed_s = -math.inf
        self._batches = _Batches()

    def step(self, event: Event, now_s: float) -> list[Action]:
        """What follows from `event`; a program's words are sent at once where they are news."""
        if self._heard_s is None:
            self._heard_s = now_s
        actions = self._tend(now_s)
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
                actions += self._say(event)
            case Received(message=message):
                actions += self._on_received(message, now_s)
        return actions

    # what the program says

    def _on_claim(self, claim: Claim, now_s: float) -> list[Action]:
        if opens_generation(claim):
            # It begins anew: what is retired must not close it, should it come late.
            retired = [name for name, each in self._streams.items() if each.is_retired]
            for name in retired:
                del self._streams[name]
        self._open[claim.key] = _Open(claim, now_s, now_s)
        return self._say(claim)

    def _on_withdrawn(self, key: str, now_s: float) -> list[Action]:
        waiting = self._open.get(key)
        if waiting is None:
            return []
        waiting.withdrawn_s = now_s
        return self._say(*waiting.words)

    def _on_progress(self, report: ReportProgress) -> list[Action]:
        stream = self._streams.get(report.stream)
        if stream is None or stream.is_retired or stream.newest.batch != report.batch:
            stream = self._streams[report.stream] = _Stream(report)
        stream.newest = report
        bucket = bucket_of(report)
        if bucket == stream.told_bucket:
            return []
        stream.told_bucket = bucket
        return self._say(report)

    def _on_retired(self, name: str) -> list[Action]:
        stream = self._streams.get(name)
        if stream is None or stream.is_retired:
            return []
        stream.is_retired, stream.num_clears = True, NUM_CLEARS
        return self._clear(stream)

    # what the scheduler says

    def _on_received(self, message: AnyMessage, now_s: float) -> list[Action]:
        self._heard_s = now_s
        actions: list[Action] = []
        was_silent, self._is_silent = self._is_silent, False
        if was_silent:
            actions.append(SchedulerHeard())
        match message:
            case SchedulerHello(scheduler, newest_batch=newest_batch):
                self._batches.hear(newest_batch)
                is_another, self._scheduler = scheduler != self._scheduler, scheduler
                if was_silent or is_another:
                    for stream in self._streams.values():
                        stream.num_clears = NUM_CLEARS if stream.is_retired else 0
                    actions += self._say_all(now_s)
            case TicketMoved(key) if key in self._open:
                actions += self._on_moved(self._open[key], message)
        return actions

    def _on_moved(self, waiting: _Open, moved: TicketMoved) -> list[Action]:
        waiting.reason, waiting.is_heard = moved.reason, True
        if waiting.is_last(moved.state):
            del self._open[moved.key]
            return [Settled(moved.key, moved.state, moved.gpus, moved.reason)]
        before, waiting.offer = waiting.offer, 0
        if moved.state is not TicketState.OFFERED or waiting.withdrawn_s is not None:
            return []
        waiting.offer = moved.offer
        return self._say(TakeGpus(moved.key, moved.offer)) if moved.offer != before else []

    # what time brings

    def _tend(self, now_s: float) -> list[Action]:
        if now_s - self._renewed_s < RENEW_S:
            return []
        actions = self._listen(now_s)
        for key, waiting in [*self._open.items()]:
            if waiting.withdrawn_s is None:
                actions += self._complain(waiting, now_s)
            elif self._is_silent:
                waiting.withdrawn_s = now_s
            elif now_s - waiting.withdrawn_s >= PATIENCE_S:
                del self._open[key]
                actions.append(Settled(key, TicketState.WITHDRAWN))
        return actions + self._say_all(now_s)

    def _complain(self, waiting: _Open, now_s: float) -> list[Action]:
        if now_s - waiting.told_s < TELL_S:
            return []
        waiting.told_s = now_s
        why = "the scheduler is not heard" if self._is_silent else waiting.reason
        return [Waits(waiting.claim, now_s - waiting.asked_s, why)]

    def _listen(self, now_s: float) -> list[Action]:
        assert self._heard_s is not None
        silent_s = now_s - self._heard_s
        if self._is_silent or silent_s < SILENT_S:
            return []
        self._is_silent = True
        return [SchedulerSilent(silent_s)]

    def _say_all(self, now_s: float) -> list[Action]:
        """That we are here; and, to whom listens, what is open."""
        self._renewed_s = now_s
        actions: list[Action] = [Send(ROUTER, HooksWired(self.pipeline_id))]
        for waiting in self._open.values():
            actions += self._say(*waiting.words)
        for stream in self._streams.values():
            if not stream.is_retired:
                actions += self._say(stream.newest)
            elif stream.num_clears:
                actions += self._clear(stream)
        return actions

    def _clear(self, stream: _Stream) -> list[Action]:
        said = self._say(ClearProgress(self.pipeline_id, stream.newest.stream, stream.newest.batch))
        stream.num_clears -= len(said)
        return said

    def _say(self, *messages: AnyMessage) -> list[Action]:
        if self._is_silent:
            return []
        return [Send(ROUTER, self._numbered(message)) for message in messages]

    def _numbered(self, message: AnyMessage) -> AnyMessage:
        if not isinstance(message, ReportProgress | ClearProgress):
            return message
        return msgspec.structs.replace(message, batch=self._batches.number(message.batch))


def opens_generation(claim: Claim) -> bool:
    """Whether it asks for engines."""
    is_release = isinstance(claim, NotifyReleaseGpus)
    return not is_release and claim.cluster == GENERATION_CLUSTER


def bucket_of(report: ReportProgress) -> int:
    """Which 2 % of its target it is in; the last only when nothing is left."""
    return NUM_BUCKETS * report.completed // max(1, report.target)
