"""One environment on an OpenEnv server, over one WebSocket.

    {"type": "reset" | "step", "data": {...}}  -->  {"type": "observation", "data": {...}}
    {"type": "close"}                               {"type": "error", "data": {"message", "code"}}

Protocol: as OpenEnv's client and server have it (meta-pytorch/OpenEnv, src/openenv/core:
env_client.py, env_server/types.py). Its POST endpoints make a new environment for every call, so
they cannot play. Invariant: whatever finds the server at fault is InfraError, what finds the action
at fault RefusedError. Driven by openenv.py.
"""

import asyncio
from collections.abc import Mapping

import aiohttp
import msgspec

from rollmesh.core.errors import InfraError
from rollmesh.core.types import Json

MAX_MESSAGE_BYTES = 100 * 2**20
"""As OpenEnv's own client."""
CLOSING = aiohttp.ClientWSTimeout(ws_close=1.0)
"""What a server has to agree to the end."""
RETRY_S = 0.25
"""A server that is full is asked again after this time."""


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
    """What `open_session` gives; `close` it."""

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


async def open_session(
    client: aiohttp.ClientSession, url: str, timeout_s: float, reset: Mapping[str, Json]
) -> tuple[OpenEnvSession, Seen]:
    """A new environment and its first observation; a full server is asked until time is over."""
    fault = "no answer"
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                socket = await client.ws_connect(
                    url, max_msg_size=MAX_MESSAGE_BYTES, timeout=CLOSING
                )
                session = OpenEnvSession(socket, timeout_s)
                try:
                    return session, await session.ask("reset", reset)
                except _FullError as error:
                    fault = str(error)
                    await session.close()
                except BaseException:
                    await session.close()
                    raise
                await asyncio.sleep(RETRY_S)
    except TimeoutError:
        raise InfraError(f"{url}: {fault} within {timeout_s:g} s") from None
    except (aiohttp.ClientError, OSError) as error:
        raise InfraError(f"{url}: {type(error).__name__}: {error}") from None


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
