"""A small server for OpenEnv's protocol, for the adapter's tests and the example.

    async with OpenEnvServer(MyGame, max_sessions=4) as server: ... server.url ...

It implements what an adapter sees of the real one (meta-pytorch/OpenEnv,
src/openenv/core/env_server/http_server.py): `/ws` with reset, step, state and close, one session
per connection, its error codes, and `/health`.

- A game ends with its connection.
"""

import types
from collections.abc import Callable, Mapping
from typing import Any, Protocol, Self

import orjson
from aiohttp import WSMsgType, web

Observation = dict[str, Any]


class Game(Protocol):
    """A game; ValueError means that an action does not match its schema."""

    def reset(self, seed: int) -> Observation:
        """Start a new game."""
        ...

    def step(self, action: Mapping[str, Any]) -> tuple[Observation, float, bool]:
        """Return the next observation, its reward, and whether the game is over."""
        ...


class OpenEnvServer:
    """Serve games on loopback; `port` 0 picks a free one."""

    def __init__(self, new_game: Callable[[], Game], max_sessions: int = 8, port: int = 0) -> None:
        self._new_game = new_game
        self._max_sessions = max_sessions
        self._port = port
        app = web.Application()
        app.router.add_get("/ws", self._play)
        app.router.add_get("/health", self._health)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        self.sockets: set[web.WebSocketResponse] = set()
        """One per running game."""
        self.num_refused = 0
        """Connections refused because the server was full."""
        self.url = ""

    async def __aenter__(self) -> Self:
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self._port).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        for socket in [*self.sockets]:
            await socket.close()
        await self._runner.cleanup()

    async def _health(self, request: web.Request) -> web.Response:
        del request
        return web.Response(body=b'{"status":"healthy"}', content_type="application/json")

    async def _play(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        if len(self.sockets) >= self._max_sessions:
            self.num_refused += 1
            await _send(socket, "error", message="server is full", code="CAPACITY_REACHED")
            await socket.close()
            return socket
        self.sockets.add(socket)
        game = self._new_game()
        try:
            async for message in socket:
                if message.type is not WSMsgType.TEXT or not await _answer(
                    socket, game, message.data
                ):
                    break
        finally:
            self.sockets.discard(socket)
            await socket.close()
        return socket


async def _answer(socket: web.WebSocketResponse, game: Game, text: str) -> bool:
    """Answer one message; False ends the session."""
    try:
        message = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        await _send(socket, "error", message=f"Invalid JSON: {error}", code="INVALID_JSON")
        return True
    kind, data = message.get("type", ""), message.get("data", {})
    try:
        if kind == "reset":
            seen = game.reset(data.get("seed", 0))
            await _send(socket, "observation", observation=seen, reward=None, done=False)
        elif kind == "step":
            seen, reward, done = game.step(data)
            await _send(socket, "observation", observation=seen, reward=reward, done=done)
        elif kind != "close":
            await _send(socket, "error", message=f"Unknown type: {kind}", code="UNKNOWN_TYPE")
    except ValueError as error:
        details = [{"loc": ["word"], "msg": str(error)}]
        await _send(
            socket, "error", message="Invalid message", code="VALIDATION_ERROR", errors=details
        )
    except RuntimeError as error:
        await _send(socket, "error", message=str(error), code="EXECUTION_ERROR")
    return bool(kind != "close")


async def _send(socket: web.WebSocketResponse, kind: str, **data: Any) -> None:
    await socket.send_str(orjson.dumps({"type": kind, "data": data}).decode())
