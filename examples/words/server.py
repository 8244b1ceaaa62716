"""A word game behind OpenEnv's protocol: guess the word, with feedback for each letter.

    python -m examples.words.server --port 8765

- It replaces an OpenEnv server of your own; only `url` in mesh.toml changes.
- A game depends on its seed alone.
"""

import argparse
import asyncio
import random
from collections.abc import Mapping
from typing import Any

from rollmesh.testing.openenv_server import Observation, OpenEnvServer

WORDS = ("crane", "light", "mango", "pilot", "quilt", "river", "stone", "tulip")
NUM_GUESSES = 6


class WordGame:
    """An action is {"word": ...}; an observation {"feedback": ...}."""

    def __init__(self) -> None:
        self._word = WORDS[0]
        self._num_left = NUM_GUESSES

    def reset(self, seed: int) -> Observation:
        """Choose a new word."""
        self._word = random.Random(seed).choice(WORDS)
        self._num_left = NUM_GUESSES
        return {"feedback": f"A word of five letters; {self._num_left} guesses. Your first?"}

    def step(self, action: Mapping[str, Any]) -> tuple[Observation, float, bool]:
        """Return reward 1 for the word; raise ValueError unless the guess is a word of five
        letters.
        """
        guess = str(action.get("word", "")).lower()
        if len(guess) != 5 or not guess.isalpha():
            raise ValueError("word: must have five letters")
        self._num_left -= 1
        is_right = guess == self._word
        feedback = f"{marks(guess, self._word)}  {self._num_left} left"
        return {"feedback": feedback}, float(is_right), is_right or not self._num_left


def marks(guess: str, word: str) -> str:
    """Feedback per letter: + in its place, ? elsewhere in the word, - not in it."""
    pairs = zip(guess, word, strict=True)
    return "".join("+" if a == b else "?" if a in word else "-" for a, b in pairs)


async def main(port: int) -> None:
    """Serve until Ctrl-C."""
    async with OpenEnvServer(WordGame, max_sessions=64, port=port) as server:
        print(server.url, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m examples.words.server")
    parser.add_argument("--port", type=int, default=8765)
    try:
        asyncio.run(main(parser.parse_args().port))
    except KeyboardInterrupt:
        print("stopped")
