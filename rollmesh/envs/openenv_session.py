"""An OpenEnv server: its door, and one environment on it over one WebSocket.

    {"type": "reset" | "step", "data": {...}}  -->  {"type": "observation", "data": {...}}
    {"type": "close"}                               {"type": "error", "data": {"message", "code"}}

Protocol: as OpenEnv's client and server have it (meta-pytorch/OpenEnv, src/openenv/core:
env_client.py, env_server/types.py). Its POST endpoints make a new environment for every call, so
they cannot play. Invariant: whatever finds the server at fault is InfraError, what finds the action
at fault RefusedError. Driven by openenv.py.
"""

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack

import aiohttp
import msgspec

from rollmesh.core.errors import InfraError
from rollmesh.core.types import Json

MAX_MESSAGE_BYTES = 100 * 2**20
"""As OpenEnv's own client."""
CLOSING = aiohttp.ClientWSTimeout(ws_close=1.0)
"""What a server has to agree to the end."""
RETRY_S = 0.25
"""A server that is full is asked again after this time, by one of those that wait."""


class Seen(msgspec.Struct, frozen=True):
    """What one sees after a reset or a step."""

    observation: dict[str, Json]
    reward: float | None = None
    done: bool = False


class RefusedError(Exception):
    """The server says that an action does not keep to its schema."""


class _FullError(Exception):
    """The server has as many environments as it may."""


class _Detail(msgspec.Struct, frozen=True):
    msg: str = ""
    loc: list[str | int] = []


class _Fault(msgspec.Struct, frozen=True):
    message: str = ""
    code: str = ""
    errors: list[_Detail] = []
    """What is wrong with an action, field by field."""

    @property
    def why(self) -> str:
        """In one line."""
        details = (f"{'.'.join(map(str, each.loc))}: {each.msg}" for each in self.errors)
        return "; ".join([self.message, *details])


class _Answer(msgspec.Struct, frozen=True):
    type: str
    data: msgspec.Raw = msgspec.Raw(b"{}")


class OpenEnvSession:
    """What a Door gives; `close` it."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, timeout_s: float) -> None:
        self._socket = socket
        self._timeout_s = timeout_s

    async def ask(self, kind: str, data: Mapping[str, Json]) -> Seen:
        """Send a `reset` or a `step`; what one sees then."""
        question = msgspec.json.encode({"type": kind, "data": data}).decode()
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._socket.send_str(question)
                message = await self._socket.receive()
        except TimeoutError:
            raise InfraError(f"the OpenEnv server took over {self._timeout_s:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise InfraError(f"the OpenEnv server is gone: {error}") from None
        if message.type is not aiohttp.WSMsgType.TEXT:
            raise InfraError(f"the OpenEnv server hung up in a {kind}")
        return _seen(message.data)

    async def close(self) -> None:
        """Let the server forget this environment; it does so too if it does not hear of it."""
        try:
            await self._socket.send_str('{"type":"close"}')
        except (aiohttp.ClientError, OSError):
            return
        finally:
            await self._socket.close()


class Door:
    """Of one server: lets rollouts in, one after the other where it is full; `close` it.

    enter --> a session --(full)--> in line --a place is free--> a session
                                       +------capacity_wait_s is over--> InfraError
    """

    def __init__(self, url: str, timeout_s: float, capacity_wait_s: float) -> None:
        self._url = url
        self._timeout_s = timeout_s
        self._capacity_wait_s = capacity_wait_s
        self._line = asyncio.Lock()
        """Whoever holds it is the one who asks whether there is a place."""
        self._client: aiohttp.ClientSession | None = None

    async def enter(self, reset: Mapping[str, Json]) -> tuple[OpenEnvSession, Seen]:
        """A new environment and its first observation."""
        found = await self._try(reset)
        if found is not None:
            return found
        try:
            async with asyncio.timeout(self._capacity_wait_s), self._line:
                while found is None:
                    await asyncio.sleep(RETRY_S)
                    found = await self._try(reset)
        except TimeoutError:
            why = f"full for {self._capacity_wait_s:g} s; give it more sessions, or us fewer slots"
            raise InfraError(f"{self._url}: {why}") from None
        return found

    async def close(self) -> None:
        """Close what is still open."""
        if self._client is not None:
            await self._client.close()
            self._client = None

    async def _try(self, reset: Mapping[str, Json]) -> tuple[OpenEnvSession, Seen] | None:
        """As `enter`; None where the server is full."""
        session = OpenEnvSession(await self._connect(), self._timeout_s)
        async with AsyncExitStack() as undo:
            undo.push_async_callback(session.close)
            try:
                seen = await session.ask("reset", reset)
            except _FullError:
                return None
            undo.pop_all()
        return session, seen

    async def _connect(self) -> aiohttp.ClientWebSocketResponse:
        if self._client is None:
            self._client = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._client.ws_connect(
                    self._url, max_msg_size=MAX_MESSAGE_BYTES, timeout=CLOSING
                )
        except TimeoutError:
            raise InfraError(f"{self._url}: no answer within {self._timeout_s:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise InfraError(f"{self._url}: {type(error).__name__}: {error}") from None


def _seen(text: str) -> Seen:
    """The observation in an answer, or what the server says instead."""
    try:
        answer = msgspec.json.decode(text, type=_Answer)
        if answer.type == "observation":
            return msgspec.json.decode(answer.data, type=Seen, strict=False)
        fault = msgspec.json.decode(answer.data, type=_Fault)
    except msgspec.MsgspecError as error:
        raise InfraError(f"the OpenEnv server's answer cannot be read: {error}") from None
    if fault.code == "CAPACITY_REACHED":
        raise _FullError(fault.message)
    if fault.code == "VALIDATION_ERROR":
        raise RefusedError(fault.why)
    raise InfraError(f"the OpenEnv server answers {fault.code or answer.type}: {fault.message}")
