"""The echo environment: conversations of a fixed shape, for benchmarks and smoke tests.

- Messages depend on the settings and the task only, so that two runs put the same load on the mesh.
- The reward is 1 for each rollout that got all its answers.
"""

import random
from collections.abc import Iterator

from rollmesh.core.types import Score, Task
from rollmesh.envs.chat import ChatClient, Message
from rollmesh.envs.env import Endpoint, Env, Transcript

_WORDS = ("alpha", "bravo", "delta", "echo", "golf", "hotel", "lima", "oscar", "tango", "zulu")


class EchoEnv(Env):
    """`num_turns` model calls; the first message has about `prompt_chars`, later `turn_chars`."""

    def __init__(
        self,
        *,
        num_turns: int = 3,
        prompt_chars: int = 1000,
        turn_chars: int = 200,
        max_tokens: int = 16,
    ) -> None:
        if min(num_turns, prompt_chars, turn_chars, max_tokens) < 1:
            raise ValueError("num_turns, prompt_chars, turn_chars and max_tokens must be positive")
        self.num_turns = num_turns
        self.prompt_chars = prompt_chars
        self.turn_chars = turn_chars
        self.max_tokens = max_tokens
        self._chat = ChatClient()

    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        """Yield tasks that differ in their text only, endlessly."""
        rng = random.Random(f"{split}/{seed}")
        while True:
            text_seed = rng.getrandbits(32)
            yield Task(id=f"echo-{text_seed:08x}", data={"text_seed": text_seed})

    async def run(self, task: Task, agent: Endpoint) -> Transcript:
        """Converse for `num_turns`; each answer returns as history."""
        rng = random.Random(task.data["text_seed"])
        messages: list[Message] = [{"role": "user", "content": _babble(rng, self.prompt_chars)}]
        num_chars = 0
        for turn in range(self.num_turns):
            if turn:
                messages.append({"role": "user", "content": _babble(rng, self.turn_chars)})
            reply = await self._chat.complete(agent, messages, max_tokens=self.max_tokens)
            messages.append({"role": "assistant", "content": reply.text})
            num_chars += len(reply.text)
        return Transcript(data={"num_chars": num_chars})

    async def score(self, task: Task, transcript: Transcript) -> Score:
        """Return 1: the rollout has ended."""
        del task
        return Score(reward=1.0, metrics={"num_chars": float(transcript.data["num_chars"])})

    async def close(self) -> None:
        """Close the agent's connections."""
        await self._chat.close()


def _babble(rng: random.Random, num_chars: int) -> str:
    """Return plain words of exactly `num_chars` characters."""
    words: list[str] = []
    length = 0
    while length < num_chars:
        words.append(rng.choice(_WORDS))
        length += len(words[-1]) + 1
    return " ".join(words)[:num_chars].ljust(num_chars, ".")
