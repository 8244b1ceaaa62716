"""One request of an agent, from its first byte to the last byte of the answer.

    RECEIVED --key and body are valid--> MATCHED --session--> ATTACHED --first byte--> STREAMING
    STREAMING --last byte--> DELIVERED
    any --client disconnects--> ABANDONED      any --error--> FAILED      any --sealed--> SEALED

- A waiting exchange holds neither its body nor its decoded history: each is released once used.
- No byte is sent before the first token or the keep-alive time, so an early failure has its HTTP
  status. A later failure is the stream's last event; after the last byte nothing is sent.
- When its session is sealed, an exchange is woken from anything it awaits. A client that does not
  read until then is disconnected.
- At any end the replies are left, which parks a generation without readers.
"""

import asyncio
import contextlib
import enum
import json
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Protocol

import msgspec

from rollmesh.core.errors import ContentLost, Overloaded, SessionError
from rollmesh.core.ids import RolloutId
from rollmesh.core.logs import get_logger
from rollmesh.runtime.registry import Runtime
from rollmesh.runtime.replies import Reply, ReplyHead
from rollmesh.runtime.session import Session, SessionState
from rollmesh.serve.interception.body_limits import LONG_BYTES, DecodeGate
from rollmesh.serve.interception.dialects.dialect import (
    AnswerStream,
    DecodedRequest,
    Dialect,
    ReplyView,
    RequestBody,
    ViewContext,
)
from rollmesh.serve.interception.request import JSON, HttpRequest, find_secret, read_retry_mark

log = get_logger()


class ExchangeState(enum.StrEnum):
    """States of an exchange, drawn above."""

    RECEIVED = "received"
    MATCHED = "matched"
    ATTACHED = "attached"
    STREAMING = "streaming"
    DELIVERED = "delivered"
    ABANDONED = "abandoned"
    FAILED = "failed"
    SEALED = "sealed"


class GuardedExchange(Protocol):
    """An exchange, as used by `guard`."""

    state: ExchangeState

    @property
    def request(self) -> HttpRequest:
        """The request to answer."""

    def refusal(self, error: SessionError) -> bytes:
        """Encode the error response of the client's dialect."""

    def last_event(self, error: SessionError) -> bytes:
        """Encode the error event of a running stream."""


async def guard(exchange: GuardedExchange, work: Awaitable[None]) -> None:
    """Await an exchange's work and answer its errors; only disconnects and cancellation pass on."""
    try:
        await work
    except SessionError as error:
        _refuse(exchange, error)
    except Overloaded as error:
        _refuse(exchange, SessionError(429, "overloaded", str(error), error.retry_after_s))
    except (asyncio.CancelledError, ConnectionError):
        exchange.state = ExchangeState.ABANDONED
        raise
    except Exception:  # door: a fault in one call must not affect the others
        log.exception("exchange.broken")
        _refuse(exchange, SessionError(500, "internal_error", "a fault in the server"))


def refuse(request: HttpRequest, body: bytes, error: SessionError) -> None:
    """Answer with an error whose body a dialect has encoded."""
    lines = request.header_lines(JSON)
    if error.retry_after_s is not None:
        lines += b"Retry-After: %d\r\n" % max(1, round(error.retry_after_s))
    request.answer(error.status, lines, body)


def _refuse(exchange: GuardedExchange, error: SessionError) -> None:
    exchange.state = ExchangeState.SEALED if error.status == 410 else ExchangeState.FAILED
    request = exchange.request
    try:
        if not request.is_opened:
            refuse(request, exchange.refusal(error), error)
        elif not request.is_answered:
            request.close(exchange.last_event(error))
    except ConnectionError:
        exchange.state = ExchangeState.ABANDONED
        raise
    if request.is_write_paused and exchange.state is ExchangeState.SEALED:
        raise ConnectionAbortedError("the client does not read, and its session has ended")


class WakeableExchange(Protocol):
    """An exchange, as used by InflightRequests."""

    def wake(self) -> None:
        """End now, because the session is sealed."""


