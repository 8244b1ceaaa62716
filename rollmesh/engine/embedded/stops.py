"""Stop strings and stop patterns, matched in an output's text while it grows.

Invariants: a match is found with the token that completes it; what may still become a stop string
is not told to a reader of the stream before it is decided, as SGLang does. Text is decoded with
its special tokens, which may be stopped at too. Driven by requests: one StopWatch for each output.
"""

import re

import msgspec
from tokenizers import Tokenizer

from rollmesh.engine.embedded.text import TextTail


class StopRule(msgspec.Struct, frozen=True):
    """What ends an output, beside tokens."""

    tokenizer: Tokenizer
    strings: tuple[str, ...] = ()
    patterns: tuple[re.Pattern[str], ...] = ()

    def begin(self) -> "StopWatch":
        """A watch over an output of which nothing is known yet."""
        return StopWatch(self)


class StopWatch:
    """One output's text so far, looked through as it grows."""

    def __init__(self, rule: StopRule) -> None:
        self._rule = rule
        self._tail = TextTail(rule.tokenizer, skips_special=False)

    def feed(self, token: int) -> str | None:
        """The stop string, or the pattern's own text, that `token` completes."""
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
