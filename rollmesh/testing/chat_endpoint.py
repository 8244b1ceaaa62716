"""A scripted chat endpoint on a real loopback socket, for agents and environments under test.

Invariant: every request is kept with its headers, every answer comes from the script, and nothing
is invented: a script that runs dry answers 500 and says so. Driven by tests.
"""

import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self

import msgspec
import orjson
from aiohttp import web

from rollmesh.envs.chat import ToolCall
from rollmesh.envs.env import Endpoint


class Answer(msgspec.Struct, frozen=True):
    """One scripted answer: a completion with `text`, or any other status."""

    text: str = ""
    status: int = 200
    headers: Mapping[str, str] = {}
    finish_reason: str = "stop"
    calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""
    body: bytes | None = None
    """Sent as it stands instead of a well-formed body."""
    hang_up: bool = False
    """Close the connection without an answer."""


class SeenRequest(msgspec.Struct, frozen=True):
    """What came in."""

    path: str
    headers: Mapping[str, str]
    body: dict[str, Any]


Script = Callable[[SeenRequest], Answer]


def say(*answers: str | Answer) -> Script:
    """A script that gives `answers` one after the other."""
    pending = [Answer(a) if isinstance(a, str) else a for a in answers]
    return lambda _: pending.pop(0) if pending else Answer(status=500, body=b"the script is dry")


class ChatEndpoint:
    """`async with ChatEndpoint(script) as endpoint:` serves on a free port until the block ends."""

    def __init__(self, script: Script | Iterable[str | Answer]) -> None:
        self._script = script if callable(script) else say(*script)
        self._runner = web.ServerRunner(web.Server(self._handle), shutdown_timeout=1.0)
        self.requests: list[SeenRequest] = []
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
        seen = SeenRequest(request.path, dict(request.headers), body)
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


def _body(answer: Answer) -> bytes:
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
