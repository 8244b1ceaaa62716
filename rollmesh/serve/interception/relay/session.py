"""A relayed session: its calls, their shared histories, its faults and its end.

    OPEN --seal--> SEALED, after which calls get a 410 and running ones are cut

- Each distinct message of its requests is stored once.
- A marked retry gets the answer of the call that it repeats, unless that call failed. If writing
  that answer failed, it is written again first.
- With a journal, the end of an answer becomes visible only after it is written.
- Every running call is in `_live`, and leaves it at its end.
"""

import asyncio
from collections.abc import Mapping
from types import TracebackType

import msgspec

from rollmesh.core.clock import Clock
from rollmesh.core.config import InterceptionConfig
from rollmesh.core.errors import ContentLost, SessionError
from rollmesh.core.types import Outcome
from rollmesh.runtime.chat import compile_rotating
from rollmesh.runtime.session import OVER_LIMIT
from rollmesh.runtime.session_log import DeliveryChanged
from rollmesh.serve.interception.capture import NO_COUNTS
from rollmesh.serve.interception.dialects.dialect import Dialect
from rollmesh.serve.interception.pieces import MIN_BLOB_BYTES
from rollmesh.serve.interception.relay.account import account_of
from rollmesh.serve.interception.relay.body_prefixes import BodyMatcher
from rollmesh.serve.interception.relay.call import (
    ANSWERED,
    RETRY_AFTER_S,
    CallRequest,
    ForwardState,
    RelayCall,
    fault_of,
    outcome_of,
    silence,
)
from rollmesh.serve.interception.relay.events import LimitReached, RelayEventWriter, RelayReplay
from rollmesh.serve.interception.relay.history import HistoryNode, HistoryStore, StoredRequest
from rollmesh.serve.interception.relay.upstreams import (
    ForwardedRequest,
    UpstreamEndpoint,
    UpstreamPool,
)
from rollmesh.serve.interception.report import SessionReport
from rollmesh.serve.interception.request import RetryMark

CALL_BYTES = 1200
"""Memory of a call besides its answer: the call, its request and their entries in tables."""


class RelayCounters(msgspec.Struct):
    """Counters that all sessions increment and a metrics collector reads."""

    num_calls: int = 0


