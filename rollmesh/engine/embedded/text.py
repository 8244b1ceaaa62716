"""Incremental detokenization, and stop strings and patterns in the growing text.

- Text never ends in part of a character: incomplete bytes wait for the next token.
- A match is found with the token that completes it. Text that may still become a stop string is not
  streamed, as in SGLang.
- Stop strings see special tokens too.
"""

import re
from collections.abc import Sequence
from pathlib import Path

import msgspec
from tokenizers import Tokenizer

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def load_tokenizer(folder: Path) -> Tokenizer | None:
    """Return the folder's tokenizer.json, or None if it has none."""
    path = folder / "tokenizer.json"
    return Tokenizer.from_file(str(path)) if path.exists() else None


class IncrementalDecoder:
    """Decodes a growing list of ids piece by piece.

    Each piece is the difference of two decodings of the last few ids, since tokenizers may join or
    strip at a text's beginning (the method of Hugging Face's text-generation-inference).
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._skips_special = skip_special
        self._window: list[int] = []
        self._num_read = 0
        """Ids of the window whose text was returned."""
        self.text = ""
        """All text so far."""

    def feed(self, ids: Sequence[int], *, is_last: bool) -> str:
        """Return the text that `ids` add; part of a character waits, unless `ids` are the last."""
        self._window.extend(ids)
        before = self._decode(self._window[: self._num_read])
        after = self._decode(self._window)
        if not is_last and (len(after) <= len(before) or after.endswith(_REPLACEMENT)):
            return ""
        self._window = self._window[self._num_read :]
        self._num_read = len(self._window)
        piece = after[len(before) :]
        self.text += piece
        return piece

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skips_special)


class StopRule(msgspec.Struct, frozen=True):
    """Strings and patterns that end an output."""

    tokenizer: Tokenizer
    strings: tuple[str, ...] = ()
    patterns: tuple[re.Pattern[str], ...] = ()

    def start(self) -> "StopSearch":
        """Return a search of a new output."""
        return StopSearch(self)


class StopSearch:
    """Searches one output's text as it grows."""

    def __init__(self, rule: StopRule) -> None:
        self._rule = rule
        self._tail = IncrementalDecoder(rule.tokenizer, skip_special=False)

    def feed(self, token: int) -> str | None:
        """Return the stop string, or the pattern's own text, that `token` completes."""
        num_searched = len(self._tail.text)
        self._tail.feed([token], is_last=False)
        text = self._tail.text
        for string in self._rule.strings:
            if text.find(string, max(0, num_searched - len(string) + 1)) >= 0:
                return string
        for pattern in self._rule.patterns:
            if pattern.search(text):
                return pattern.pattern
        return None

    @property
    def is_undecided(self) -> bool:
        """Whether the text ends in what may become a stop string."""
        text = self._tail.text
        return any(
            text.endswith(string[:length])
            for string in self._rule.strings
            for length in range(1, min(len(string), len(text) + 1))
        )
