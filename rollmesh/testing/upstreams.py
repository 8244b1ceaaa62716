"""Fake upstream services on loopback sockets: a model provider, and an OpenAI chat endpoint.

Nothing waits by sleeping: held pieces of a response wait for `release`.
"""

import asyncio
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self

import msgspec
import orjson
from aiohttp import web

from rollmesh.envs.chat import ToolCall
from rollmesh.envs.env import Endpoint


class ProviderResponse(msgspec.Struct, frozen=True):
    """One scripted answer."""

    pieces: tuple[bytes, ...] = (b"{}",)
    """Written one by one; all but the first wait for `release` if the provider holds."""
    status: int = 200
    headers: tuple[tuple[str, str], ...] = (("Content-Type", "application/json"),)
    is_cut: bool = False
    """Whether the connection is cut after the last piece."""


class ProviderRequest(msgspec.Struct, frozen=True):
    """A request that the provider received."""

    method: str
    path: str
    """Includes the query."""
    headers: tuple[tuple[str, str], ...]
    body: bytes


ProviderScript = Callable[[ProviderRequest], ProviderResponse]


def events(*data: bytes) -> ProviderResponse:
    """A reply that streams server-sent events, one piece each."""
    pieces = tuple(b"data: %b\n\n" % each for each in data)
    return ProviderResponse(pieces, headers=(("Content-Type", "text/event-stream"),))


class ScriptedProvider:
    """`async with ScriptedProvider(script) as provider:` serves until the block ends."""

    def __init__(self, script: ProviderScript | Iterable[ProviderResponse]) -> None:
        pending = None if callable(script) else iter(script)
        self._script: ProviderScript = script if callable(script) else lambda _: next(pending)  # type: ignore[arg-type]
        self.seen: list[ProviderRequest] = []
        self.url = ""
        self.holds = False
        """Whether pieces after the first wait for `release`; with `holds_first`, also the first
        one.
        """
        self.holds_first = False
        self.num_left = 0
        """Connections that the relay closed before their answer was complete."""
        self._released = 0
        self._moved = asyncio.Condition()
        server = web.Server(self._handle, handler_cancellation=True, access_log=None)
        self._runner = web.ServerRunner(server, shutdown_timeout=0.1)

    async def __aenter__(self) -> Self:
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        await self._runner.cleanup()

    async def release(self, num_pieces: int = 1) -> None:
        """Allow `num_pieces` more pieces."""
        self._released += num_pieces
        await self._notify()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition` holds; it is checked after every event of the provider."""
        async with asyncio.timeout(10), self._moved:
            await self._moved.wait_for(condition)

    async def _notify(self) -> None:
        async with self._moved:
            self._moved.notify_all()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        body = await request.content.read()  # of any length
        headers = tuple((name.lower(), value) for name, value in request.headers.items())
        self.seen.append(ProviderRequest(request.method, request.raw_path, headers, body))
        reply = self._script(self.seen[-1])
        await self._notify()
        try:
            return await self._answer(request, reply)
        except asyncio.CancelledError:
            self.num_left += 1
            await asyncio.shield(self._notify())
            raise

    async def _answer(
        self, request: web.BaseRequest, reply: ProviderResponse
    ) -> web.StreamResponse:
        response = web.StreamResponse(status=reply.status)
        response.headers.extend(reply.headers)
        for number, piece in enumerate(reply.pieces):
            if self.holds and (number or self.holds_first):
                await self.until(lambda: self._released > 0)
                self._released -= 1
            if not response.prepared:
                await response.prepare(request)
            await response.write(piece)
        if reply.is_cut and request.transport is not None:
            request.transport.abort()
            raise ConnectionResetError
        await response.write_eof()
        return response


class ChatAnswer(msgspec.Struct, frozen=True):
    """One scripted answer: a completion with `text`, or any other status."""

    text: str = ""
    status: int = 200
    headers: Mapping[str, str] = {}
    finish_reason: str = "stop"
    calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""
    body: bytes | None = None
    """Sent verbatim instead of a well-formed body."""
    hang_up: bool = False
    """Close the connection without an answer."""


class ChatRequestSeen(msgspec.Struct, frozen=True):
    """A request that the endpoint received."""

    path: str
    headers: Mapping[str, str]
    body: dict[str, Any]


ChatScript = Callable[[ChatRequestSeen], ChatAnswer]


def scripted(*answers: str | ChatAnswer) -> ChatScript:
    """Return a script that gives `answers` one after the other."""
    pending = [ChatAnswer(a) if isinstance(a, str) else a for a in answers]
    return lambda _: (
        pending.pop(0)
        if pending
        else ChatAnswer(status=500, body=b"the script has no more answers")
    )


class ChatEndpoint:
    """`async with ChatEndpoint(script) as endpoint:` serves on a free port until the block ends."""

    def __init__(self, script: ChatScript | Iterable[str | ChatAnswer]) -> None:
        self._script = script if callable(script) else scripted(*script)
        self._runner = web.ServerRunner(web.Server(self._handle), shutdown_timeout=1.0)
        self.requests: list[ChatRequestSeen] = []
        self.endpoint = Endpoint("", "", "")

    async def __aenter__(self) -> Self:
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        port = self._runner.addresses[0][1]
        self.endpoint = Endpoint(f"http://127.0.0.1:{port}/v1", "sk-test", "policy")
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        await self._runner.cleanup()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.method == "GET" and request.path.endswith("/models"):
            return web.json_response({"data": [{"id": self.endpoint.model}]})
        body = orjson.loads(await request.read())
        seen = ChatRequestSeen(request.path, dict(request.headers), body)
        self.requests.append(seen)
        answer = self._script(seen)
        if answer.hang_up:
            assert request.transport is not None
            request.transport.abort()
        return web.Response(
            body=_body(answer) if answer.body is None else answer.body,
            status=answer.status,
            headers=dict(answer.headers),
        )


def _body(answer: ChatAnswer) -> bytes:
    if answer.status != 200:
        return orjson.dumps({"error": {"message": answer.text, "type": "scripted"}})
    message: dict[str, Any] = {"role": "assistant", "content": answer.text}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.calls:
        message["tool_calls"] = [_call(call) for call in answer.calls]
    choice = {"index": 0, "message": message, "finish_reason": answer.finish_reason}
    return orjson.dumps({"object": "chat.completion", "choices": [choice]})


def _call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}