class RelaySession:
    """Implements CapturedSession."""

    def __init__(
        self,
        session_id: str,
        upstreams: UpstreamPool,
        clock: Clock,
        config: InterceptionConfig,
        totals: RelayCounters,
        writer: RelayEventWriter | None = None,
        replay: RelayReplay | None = None,
    ) -> None:
        """With a `replay` the session continues from the events of another process."""
        self.session_id = session_id
        self.num_calls = 0
        self.own_fault = ""
        """Why the newest ended call has no answer, other than what the answer itself shows."""
        self._last: RelayCall | None = None
        """The newest call with an answer."""
        self.spent_because = ""
        self.forks: Mapping[str, int] = NO_COUNTS
        self.healed: Mapping[str, int] = NO_COUNTS
        """Always empty: nothing is rendered again, so nothing is healed."""
        self._upstreams = upstreams
        self._home: UpstreamEndpoint | None = None
        self._clock = clock
        self._config = config
        self._totals = totals
        self._history: HistoryStore | None = None
        self._calls: list[RelayCall] = []
        self._newest_calls: dict[HistoryNode, RelayCall] = {}
        """By the end of the request's history."""
        self._live: set[RelayCall] = set()
        self.reading_tasks: set[asyncio.Task[object]] = set()
        """Tasks that read the body of a call."""
        self._num_answer_bytes = 0
        self._num_blob_bytes = 0
        """Bytes of long answers."""
        self._writing: list[RelayCall] = []
        """Calls with whole answers that are being written."""
        self._unwritten: list[RelayCall] = []
        """Calls with whole answers whose write failed."""
        self.sealed_because = ""
        self._writer = writer
        if writer is not None:
            writer.on_written = self._written
        if replay is not None:
            self._restore(replay)

    def follow(self, num_bytes: int) -> BodyMatcher:
        """A matcher for the body of the next call, of at most `num_bytes` bytes; SessionError 410
        if the session is sealed, 400 if it is over its limit."""
        if self.sealed_because:
            raise _gone(self.sealed_because)
        if self.spent_because:
            raise self._spent()
        self._history = self._history or HistoryStore()
        return self._history.follow(num_bytes)

    def reading(self) -> "BodyReading":
        """A context around the reading and storing of a body, which `seal` cancels."""
        return BodyReading(self)

    def call(
        self, dialect: Dialect, forwarded: ForwardedRequest, body: BodyMatcher, mark: RetryMark
    ) -> RelayCall:
        """The call that answers this request: a new one, or the one that a retry repeats.

        Raises the SessionErrors of `follow`, and 429 for too many running calls.
        """
        if self.sealed_because or self._history is None:
            raise _gone(self.sealed_because)
        stored, forwarded.body = self._history.hold(body, dialect.history_key)
        if self.held_bytes > (limit := self._config.max_session_bytes):
            held = f"the session holds {self.held_bytes} bytes"
            self.spent_because = f"{held}, interception.max_session_bytes = {limit}"
            if self._writer is not None:
                self._writer.write_event(LimitReached(self.spent_because))
            raise self._spent()
        key = mark.key.decode("latin-1")
        if mark.is_resent and stored is not None:
            known = self._newest_calls.get(stored.node)
            if known is not None and _repeats(known, dialect.route, stored, key):
                if known.state is ForwardState.UNWRITTEN:
                    self._write_again()
                return known
        self._check_turns()
        if self._writer is not None:
            self._writer.check()
        if stored is not None and stored.fork:
            self.forks = {**self.forks, stored.fork: self.forks.get(stored.fork, 0) + 1}
        request = CallRequest(
            number=self.num_calls,
            route=dialect.route,
            stored=stored,
            body=() if stored else forwarded.body,
            key=key,
            asked_s=self._clock.unix_s(),
        )
        call = RelayCall(request, self._config.max_body_bytes, self._ended, clock=self._clock)
        self._calls.append(call)
        self.num_calls += 1
        self._totals.num_calls += 1
        self._live.add(call)
        if stored is not None:
            self._newest_calls[stored.node] = call
        self._home = self._upstreams.send(call, forwarded, self._home)
        return call

    def _check_turns(self) -> None:
        limit = self._config.max_turns_at_once
        if (num_calls := len(self._live)) >= limit:
            why = f"this session has {num_calls} calls in progress; at most {limit}"
            why = f"{why} (interception.max_turns_at_once)"
            raise SessionError(429, "too_many_turns", why, RETRY_AFTER_S)

    def pass_by(self, forwarded: ForwardedRequest) -> RelayCall:
        """Forward a request that samples nothing; its call is not recorded."""
        if self.sealed_because:
            raise _gone(self.sealed_because)
        self._check_turns()
        request = CallRequest(-1, "", None, (), "", 0.0)
        call = RelayCall(request, self._config.max_body_bytes, self._passed, clock=self._clock)
        self._live.add(call)
        self._upstreams.send(call, forwarded, self._home)
        return call

    def left(self, call: RelayCall) -> None:
        """Remove a reader of `call`."""
        call.leave(self._config.keepalive_s)
        if call.request.number >= 0:
            is_undelivered = call.state in ANSWERED and not call.is_delivered
            self._record_delivery(call, is_undelivered=is_undelivered)

    @property
    def is_busy(self) -> bool:
        return bool(self._live)

    @property
    def fault(self) -> str:
        newest = self._calls[-1] if self._calls else None
        if newest is not None and newest in self._live:
            quiet_s = self._clock.now_s() - newest.received_s
            if quiet_s >= self._config.keepalive_s:
                return silence(quiet_s)
        return self.own_fault or (fault_of(self._last) if self._last else "")

    @property
    def natural_outcome(self) -> Outcome:
        if self.fault:
            return Outcome.INFRA_ERROR
        return outcome_of(self._last) if self._last else Outcome.COMPLETED

    @property
    def held_bytes(self) -> int:
        history = self._history
        num_bytes = self._answer_bytes() + self._num_blob_bytes
        return num_bytes + history.num_bytes + history.num_blob_bytes if history else num_bytes

    def held(self) -> dict[str, int]:
        """Bytes of answers and their overhead, of histories, and of blobs, which other sessions may
        share."""
        history = self._history
        return {
            "answers": self._answer_bytes(),
            "history": history.num_bytes if history else 0,
            "blobs": self._num_blob_bytes + (history.num_blob_bytes if history else 0),
        }

    def node_of(self, name: int | str) -> int:
        if isinstance(name, int):
            if 0 <= name < self.num_calls:
                return name
            raise LookupError(name)
        quoted = b'"%b"' % name.encode("utf-8", "surrogatepass")
        for call in reversed(self._calls):
            if quoted in call.body:
                return call.request.number
        raise LookupError(name)

    def seal(self, reason: str) -> None:
        if not self.sealed_because:
            self.sealed_because = reason
            for call in list(self._live):
                call.cut(_gone(self.sealed_because))
            if self._writing and self._writer is not None:
                self._writer.write()
            for task in self.reading_tasks:
                task.cancel()

    def forget(self) -> None:
        if self._history is not None:
            self._history.clear()
        self._history = self._writer = None
        for calls in (self._calls, self._writing, self._unwritten):
            calls.clear()
        self._newest_calls.clear()
        self._last = None
        self._num_answer_bytes = self._num_blob_bytes = 0

    def report(self) -> SessionReport:
        rotating = compile_rotating(self._config.rotating_lines)
        return account_of(self.session_id, self._calls, rotating)

    def _ended(self, call: RelayCall) -> None:
        self._live.discard(call)
        if self._writer is not None and not self.sealed_because:
            self._writer.ended(call)
            if call.state is ForwardState.WRITING:
                self._writing.append(call)
        elif call.state is ForwardState.WRITING:
            call.move(ForwardState.WHOLE)
        self._count(call)

    def _passed(self, call: RelayCall) -> None:
        """Handle the end of a call that is not recorded."""
        self._live.discard(call)
        if call.state is ForwardState.WRITING:
            call.move(ForwardState.WHOLE)

    def _written(self, failure: SessionError | None) -> None:
        """Handle the end of a write: all ended calls are on disk, or the write failed."""
        written, self._writing = self._writing, []
        for call in written:
            call.move(ForwardState.UNWRITTEN if failure else ForwardState.WHOLE, failure)
            if failure is not None:
                self.own_fault = str(failure)
                self._unwritten.append(call)
                self._record_delivery(call, is_undelivered=True)
        if failure is None and self._unwritten:
            for call in self._unwritten:
                call.move(ForwardState.WHOLE)
            self._unwritten.clear()

    def _record_delivery(self, call: RelayCall, *, is_undelivered: bool) -> None:
        if self._writer is not None and is_undelivered != call.is_undelivered:
            call.is_undelivered = is_undelivered
            self._writer.write_event(DeliveryChanged(call.request.number, is_undelivered))

    def _write_again(self) -> None:
        """Write answers again whose write failed, since a retry requests one."""
        for call in self._unwritten:
            call.move(ForwardState.WRITING)
        self._writing += self._unwritten
        self._unwritten.clear()
        self.own_fault = ""
        if self._writer is not None:
            self._writer.schedule_flush()

    def _count(self, call: RelayCall) -> None:
        """Add an ended call to the held bytes, and record its fault."""
        if call.state in ANSWERED:
            if call.num_bytes < MIN_BLOB_BYTES:
                self._num_answer_bytes += call.num_bytes
            else:
                self._num_blob_bytes += call.num_bytes
            self._last, self.own_fault = call, ""
        elif fault := fault_of(call):
            self.own_fault = fault

    def _restore(self, replay: RelayReplay) -> None:
        self._history, self._calls = replay.history, replay.calls
        self.num_calls, self.spent_because = len(replay.calls), replay.spent_because
        for call in replay.calls:
            self._count(call)
            if (stored := call.request.stored) is not None:
                self._newest_calls[stored.node] = call
                if stored.fork:
                    self.forks = {**self.forks, stored.fork: self.forks.get(stored.fork, 0) + 1}

    def _spent(self) -> SessionError:
        return SessionError(400, OVER_LIMIT, f"this session has ended: {self.spent_because}")

    def _answer_bytes(self) -> int:
        num_bytes = self._num_answer_bytes + CALL_BYTES * len(self._calls)
        return num_bytes + sum([call.num_bytes for call in self._live]) if self._live else num_bytes


class BodyReading:
    """Context of RelaySession.reading; a class, which is cheaper per call than a generator."""

    __slots__ = ("_session", "_task")

    def __init__(self, session: RelaySession) -> None:
        self._session = session

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._session.reading_tasks.add(task)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """SessionError 410 if the session was sealed meanwhile."""
        session = self._session
        session.reading_tasks.discard(self._task)
        if isinstance(error, asyncio.CancelledError):
            if session.sealed_because and self._task.uncancel() == 0:
                raise _gone(session.sealed_because) from None
        elif isinstance(error, ContentLost):
            session.own_fault = str(error)


def _gone(why: str) -> SessionError:
    return SessionError(410, "session_sealed", f"this session is over: {why}")


def _repeats(known: RelayCall, route: str, stored: StoredRequest, key: str) -> bool:
    """Whether a marked retry repeats a call that is running or succeeded.

    A call that was refused or failed does not count: its retry is sent to an upstream.
    """
    request = known.request
    return (
        known.state is not ForwardState.CUT
        and known.status < 300
        and not (known.state in ANSWERED and fault_of(known))
        and (request.route, request.key) == (route, key)
        and request.stored is not None
        and stored.is_same(request.stored)
    )
