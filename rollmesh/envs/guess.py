"""Guess the number: a secret, a few guesses, and after each "higher", "lower" or "correct".

    ASKING --wrong guess, guesses left--> ASKING --right guess--> WON
       +-----wrong guess, none left-----> LOST

Invariant: an answer that is not just a number in range is a wrong guess with a hint of its own, so
that every reply moves the game on. The reward is 1 for a win, else 0, and nothing else.
Playing any guess that the hints still allow wins about 68 % of games with the default settings
(a secret in 1..7, three guesses); binary search wins all of them. Driven by the worker.
"""

import random
import re
from collections.abc import Iterator

from rollmesh.core.types import Score, Task
from rollmesh.envs.chat import ChatClient, Message
from rollmesh.envs.env import Endpoint, Env, Transcript

MAX_REPLY_TOKENS = 8
_NUMBER = re.compile(r"[1-9][0-9]{0,8}")


class GuessEnv(Env):
    """The game with a secret in 1..`highest` and `num_guesses` guesses."""

    def __init__(self, *, highest: int = 7, num_guesses: int = 3) -> None:
        if highest < 2 or num_guesses < 1:
            raise ValueError("highest must be at least 2 and num_guesses at least 1")
        self.highest = highest
        self.num_guesses = num_guesses
        self._chat = ChatClient()

    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        """Endless for every split: the secrets in shuffled rounds, each as often as the others."""
        rng = random.Random(f"{split}/{seed}")
        secrets = list(range(1, self.highest + 1))
        while True:
            rng.shuffle(secrets)
            for secret in secrets:
                yield Task(id=f"guess-{secret}", data={"secret": secret})

    async def run(self, task: Task, agent: Endpoint) -> Transcript:
        """Play one game: one model call per guess, the whole conversation sent each time."""
        secret: int = task.data["secret"]
        guesses: list[int | None] = []
        messages: list[Message] = [{"role": "user", "content": self.opening()}]
        while True:
            reply = await self._chat.complete(agent, messages, max_tokens=MAX_REPLY_TOKENS)
            guesses.append(self.parse(reply.text))
            if guesses[-1] == secret or len(guesses) == self.num_guesses:
                return Transcript(data={"guesses": guesses, "won": guesses[-1] == secret})
            messages.append({"role": "assistant", "content": reply.text})
            messages.append({"role": "user", "content": self.hint(guesses[-1], secret)})

    async def score(self, task: Task, transcript: Transcript) -> Score:
        """1 for a win, else 0."""
        del task
        guesses = transcript.data["guesses"]
        return Score(
            reward=float(transcript.data["won"]),
            metrics={
                "num_guesses": float(len(guesses)),
                "num_unparsed": float(guesses.count(None)),
            },
        )

    async def close(self) -> None:
        """Close the agent's connections."""
        await self._chat.close()

    def opening(self) -> str:
        """The first message of every game."""
        return f"Guess my number from 1 to {self.highest}. You have {self.num_guesses} guesses."

    def hint(self, guess: int | None, secret: int) -> str:
        """What the environment answers to a guess; None stands for an answer it cannot read."""
        if guess is None:
            return f"say a number from 1 to {self.highest}"
        if guess == secret:
            return "correct"
        return "higher" if secret > guess else "lower"

    def parse(self, text: str) -> int | None:
        """The guess in `text`: a number in range and nothing else; None otherwise.

        A lenient reading ("I say 4!") would pay for babble: a policy that is rewarded for entropy
        too learns to fill every answer with noise around the number.
        """
        if not _NUMBER.fullmatch(text):
            return None
        guess = int(text)
        return guess if guess <= self.highest else None
