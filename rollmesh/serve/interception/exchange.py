"""One request of an agent, from its first byte to its last.

    RECEIVED --key and body are good--> MATCHED --session--> ATTACHED --first byte--> STREAMING
    STREAMING --last byte--> DELIVERED
    any --client hangs up--> ABANDONED        any --error--> FAILED        any --sealed--> SEALED

Invariants: the raw body goes as soon as it is decoded; no byte leaves before the first token or the
keep-alive time, so an early failure keeps its true status; at every end the reply is left, which
parks a generation that nobody reads. Errors become replies in one place, `run`. Driven by edge.py.
"""

import asyncio
import enum

import aiohttp
import msgspec
from aiohttp import web

from rollmesh.core.errors import Overloaded, SessionError
from rollmesh.core.logs import get_logger
from rollmesh.runtime.deltas import Delta, DeltaReader
from rollmesh.runtime.registry import Runtime
from rollmesh.runtime.reply import Reply
from rollmesh.runtime.session import Session
from rollmesh.runtime.turns import Turn
from rollmesh.serve.interception.auth import find_secret
from rollmesh.serve.interception.dialects.dialect import Dialect
from rollmesh.serve.interception.view import ReplyView

KEEP_ALIVE = b": keep-alive\n\n"
_TO_THE_END = 1 << 62
_JSON = {"Content-Type": "application/json"}
_EVENTS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}

log = get_logger()


class ExchangeState(enum.StrEnum):
    """See the module's drawing."""

    RECEIVED = "received"
    MATCHED = "matched"
    ATTACHED = "attached"
    STREAMING = "streaming"
    DELIVERED = "delivered"
    ABANDONED = "abandoned"
    FAILED = "failed"
    SEALED = "sealed"


class ExchangeKit(msgspec.Struct, frozen=True):
    """What all exchanges of an edge share."""

    runtime: Runtime
    model_name: str
    max_body_bytes: int
    keepalive_s: float


class Exchange:
    """See the module."""

    def __init__(self, request: web.BaseRequest, dialect: Dialect, kit: ExchangeKit) -> None:
        self.state = ExchangeState.RECEIVED
        self._request = request
        self._dialect = dialect
        self._kit = kit
        self._response: web.StreamResponse | None = None
        """Once the first byte of a stream left."""

    async def run(self) -> web.StreamResponse:
        """Answer the request; every error ends here."""
        try:
            return await self._answer()
        except SessionError as error:
            self.state = ExchangeState.SEALED if error.status == 410 else ExchangeState.FAILED
            return await self._refuse(error)
        except Overloaded as error:
            self.state = ExchangeState.FAILED
            refusal = SessionError(429, "overloaded", str(error), error.retry_after_s)
            return await self._refuse(refusal)
        except (asyncio.CancelledError, ConnectionError):
            self.state = ExchangeState.ABANDONED
            raise
        except Exception:  # door: a fault of ours must not take other calls along
            self.state = ExchangeState.FAILED
            log.exception("exchange.broken")
            return await self._refuse(SessionError(500, "internal_error", "a fault in the server"))

    async def _answer(self) -> web.StreamResponse:
        request = self._request
        session = self._kit.runtime.find(find_secret(request.raw_path, request.headers))
        turn = await self._read()
        self.state = ExchangeState.MATCHED
        (reply,) = await session.attach(turn)
        self.state = ExchangeState.ATTACHED
        reply.join()
        try:
            view = ReplyView(session, reply, turn, self._kit.model_name)
            if turn.stream:
                return await self._stream(session, reply, view)
            return await self._whole(session, reply, view)
        finally:
            reply.leave()

    async def _read(self) -> Turn:
        request, max_bytes = self._request, self._kit.max_body_bytes
        if (request.content_length or 0) > max_bytes:
            raise _too_large(max_bytes)
        try:
            body = await request.read()
        except web.HTTPRequestEntityTooLarge:
            raise _too_large(max_bytes) from None
        except (aiohttp.ClientError, aiohttp.http.HttpProcessingError, web.RequestPayloadError):
            raise SessionError(400, "invalid_body", "the body breaks off or is garbled") from None
        key = request.headers.get("Idempotency-Key")
        resent = request.headers.get("x-stainless-retry-count", "0") not in ("", "0")
        digest = hash(body) if key is None else hash((body, key))
        return self._dialect.decode(body, digest, resent or key is not None)

    async def _whole(self, session: Session, reply: Reply, view: ReplyView) -> web.StreamResponse:
        await reply.wait(_TO_THE_END)
        answer = session.finish(reply)
        delta = Delta(answer.content, answer.reasoning, answer.tool_calls, view.num_tokens)
        response = web.Response(body=self._dialect.whole(view, delta), headers=_JSON)
        self.state = ExchangeState.STREAMING
        await response.prepare(self._request)
        await response.write_eof()
        self._delivered(session, reply)
        return response

    async def _stream(self, session: Session, reply: Reply, view: ReplyView) -> web.StreamResponse:
        reader = session.reader(reply)
        num_sent = await self._stream_pieces(session, reply, view, reader)
        answer = session.finish(reply)
        last = reader.end(answer, view.num_tokens)
        response = await self._write(self._dialect.end(view, last, num_sent))
        await response.write_eof()
        self._delivered(session, reply)
        return response

    async def _stream_pieces(
        self, session: Session, reply: Reply, view: ReplyView, reader: DeltaReader
    ) -> int:
        """Stream deltas while tokens come; the number of tokens that they covered."""
        num_read = num_sent = 0
        while True:
            try:
                async with asyncio.timeout(self._kit.keepalive_s):
                    more = await reply.wait(num_read)
            except TimeoutError:
                await self._write(KEEP_ALIVE)
                continue
            if not more:
                return num_sent
            token_ids = session.token_ids(reply, num_read)
            num_read += len(token_ids)
            delta = reader.feed(token_ids)
            if delta is not None:
                await self._write(self._dialect.piece(view, delta, num_sent))
                num_sent = delta.num_tokens

    async def _write(self, events: bytes) -> web.StreamResponse:
        if self._response is None:
            self._response = web.StreamResponse(headers=_EVENTS)
            self.state = ExchangeState.STREAMING
            await self._response.prepare(self._request)
        await self._response.write(events)
        return self._response

    async def _refuse(self, error: SessionError) -> web.StreamResponse:
        """An error reply; after the first byte of a stream, an error event."""
        if self._response is not None:
            await self._response.write(self._dialect.error_event(error))
            await self._response.write_eof()
            return self._response
        return refusal(self._dialect.error(error), error)

    def _delivered(self, session: Session, reply: Reply) -> None:
        session.delivered(reply)
        self.state = ExchangeState.DELIVERED


def refusal(body: bytes, error: SessionError) -> web.Response:
    """The HTTP response of an error whose body a dialect has encoded."""
    headers = dict(_JSON)
    if error.retry_after_s is not None:
        headers["Retry-After"] = f"{max(1, round(error.retry_after_s))}"
    return web.Response(body=body, status=error.status, headers=headers)


def _too_large(max_bytes: int) -> SessionError:
    return SessionError(413, "body_too_large", f"the body is longer than {max_bytes} bytes")
