"""Stop strings, found by us so that one may begin in a leg and end in the next.

Invariant: a hit is the earliest completion of any stop string in the decoded text, and names the
token that completed it; which legs or chunks brought the tokens makes no difference. Driven by
generation.py through its StopMatcher door.
"""

from collections.abc import Sequence
from typing import Protocol

from rollmesh.runtime.generation_events import StopHit


class Feed(Protocol):
    """What decodes token ids as they come, such as tokenizer.Detokenizer."""

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text that `token_ids` complete."""


class StopStrings:
    """Matches the stop strings of one generation."""

    def __init__(self, stops: tuple[str, ...], detokenizer: Feed) -> None:
        """`detokenizer` is this matcher's own; empty stop strings never match."""
        self._stops = tuple(stop for stop in stops if stop)
        self._detokenizer = detokenizer
        self._longest = max(map(len, self._stops), default=1)
        self._tail = ""
        self._num_tokens = 0

    def push(self, token_ids: Sequence[int]) -> StopHit | None:
        """Take the next tokens; the first hit, if they complete one."""
        for token_id in token_ids:
            self._num_tokens += 1
            self._tail += self._detokenizer.feed([token_id])
            ends = [
                (self._tail.find(stop) + len(stop), stop)
                for stop in self._stops
                if stop in self._tail
            ]
            if ends:
                return StopHit(self._num_tokens, min(ends)[1])
            keep = self._longest - 1
            self._tail = (
                self._tail[len(self._tail) - keep :] if keep < len(self._tail) else self._tail
            )
        return None


def begun(text: str, words: tuple[str, ...]) -> int:
    """Length of the longest end of `text` that one of `words` begins with, short of all of it."""
    longest = 0
    for word in words:
        for size in range(min(len(word) - 1, len(text)), longest, -1):
            if text.endswith(word[:size]):
                longest = size
                break
    return longest
