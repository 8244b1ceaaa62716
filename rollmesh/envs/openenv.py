"""OpenEnv servers as conversations: observations are messages, and answers are actions.

    reset --observation--> the model answers --step--> observation ... --done--> score
                +--no valid action--> an error message; the turn counts
    {"type": "reset" | "step", "data": {...}}  -->  {"type": "observation", "data": {...}}
    {"type": "close"}                               {"type": "error", "data": {"message", "code"}}

- One WebSocket is one rollout's environment, closed at its end. OpenEnv's POST endpoints create a
  new environment for each call, so they cannot play (meta-pytorch/OpenEnv, src/openenv/core:
  env_client.py, env_server/types.py).
- A full server is waited for; a fault of the server is InfraError, never a reward of zero; a fault
  of the action is ActionRefused.
"""

import asyncio
import random
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack
from typing import Literal

import aiohttp
import msgspec
from yarl import URL

from rollmesh.core.errors import EnvError, InfraError
from rollmesh.core.types import Json, Score, Task
from rollmesh.envs.chat import ChatReply
from rollmesh.envs.env import Transcript
from rollmesh.envs.multi_turn import MultiTurnEnv, Prompt, Talk
from rollmesh.envs.tools import as_text

MAX_MESSAGE_BYTES = 100 * 2**20
"""Limit of OpenEnv's own client."""
CLOSING = aiohttp.ClientWSTimeout(ws_close=1.0)
"""Time for the server to confirm a close."""
RETRY_S = 0.25
"""Interval at which one of the waiting rollouts retries a full server."""


class Observation(msgspec.Struct, frozen=True):
    """Result of a reset or a step."""

    observation: dict[str, Json]
    reward: float | None = None
    done: bool = False


class ActionRefused(Exception):
    """The server rejected an action that violates its schema."""


class _FullError(Exception):
    """The server is at its limit of environments."""


class _Detail(msgspec.Struct, frozen=True):
    msg: str = ""
    loc: list[str | int] = []


class _Fault(msgspec.Struct, frozen=True):
    message: str = ""
    code: str = ""
    errors: list[_Detail] = []
    """Errors of an action, by field."""

    @property
    def why(self) -> str:
        """Return the reason in one line."""
        details = (f"{'.'.join(map(str, each.loc))}: {each.msg}" for each in self.errors)
        return "; ".join([self.message, *details])


class _Answer(msgspec.Struct, frozen=True):
    type: str
    data: msgspec.Raw = msgspec.Raw(b"{}")


class OpenEnvSession:
    """One environment on a server; `close` it."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, timeout_s: float) -> None:
        self._socket = socket
        self._timeout_s = timeout_s

    async def ask(self, kind: str, data: Mapping[str, Json]) -> Observation:
        """Send a `reset` or a `step`; return the observation."""
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
        """Close the environment; the server also does so when the connection breaks."""
        try:
            await self._socket.send_str('{"type":"close"}')
        except (aiohttp.ClientError, OSError):
            return
        finally:
            await self._socket.close()


class OpenEnvConnector:
    """Connections to one server, which rollouts wait for in order while it is full; `close` it.

    enter --> a session --(full)--> in line --a place is free--> a session
                                       +------capacity_wait_s is over--> InfraError
    """

    def __init__(self, url: str, timeout_s: float, capacity_wait_s: float) -> None:
        self._url = url
        self._timeout_s = timeout_s
        self._capacity_wait_s = capacity_wait_s
        self._line = asyncio.Lock()
        """Held by the rollout that retries."""
        self._client: aiohttp.ClientSession | None = None

    async def enter(self, reset: Mapping[str, Json]) -> tuple[OpenEnvSession, Observation]:
        """Create an environment; return it with its first observation."""
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
        """Close all open sessions."""
        if self._client is not None:
            await self._client.close()
            self._client = None

    async def _try(self, reset: Mapping[str, Json]) -> tuple[OpenEnvSession, Observation] | None:
        """Create an environment; None if the server is full."""
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


def _seen(text: str) -> Observation:
    """Decode an observation; raise the server's error."""
    try:
        answer = msgspec.json.decode(text, type=_Answer)
        if answer.type == "observation":
            return msgspec.json.decode(answer.data, type=Observation, strict=False)
        fault = msgspec.json.decode(answer.data, type=_Fault)
    except msgspec.MsgspecError as error:
        raise InfraError(f"the OpenEnv server's answer cannot be read: {error}") from None
    if fault.code == "CAPACITY_REACHED":
        raise _FullError(fault.message)
    if fault.code == "VALIDATION_ERROR":
        raise ActionRefused(fault.why)
    raise InfraError(f"the OpenEnv server answers {fault.code or answer.type}: {fault.message}")


class OpenEnvSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Mapping of actions and observations to text."""

    action_field: str = ""
    """Field of an action that an answer's text fills; '': the answer is the action's JSON
    object."""
    observation_field: str = ""
    """Field of an observation that is shown; '': the whole, as JSON."""
    reward: Literal["sum", "last"] = "sum"
    """Reward of an episode, over its steps."""
    reset: Mapping[str, Json] = {}
    """Added to each reset, besides the task's `seed`."""
    timeout_s: float = 60.0
    """For one step, or one reset."""
    capacity_wait_s: float = 300.0
    """For a place on a full server."""


class OpenEnvEnv(MultiTurnEnv):
    """Episodes on the OpenEnv server at `url`; a task is a seed.

    Put the rules of the game into `system`: the protocol has no field for them.
    """

    def __init__(
        self,
        *,
        url: str,
        game: Mapping[str, Json] | None = None,
        system: str = "",
        max_turns: int = 64,
        max_tokens: int = 0,
    ) -> None:
        """`game` has the fields of OpenEnvSettings."""
        super().__init__(max_turns=max_turns, max_tokens=max_tokens, system=system)
        address = URL(url)
        if address.scheme not in ("http", "https", "ws", "wss") or not address.host:
            raise EnvError(f'url = "{url}" is no address; give http://host:port')
        try:
            self._game = msgspec.convert(dict(game or {}), OpenEnvSettings)
        except msgspec.ValidationError as error:
            raise EnvError(f"game: {error}") from None
        self._door = OpenEnvConnector(
            str(address / "ws"), self._game.timeout_s, self._game.capacity_wait_s
        )

    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        """Yield episodes by their seeds, endlessly."""
        rng = random.Random(f"{split}/{seed}")
        while True:
            episode = rng.getrandbits(31)
            yield Task(id=f"seed-{episode}", data={"seed": episode})

    async def begin(self, task: Task, talk: Talk) -> Prompt:
        """Create an environment and return its first observation."""
        talk.data.update(reward=0.0, num_steps=0, num_refused=0)
        reset = {**self._game.reset, "seed": task.data["seed"]}
        talk.held, seen = await self._door.enter(reset)
        return self._observation_text(seen)

    async def respond(self, task: Task, talk: Talk, reply: ChatReply) -> Prompt | None:
        """Do one step; None if the episode is done."""
        del task
        session: OpenEnvSession = talk.held
        try:
            seen = await session.ask("step", self._action(reply.text))
        except (ActionRefused, msgspec.MsgspecError) as error:
            talk.data["num_refused"] += 1
            return f"error: {error}"
        reward = float(seen.reward or 0.0)
        before = talk.data["reward"] if self._game.reward == "sum" else 0.0
        talk.data["reward"] = before + reward
        talk.data["num_steps"] += 1
        return None if seen.done else self._observation_text(seen)

    async def finish(self, task: Task, talk: Talk) -> None:
        """Close the connection."""
        del task
        if talk.held is not None:
            await talk.held.close()

    async def score(self, task: Task, transcript: Transcript) -> Score:
        """Return the reward of the episode."""
        del task
        data = transcript.data
        names = ("num_steps", "num_refused", "num_turns")
        return Score(data["reward"], {name: float(data[name]) for name in names})

    async def close(self) -> None:
        """Close all connections."""
        await super().close()
        await self._door.close()

    def _action(self, text: str) -> dict[str, Json]:
        if self._game.action_field:
            return {self._game.action_field: text.strip()}
        return msgspec.json.decode(text, type=dict[str, Json])

    def _observation_text(self, seen: Observation) -> str:
        field = self._game.observation_field
        return as_text(seen.observation.get(field, "") if field else seen.observation)
