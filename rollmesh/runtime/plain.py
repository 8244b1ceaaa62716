"""Replies to raw prompts: text as it was sampled, with its white space, up to a stop string.

Invariant: as in deltas.py, the pieces fold to the answer; marks of reasoning and calls are text
like any other, and the token that ends a turn is none. Made by prompts.py.
"""

from collections.abc import Collection, Sequence

from rollmesh.runtime.deltas import Answer, Delta
from rollmesh.runtime.stops import begun
from rollmesh.runtime.tokenizer import Tokenizer


class PlainReader:
    """Satisfies DeltaReader."""

    def __init__(self, tokenizer: Tokenizer, ends: Collection[int], stop: tuple[str, ...]) -> None:
        self._text = tokenizer.stream()
        self._ends = ends
        self._stop = stop
        self._told: list[str] = []
        self._waiting = ""
        """May be the beginning of a stop string."""
        self._is_over = False
        self._num_tokens = 0

    def feed(self, token_ids: Sequence[int]) -> Delta | None:
        """The piece that `token_ids` complete; None while there is nothing to tell."""
        self._num_tokens += len(token_ids)
        piece = self._take(self._text.feed([i for i in token_ids if i not in self._ends]))
        return Delta(piece, num_tokens=self._num_tokens) if piece else None

    def end(self, num_tokens: int) -> Delta:
        """The rest, when no more tokens will come."""
        piece = self._take(self._text.end())
        if not self._is_over:
            piece += self._waiting
            self._told.append(self._waiting)
            self._waiting = ""
        self._is_over = True
        return Delta(piece, num_tokens=num_tokens)

    def answer(self) -> Answer:
        """The fold of all deltas; after `end`."""
        return Answer("".join(self._told))

    def _take(self, text: str) -> str:
        if self._is_over:
            return ""
        text = self._waiting + text
        cuts = [at for word in self._stop if (at := text.find(word)) >= 0]
        size = min(cuts) if cuts else len(text) - begun(text, self._stop)
        self._is_over = bool(cuts)
        text, self._waiting = text[:size], text[size:]
        self._told.append(text)
        return text
