"""OpenEnv servers as conversations: an observation is told, an answer becomes the next action.

    reset --observation--> the model speaks --step--> observation ... --done--> score
                          +--no action, or one that the server refuses--> told so; the turn counts

Invariants: one connection is one rollout's environment, and is closed when it ends; a server that
is full is waited for; one that fails or vanishes is InfraError, never a reward of zero. Driven by
the worker.
"""

import random
from collections.abc import Iterator, Mapping
from typing import Literal

import msgspec
from yarl import URL

from rollmesh.core.errors import EnvError
from rollmesh.core.types import Json, Score, Task
from rollmesh.envs.chat import ChatReply
from rollmesh.envs.env import Transcript
from rollmesh.envs.multi_turn import MultiTurnEnv, Talk, Words
from rollmesh.envs.openenv_session import Door, OpenEnvSession, RefusedError, Seen
from rollmesh.envs.tools import as_text


class OpenEnvSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How actions and observations are said."""

    action_field: str = ""
    """The field of an action that an answer's text becomes; '': the answer is its JSON object."""
    observation_field: str = ""
    """The field of an observation that is told; '': all of it, as JSON."""
    reward: Literal["sum", "last"] = "sum"
    """Of the rewards of all steps."""
    reset: Mapping[str, Json] = {}
    """Goes into every reset, beside the task's `seed`."""
    timeout_s: float = 60.0
    """For one step, or one reset."""
    capacity_wait_s: float = 300.0
    """For a place on a server that is full."""


class OpenEnvEnv(MultiTurnEnv):
    """Episodes on the OpenEnv server at `url`; a task is a seed.

    The rules of the game belong into `system`: the protocol has no words for them.
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
        self._door = Door(str(address / "ws"), self._game.timeout_s, self._game.capacity_wait_s)

    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        """Endless: episodes by their seeds."""
        rng = random.Random(f"{split}/{seed}")
        while True:
            episode = rng.getrandbits(31)
            yield Task(id=f"seed-{episode}", data={"seed": episode})

    async def begin(self, task: Task, talk: Talk) -> Words:
        """A new environment; its first observation."""
        talk.data.update(reward=0.0, num_steps=0, num_refused=0)
        reset = {**self._game.reset, "seed": task.data["seed"]}
        talk.held, seen = await self._door.enter(reset)
        return self._told(seen)

    async def respond(self, task: Task, talk: Talk, reply: ChatReply) -> Words | None:
        """One step; None where the episode is done."""
        del task
        session: OpenEnvSession = talk.held
        try:
            seen = await session.ask("step", self._action(reply.text))
        except (RefusedError, msgspec.MsgspecError) as error:
            talk.data["num_refused"] += 1
            return f"error: {error}"
        reward = float(seen.reward or 0.0)
        before = talk.data["reward"] if self._game.reward == "sum" else 0.0
        talk.data["reward"] = before + reward
        talk.data["num_steps"] += 1
        return None if seen.done else self._told(seen)

    async def finish(self, task: Task, talk: Talk) -> None:
        """Close the connection."""
        del task
        if talk.held is not None:
            await talk.held.close()

    async def score(self, task: Task, transcript: Transcript) -> Score:
        """The reward of the episode's steps."""
        del task
        data = transcript.data
        names = ("num_steps", "num_refused", "num_turns")
        return Score(data["reward"], {name: float(data[name]) for name in names})

    async def close(self) -> None:
        """Close the connections, to the servers and the agent's."""
        await super().close()
        await self._door.close()

    def _action(self, text: str) -> dict[str, Json]:
        if self._game.action_field:
            return {self._game.action_field: text.strip()}
        return msgspec.json.decode(text, type=dict[str, Json])

    def _told(self, seen: Seen) -> str:
        field = self._game.observation_field
        return as_text(seen.observation.get(field, "") if field else seen.observation)
