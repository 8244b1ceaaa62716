"""Guess the number: a secret, a few guesses, and "higher", "lower" or "correct" after each.

    ASKING --wrong guess, guesses left--> ASKING --right guess--> WON
           +-----wrong guess, none left-----> LOST

- An answer that is not just a number in range is a wrong guess with a hint of its own, so that each
  reply advances the game.
- The reward is 1 for a win, else 0. Guessing any number that the hints allow wins about 68 % of
  games with the default settings (a secret in 1..7, three guesses); binary search wins all.
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
    """A game with a secret in 1..`highest` and `num_guesses` guesses."""

    def __init__(self, *, highest: int = 7, num_guesses: int = 3) -> None:
        if highest < 2 or num_guesses < 1:
            raise ValueError("highest must be at least 2 and num_guesses at least 1")
        self.highest = highest
        self.num_guesses = num_guesses
        self._chat = ChatClient()

    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        """Yield the secrets in shuffled rounds for each split, endlessly."""
        rng = random.Random(f"{split}/{seed}")
        secrets = list(range(1, self.highest + 1))
        while True:
            rng.shuffle(secrets)
            for secret in secrets:
                yield Task(id=f"guess-{secret}", data={"secret": secret})

    async def run(self, task: Task, agent: Endpoint) -> Transcript:
        """Play one game: one model call per guess, with the whole conversation."""
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
        """Return 1 for a win, else 0."""
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
        """Return the answer to a guess; None stands for an invalid one."""
        if guess is None:
            return f"say a number from 1 to {self.highest}"
        if guess == secret:
            return "correct"
        return "higher" if secret > guess else "lower"

    def parse(self, text: str) -> int | None:
        """Return the guess in `text`, a number in range and nothing else; else None.

        A lenient reading ("I say 4!") would reward noise: a policy with an entropy bonus learns to
        fill each answer with text around the number.
        """
        if not _NUMBER.fullmatch(text):
            return None
        guess = int(text)
        return guess if guess <= self.highest else None
