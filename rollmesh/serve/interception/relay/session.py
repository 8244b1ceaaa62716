"""One relayed session: its calls, the histories that they share, its faults and its end.

    OPEN --seal--> SEALED, after which calls get a 410 and running ones are cut

- Each distinct message of its requests is kept once.
- A marked retry is answered by the call that it repeats, unless that one failed (verdict.py). If
  the disk did not take that call's answer, the answer is written first.
- Where sessions are kept, the end of an answer is shown only after it is written.
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
from rollmesh.serve.interception.pieces import MIN_BLOB_BYTES
from rollmesh.serve.interception.relay.account import account_of
from rollmesh.serve.interception.relay.call import (
    ANSWERED,
    RETRY_AFTER_S,
    Asked,
    CallState,
    RelayCall,
    silence,
)
from rollmesh.serve.interception.relay.deeds import RelayPast, Spent
from rollmesh.serve.interception.relay.scribe import RelayScribe
from rollmesh.serve.interception.relay.threads import Request, Spot, Threads
from rollmesh.serve.interception.relay.tips import Following
from rollmesh.serve.interception.relay.upstreams import Parcel, Upstream, Upstreams
from rollmesh.serve.interception.relay.verdict import fault_of, outcome_of
from rollmesh.serve.interception.report import SessionReport
from rollmesh.serve.interception.request import RetryMark

CALL_BYTES = 1200
"""What a call takes beside its answer: itself, what was asked, their places in tables."""


class RelayTotals(msgspec.Struct):
    """Plain integers, counted by all sessions and read by a collector."""

    num_calls: int = 0


class RelaySession:
    """Satisfies CapturedSession."""

    def __init__(
        self,
        session_id: str,
        upstreams: Upstreams,
        clock: Clock,
        config: InterceptionConfig,
        totals: RelayTotals,
        scribe: RelayScribe | None = None,
        past: RelayPast | None = None,
    ) -> None:
        """With a `past` the session continues from what another process wrote of it."""
        self.session_id = session_id
        self.num_calls = 0
        self.own_fault = ""
        """Why the newest ended call got no answer, beside what its answer shows."""
        self._last: RelayCall | None = None
        """The newest call with an answer."""
        self.spent_because = ""
        self.forks: Mapping[str, int] = NO_COUNTS
        self.healed: Mapping[str, int] = NO_COUNTS
        """Always empty: nothing is re-rendered, so there is nothing to heal."""
        self._upstreams = upstreams
        self._home: Upstream | None = None
        self._clock = clock
        self._config = config
        self._totals = totals
        self._threads: Threads | None = None
        self._calls: list[RelayCall] = []
        self._newest: dict[Spot, RelayCall] = {}
        """By the history that was asked."""
        self._live: set[RelayCall] = set()
        self.coming: set[asyncio.Task[object]] = set()
        """Tasks that read the body of a call."""
        self._num_answer_bytes = 0
        self._num_blob_bytes = 0
        """Of answers that are long."""
        self._writing: list[RelayCall] = []
        """Whole answers on their way to the disk."""
        self._unwritten: list[RelayCall] = []
        """Those that it did not take."""
        self.sealed_because = ""
        self._scribe = scribe
        if scribe is not None:
            scribe.on_written = self._written
        if past is not None:
            self._regain(past)

    def follow(self, num_bytes: int) -> Following:
        """Begin to read the body of the next call, of at most so many bytes; SessionError 410 if
        the session is sealed, 400 if it holds more than it may."""
        if self.sealed_because:
            raise _gone(self.sealed_because)
        if self.spent_because:
            raise self._spent()
        self._threads = self._threads or Threads()
        return self._threads.follow(num_bytes)

    def reading(self) -> "Reading":
        """Around the reading of a body, and what is made of it."""
        return Reading(self)

    def call(self, route: str, parcel: Parcel, body: Following, mark: RetryMark) -> RelayCall:
        """The call that answers this request: a new one, or the one that a retry repeats.

        SessionError as of `follow`.
        """
        if self.sealed_because or self._threads is None:
            raise _gone(self.sealed_because)
        request, parcel.body = self._threads.hold(body)
        if self.held_bytes > (limit := self._config.max_session_bytes):
            held = f"the session holds {self.held_bytes} bytes"
            self.spent_because = f"{held}, interception.max_session_bytes = {limit}"
            if self._scribe is not None:
                self._scribe.tell(Spent(self.spent_because))
            raise self._spent()
        key = mark.key.decode("latin-1")
        if mark.is_resent and request is not None:
            known = self._newest.get(request.spot)
            if known is not None and _repeats(known, route, request, key):
                if known.state is CallState.UNWRITTEN:
                    self._write_again()
                return known
        self._check_turns()
        if self._scribe is not None:
            self._scribe.check()
        if request is not None and request.fork:
            self.forks = {**self.forks, request.fork: self.forks.get(request.fork, 0) + 1}
        asked = Asked(
            number=self.num_calls,
            route=route,
            request=request,
            body=() if request else parcel.body,
            key=key,
            asked_s=self._clock.unix_s(),
        )
        call = RelayCall(asked, self._config.max_body_bytes, self._ended, clock=self._clock)
        self._calls.append(call)
        self.num_calls += 1
        self._totals.num_calls += 1
        self._live.add(call)
        if request is not None:
            self._newest[request.spot] = call
        self._home = self._upstreams.send(call, parcel, self._home)
        return call

    def _check_turns(self) -> None:
        limit = self._config.max_turns_at_once
        if (num_calls := len(self._live)) >= limit:
            why = f"this session has {num_calls} calls in progress; at most {limit}"
            why = f"{why} (interception.max_turns_at_once)"
            raise SessionError(429, "too_many_turns", why, RETRY_AFTER_S)

    def pass_by(self, parcel: Parcel) -> RelayCall:
        """A call that is forwarded and not kept: it asks for no sampling."""
        if self.sealed_because:
            raise _gone(self.sealed_because)
        self._check_turns()
        asked = Asked(-1, "", None, (), "", 0.0)
        call = RelayCall(asked, self._config.max_body_bytes, self._passed, clock=self._clock)
        self._live.add(call)
        self._upstreams.send(call, parcel, self._home)
        return call

    def left(self, call: RelayCall) -> None:
        """A connection reads `call` no more."""
        call.leave(self._config.keepalive_s)
        if call.asked.number >= 0:
            is_untaken = call.state in ANSWERED and not call.is_delivered
            self._tell_untaken(call, is_untaken=is_untaken)

    @property
    def is_busy(self) -> bool:
        return bool(self._live)

    @property
    def fault(self) -> str:
        newest = self._calls[-1] if self._calls else None
        if newest is not None and newest in self._live:
            quiet_s = self._clock.now_s() - newest.heard_s
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
        threads = self._threads
        num_bytes = self._answer_bytes() + self._num_blob_bytes
        return num_bytes + threads.num_bytes + threads.num_blob_bytes if threads else num_bytes

    def held(self) -> dict[str, int]:
        """Bytes by what: answers beside their overhead, histories, and blobs, which other sessions
        may hold, too."""
        threads = self._threads
        return {
            "answers": self._answer_bytes(),
            "history": threads.num_bytes if threads else 0,
            "blobs": self._num_blob_bytes + (threads.num_blob_bytes if threads else 0),
        }

    def node_of(self, name: int | str) -> int:
        if isinstance(name, int):
            if 0 <= name < self.num_calls:
                return name
            raise LookupError(name)
        quoted = b'"%b"' % name.encode("utf-8", "surrogatepass")
        for call in reversed(self._calls):
            if quoted in call.body:
                return call.asked.number
        raise LookupError(name)

    def seal(self, reason: str) -> None:
        if not self.sealed_because:
            self.sealed_because = reason
            for call in list(self._live):
                call.cut(_gone(self.sealed_because))
            if self._writing and self._scribe is not None:
                self._scribe.write()
            for task in self.coming:
                task.cancel()

    def forget(self) -> None:
        if self._threads is not None:
            self._threads.forget()
        self._threads = self._scribe = None
        for calls in (self._calls, self._writing, self._unwritten):
            calls.clear()
        self._newest.clear()
        self._last = None
        self._num_answer_bytes = self._num_blob_bytes = 0

    def account(self) -> SessionReport:
        rotating = compile_rotating(self._config.rotating_lines)
        return account_of(self.session_id, self._calls, rotating)

    def _ended(self, call: RelayCall) -> None:
        self._live.discard(call)
        if self._scribe is not None and not self.sealed_because:
            self._scribe.ended(call)
            if call.state is CallState.WRITING:
                self._writing.append(call)
        elif call.state is CallState.WRITING:
            call.move(CallState.WHOLE)
        self._count(call)

    def _passed(self, call: RelayCall) -> None:
        """One that is not kept has ended."""
        self._live.discard(call)
        if call.state is CallState.WRITING:
            call.move(CallState.WHOLE)

    def _written(self, failure: SessionError | None) -> None:
        """What calls have come to is on disk, or why not."""
        written, self._writing = self._writing, []
        for call in written:
            call.move(CallState.UNWRITTEN if failure else CallState.WHOLE, failure)
            if failure is not None:
                self.own_fault = str(failure)
                self._unwritten.append(call)
                self._tell_untaken(call, is_untaken=True)
        if failure is None and self._unwritten:
            for call in self._unwritten:
                call.move(CallState.WHOLE)
            self._unwritten.clear()

    def _tell_untaken(self, call: RelayCall, *, is_untaken: bool) -> None:
        if self._scribe is not None and is_untaken != call.is_untaken:
            call.is_untaken = is_untaken
            self._scribe.tell(DeliveryChanged(call.asked.number, is_untaken))

    def _write_again(self) -> None:
        """What the disk did not take, since somebody asks for it."""
        for call in self._unwritten:
            call.move(CallState.WRITING)
        self._writing += self._unwritten
        self._unwritten.clear()
        self.own_fault = ""
        if self._scribe is not None:
            self._scribe.be_due()

    def _count(self, call: RelayCall) -> None:
        """Add an ended call to what is held, and keep what it says of the upstream."""
        if call.state in ANSWERED:
            if call.num_bytes < MIN_BLOB_BYTES:
                self._num_answer_bytes += call.num_bytes
            else:
                self._num_blob_bytes += call.num_bytes
            self._last, self.own_fault = call, ""
        elif fault := fault_of(call):
            self.own_fault = fault

    def _regain(self, past: RelayPast) -> None:
        self._threads, self._calls = past.threads, past.calls
        self.num_calls, self.spent_because = len(past.calls), past.spent_because
        for call in past.calls:
            self._count(call)
            if (request := call.asked.request) is not None:
                self._newest[request.spot] = call
                if request.fork:
                    self.forks = {**self.forks, request.fork: self.forks.get(request.fork, 0) + 1}

    def _spent(self) -> SessionError:
        return SessionError(400, OVER_LIMIT, f"this session has ended: {self.spent_because}")

    def _answer_bytes(self) -> int:
        num_bytes = self._num_answer_bytes + CALL_BYTES * len(self._calls)
        return num_bytes + sum([call.num_bytes for call in self._live]) if self._live else num_bytes


class Reading:
    """See RelaySession.reading; no generator, since each call has one."""

    __slots__ = ("_session", "_task")

    def __init__(self, session: RelaySession) -> None:
        self._session = session

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._session.coming.add(task)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """SessionError 410 if the session was sealed meanwhile."""
        session = self._session
        session.coming.discard(self._task)
        if isinstance(error, asyncio.CancelledError):
            if session.sealed_because and self._task.uncancel() == 0:
                raise _gone(session.sealed_because) from None
        elif isinstance(error, ContentLost):
            session.own_fault = str(error)


def _gone(why: str) -> SessionError:
    return SessionError(410, "session_sealed", f"this session is over: {why}")


def _repeats(known: RelayCall, route: str, request: Request, key: str) -> bool:
    """Whether a marked request is the same as a call that runs or was answered well.

    What was refused or failed is sent again: that is what the mark is for.
    """
    asked = known.asked
    return (
        known.state is not CallState.CUT
        and known.status < 300
        and not (known.state in ANSWERED and fault_of(known))
        and (asked.route, asked.key) == (route, key)
        and asked.request is not None
        and request.asks_the_same(asked.request)
    )
