"""Calls on their way through all ranks.

    STAGING -> RUNNING -> ended      staging: ranks fetch the arguments, and run nothing
    STAGING -> ended                 some rank cannot have them, so none runs it

Invariants: no rank begins a call before all have its arguments, so a fetch that fails never leaves
the others alone in a collective; calls run in the order in which they were made, at every rank; a
call ends once, with an answer of each rank or with an error that names one. Pure; driven by
crew.py.
"""

import enum
from collections.abc import Iterator

import msgspec

from rollmesh.core.errors import CallFailed, RankError, RankGone
from rollmesh.wire.frames import Buffer
from rollmesh.wire.ranks import CallEnded, CallStaged, DropCall, RankMessage, RunCall, StageCall


class CallState(enum.StrEnum):
    """STAGING -> RUNNING, and then it is forgotten"""

    STAGING = "staging"
    RUNNING = "running"


class CallMade(msgspec.Struct, frozen=True):
    """Event: call this method at all ranks."""

    call_id: int
    role: str
    method: str
    step: int
    """The train step that tags the answers, or -1."""
    bodies: tuple[bytes, ...]
    """The arguments for each rank; empty for who follows a head."""


class ToAll(msgspec.Struct, frozen=True):
    """Action: tell all ranks."""

    message: RankMessage
    bodies: tuple[Buffer, ...] = ()
    """One for each, where they have any."""


class Answered(msgspec.Struct, frozen=True):
    """Action: the call has been run at all ranks; `bodies` are their answers."""

    call_id: int
    bodies: tuple[Buffer, ...]


class Failed(msgspec.Struct, frozen=True):
    """Action: the call has no answer."""

    call_id: int
    error: RankError


CallAction = ToAll | Answered | Failed


class _Call(msgspec.Struct):
    made: CallMade
    state: CallState = CallState.STAGING
    staged: set[int] = msgspec.field(default_factory=set)
    answers: dict[int, Buffer] = msgspec.field(default_factory=dict)
    errors: dict[int, str] = msgspec.field(default_factory=dict)
    settled_by_s: float | None = None
    """When the others must have come out of it."""

    @property
    def name(self) -> str:
        return f"{self.made.role}.{self.made.method}"


class Calls:
    """All that are open."""

    def __init__(self, num_ranks: int, settle_s: float) -> None:
        self._num_ranks = num_ranks
        self._settle_s = settle_s
        self._calls: dict[int, _Call] = {}
        """As they were made."""

    def make(self, made: CallMade, ended_step: int) -> Iterator[CallAction]:
        """A new one."""
        self._calls[made.call_id] = _Call(made)
        message = StageCall(ended_step, made.call_id, made.role, made.method, made.step)
        yield ToAll(message, made.bodies)

    def staged(self, message: CallStaged, ended_step: int) -> Iterator[CallAction]:
        """A rank has the arguments, or cannot have them."""
        call = self._calls.get(message.call_id)
        if call is None or call.state is not CallState.STAGING:
            return
        call.staged.add(message.rank)
        if message.error:
            call.errors[message.rank] = message.error
        if len(call.staged) == self._num_ranks and call.errors:
            yield ToAll(DropCall(ended_step, message.call_id))
            yield self._failed(call)
        yield from self._release(ended_step)

    def ended(self, message: CallEnded, body: Buffer, now_s: float) -> Iterator[CallAction]:
        """A rank has run it."""
        call = self._calls.get(message.call_id)
        if call is None or call.state is not CallState.RUNNING:
            return
        call.answers[message.rank] = body
        if message.error:
            call.errors[message.rank] = message.error
            if call.settled_by_s is None:
                call.settled_by_s = now_s + self._settle_s
        if len(call.answers) < self._num_ranks:
            return
        if call.errors:
            yield self._failed(call)
        else:
            del self._calls[message.call_id]
            bodies = tuple([call.answers[rank] for rank in range(self._num_ranks)])
            yield Answered(message.call_id, bodies)

    def stuck(self, now_s: float) -> RankGone | None:
        """A rank that did not come out of a call at which another had failed."""
        for call in self._calls.values():
            if call.settled_by_s is not None and now_s >= call.settled_by_s:
                inside = min(set(range(self._num_ranks)) - call.answers.keys())
                rank, error = min(call.errors.items())
                why = f"it did not come out of {call.name}, at which rank {rank} failed: {error}"
                return RankGone(inside, why)
        return None

    def fail(self, error: RankError) -> Iterator[CallAction]:
        """Nothing comes of those that are open."""
        calls, self._calls = self._calls, {}
        for call_id in calls:
            yield Failed(call_id, error)

    def _release(self, ended_step: int) -> Iterator[CallAction]:
        """Run what can be run: who is not staged holds up who came later."""
        for call_id, call in self._calls.items():
            if len(call.staged) < self._num_ranks:
                return
            if call.state is CallState.STAGING:
                call.state = CallState.RUNNING
                yield ToAll(RunCall(ended_step, call_id))

    def _failed(self, call: _Call) -> Failed:
        del self._calls[call.made.call_id]
        rank, error = min(call.errors.items())
        return Failed(call.made.call_id, CallFailed(call.name, rank, error))