class InflightRequests:
    """Running exchanges by rollout, from when their session is known until their end."""

    def __init__(self) -> None:
        self._in_flight: dict[int, tuple[Session, WakeableExchange]] = {}
        self._of_rollout: dict[RolloutId, dict[int, None]] = {}
        self._num_registered = 0

    def __len__(self) -> int:
        """Number of running exchanges."""
        return len(self._in_flight)

    def register(self, session: Session, exchange: WakeableExchange) -> int:
        """Add an exchange; return the id to remove it by."""
        self._num_registered = request_id = self._num_registered + 1
        self._in_flight[request_id] = session, exchange
        self._of_rollout.setdefault(session.rollout_id, {})[request_id] = None
        return request_id

    def discard_request(self, request_id: int) -> None:
        """Remove an exchange that has ended. Idempotent."""
        found = self._in_flight.pop(request_id, None)
        if found is None:
            return
        rollout_id = found[0].rollout_id
        others = self._of_rollout[rollout_id]
        del others[request_id]
        if not others:
            del self._of_rollout[rollout_id]

    def unregister_rollout(self, rollout_id: RolloutId) -> None:
        """Wake the rollout's exchanges whose session is sealed, which ends them. Idempotent."""
        for request_id in list(self._of_rollout.get(rollout_id, ())):
            session, exchange = self._in_flight[request_id]
            if session.state is SessionState.SEALED:
                exchange.wake()


SAMPLING_HEADER = b"x-rollmesh-sampling"
EVENTS = b"text/event-stream; charset=utf-8"
KEEP_ALIVE = b": keep-alive\n\n"
_TO_THE_END = 1 << 62


class ExchangeDeps(msgspec.Struct, frozen=True):
    """Dependencies shared by all exchanges of a server."""

    runtime: Runtime
    view: ViewContext
    max_body_bytes: int
    keepalive_s: float
    inflight: InflightRequests
    decode_gate: DecodeGate


class Exchange:
    """One exchange; call `run` or `run_count` once."""

    __slots__ = (
        "_deps", "_dialect", "_is_woken", "_num_bytes", "_stream", "_task", "request", "state",
    )  # fmt: skip

    def __init__(self, request: HttpRequest, dialect: Dialect, deps: ExchangeDeps) -> None:
        self.state = ExchangeState.RECEIVED
        self.request = request
        self._num_bytes = 0
        """Size of the body, until the session has matched it."""
        self._dialect = dialect
        self._deps = deps
        self._stream: AnswerStream | None = None
        """Encoder of a streamed answer, once its replies are known."""
        self._task: asyncio.Task[object] | None = None
        self._is_woken = False

    async def run(self) -> None:
        """Answer the request."""
        await guard(self, self._run_inflight(self._sample))

    async def run_count(self) -> None:
        """Answer with the number of prompt tokens of the request."""
        await guard(self, self._run_inflight(self._count))

    def wake(self) -> None:
        """End now, because the session is sealed; must not be called from the exchange's own
        task."""
        assert self._task is not None
        if not self._is_woken:
            self._is_woken = True
            self._task.cancel()

    def refusal(self, error: SessionError) -> bytes:
        """Encode the error response."""
        return self._dialect.error(error)

    def last_event(self, error: SessionError) -> bytes:
        """Encode the error event of the stream."""
        assert self._stream is not None, "a plain answer fails before its first byte"
        return self._stream.error(error)

    async def _run_inflight(self, work: Callable[[Session], Awaitable[None]]) -> None:
        """Do the work while registered in flight, where it can be woken from anything it awaits."""
        secret = find_secret(self.request.path, self.request.headers)
        session = self._deps.runtime.sessions.find(secret)
        self.request.owner = session.session_id
        task = self._task = asyncio.current_task()
        assert task is not None
        request_id = self._deps.inflight.register(session, self)
        try:
            await work(session)
        except ContentLost as error:
            session.engine_fault = str(error)
            raise
        except asyncio.CancelledError:
            if self._is_woken and task.cancelling() == 1:
                raise _ended() from None
            raise  # the client disconnected
        finally:
            self._task = None
            self._deps.inflight.discard_request(request_id)
            if self._is_woken:
                task.uncancel()
            # The task holds its error, whose traceback holds this frame: break the cycle.
            del task

    async def _sample(self, session: Session) -> None:
        replies: list[Reply] = []
        try:
            call = await self._match()
            views = await self._attach(session, call, replies)
            self.state = ExchangeState.ATTACHED
            lines = self.request.header_lines(EVENTS if call.is_streamed else JSON)
            if self.request.headers.get(SAMPLING_HEADER):
                lines += b"%b: %b\r\n" % (SAMPLING_HEADER, sampling_of(views[0].head))
            if call.is_streamed:
                self.request.open(200, b"Cache-Control: no-cache\r\n" + lines)
                await self._send_events(session, replies, call.stream(views))
            else:
                for reply in replies:
                    await reply.wait(_TO_THE_END)
                    session.finish(reply)
                await session.recorder.written()
                self.request.answer(200, lines, call.whole(views))
                self.state = ExchangeState.STREAMING
            await self._drained(session)
            for reply in replies:
                session.delivered(reply)
            self.state = ExchangeState.DELIVERED
        finally:
            for reply in replies:
                session.left(reply)

    async def _count(self, session: Session) -> None:
        call = await self._match()
        num_tokens = sum([await session.count(turn) for turn in call.turns])
        body = b'{"input_tokens":%d}' % num_tokens
        self.request.answer(200, self.request.header_lines(JSON), body)
        self.state = ExchangeState.DELIVERED

    async def _match(self) -> DecodedRequest:
        body = await self.request.read(self._deps.max_body_bytes, self._deps.keepalive_s)
        self._num_bytes = len(body)
        await self._deps.decode_gate.pass_through(self._num_bytes, self.request.owner)
        mark = read_retry_mark(self.request.headers)
        salt = b"%b %b" % (type(self._dialect).__name__.encode(), mark.key)
        call = self._dialect.decode(RequestBody(body, salt, mark.is_resent))
        self.state = ExchangeState.MATCHED
        return call

    async def _attach(
        self, session: Session, call: DecodedRequest, replies: list[Reply]
    ) -> list[ReplyView]:
        """Join the replies to all turns, and release the call's history."""
        turns, call.turns = call.turns, ()
        views: list[ReplyView] = []
        self._deps.runtime.deps.check_fits(sum([turn.num_choices for turn in turns]))
        await self._deps.decode_gate.pass_through(self._num_bytes, session.session_id)
        for number, turn in enumerate(turns):
            if number:
                await self._deps.decode_gate.pass_through(LONG_BYTES, session.session_id)
            options = turn.options()
            for reply in await session.attach(turn):
                reply.join()
                replies.append(reply)
                views.append(ReplyView(session, reply, options, self._deps.view))
        self._num_bytes = 0
        self.request.release_body()
        return views

    async def _send_events(
        self, session: Session, replies: Sequence[Reply], stream: AnswerStream
    ) -> None:
        self._stream = stream
        heart = _KeepAlive(self.request, self._deps.keepalive_s)
        try:
            if len(replies) == 1:
                last = await self._follow(session, replies[0], stream, 0)
            else:
                last = await self._follow_all(session, replies, stream)
        finally:
            heart.stop()
        self.state = ExchangeState.STREAMING
        self.request.close(last + stream.close())

    async def _follow_all(
        self, session: Session, replies: Sequence[Reply], stream: AnswerStream
    ) -> bytes:
        async def follow(choice: int, reply: Reply) -> None:
            await self._send(session, await self._follow(session, reply, stream, choice))

        try:
            async with asyncio.TaskGroup() as group:
                for choice, reply in enumerate(replies):
                    group.create_task(follow(choice, reply))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return b""

    async def _follow(
        self, session: Session, reply: Reply, stream: AnswerStream, choice: int
    ) -> bytes:
        """Send deltas as tokens arrive, one write per batch; return the last events."""
        reader = session.answers.reader(reply)
        num_read = 0
        while await reply.wait(num_read) and not reply.is_ended:
            token_ids = reply.token_ids(num_read)
            num_read += len(token_ids)
            delta = reader.feed(token_ids)
            if delta is not None:
                await self._send(session, stream.piece(choice, delta))
        session.finish(reply)
        await session.recorder.written()
        rest = reply.token_ids(num_read)
        delta = reader.feed(rest) if len(rest) else None
        events = stream.piece(choice, delta) if delta is not None else b""
        return events + stream.end(choice, reader.end(num_read + len(rest)))

    async def _send(self, session: Session, events: bytes) -> None:
        self.state = ExchangeState.STREAMING
        self.request.send(events)
        await self._drained(session)

    def _drained(self, session: Session) -> Awaitable[None]:
        """Wait until the client reads; SessionError 410 if the session is sealed meanwhile."""
        return self.request.drain(partial(_check_open, session))


def _check_open(session: Session) -> None:
    if session.state is SessionState.SEALED:
        raise _ended()


def _ended() -> SessionError:
    return SessionError(410, "session_sealed", "the session has ended")


def sampling_of(head: ReplyHead) -> bytes:
    """Encode a reply's sampling parameters, and which were forced, as JSON for a header."""
    used = {**msgspec.to_builtins(head.params), "forced": list(head.forced)}
    return json.dumps(used).encode()


class _KeepAlive:
    """Sends comments on an idle stream, with one timer."""

    def __init__(self, request: HttpRequest, period_s: float) -> None:
        self._request = request
        self._period_s = period_s
        self._num_seen = 0
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(period_s, self._beat)

    def stop(self) -> None:
        self._timer.cancel()

    def _beat(self) -> None:
        self._timer = self._loop.call_later(self._period_s, self._beat)
        if self._request.num_sends == self._num_seen and not self._request.is_write_paused:
            # The exchange notices a lost client by itself.
            with contextlib.suppress(ConnectionError):
                self._request.send(KEEP_ALIVE)
        self._num_seen = self._request.num_sends
