"""Grammars that an output must follow: JSON schemas, regular expressions and EBNF.

Owns what is known of the library `llguidance`, which SGLang too has as a backend (its default,
xgrammar, takes the same three kinds). Invariants: a text is compiled once and each request goes
through a copy of its own; a Guide allows the end tokens exactly where the grammar may end, and
nothing else where it must. Driven by the ask decoder, which compiles, and by requests.

Shapes: V vocabulary.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

import numpy as np
import orjson
from llguidance import LLMatcher, LLTokenizer, grammar_from
from numpy.typing import NDArray
from tokenizers import Tokenizer

from rollmesh.core.errors import EngineRefused

GrammarKind = Literal["json_schema", "regex", "ebnf"]

_NUM_KEPT = 64


class GrammarRefused(EngineRefused):
    """A text is no grammar, or one that is not supported."""


class Guide:
    """One output's way through a grammar."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size

    def allowed_V(self) -> NDArray[np.bool_]:
        """Which tokens may come next."""
        packed = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        return np.unpackbits(packed, count=self._vocab_size, bitorder="little").view(np.bool_)

    def take(self, token: int) -> str:
        """Step over a token; '' or why it cannot be, which ends the output.

        The library now and then allows a token that it then cannot take: a special one, where a
        grammar spells its text.
        """
        if self._matcher.consume_token(token):
            return ""
        return f"token {token} is not in the grammar"


class Grammar:
    """A compiled grammar; every output begins a Guide of its own."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._pristine = matcher
        self._vocab_size = vocab_size

    def begin(self) -> Guide:
        """A guide that stands at the grammar's start."""
        return Guide(self._pristine.deep_copy(), self._vocab_size)


class GrammarCompiler:
    """Compiles for one tokenizer, and keeps what was asked for last."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, ends: Sequence[int]) -> None:
        """`ends`: the model's end tokens, which alone may follow a complete output."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._ends = list(ends)
        self.compile = lru_cache(_NUM_KEPT)(self._compile)
        """(kind, text) -> Grammar; GrammarRefused in the library's words if it is none."""
        self._words: LLTokenizer | None = None

    def _compile(self, kind: GrammarKind, text: str) -> Grammar:
        if self._words is None:  # made when first asked for: it takes seconds for a wide vocabulary
            self._words = LLTokenizer(
                as_text(self._tokenizer.to_str()), n_vocab=self._vocab_size, eos_token=self._ends
            )
        try:
            matcher = LLMatcher(self._words, grammar_from(kind, text), log_level=0)
        except ValueError as error:
            raise refusal(kind, str(error)) from None
        if matcher.is_error():
            raise refusal(kind, matcher.get_error())
        return Grammar(matcher, self._vocab_size)


def as_text(tokenizer_json: str) -> str:
    """The tokenizer with its marks as plain words, since the library takes them for no text.

    A mark is a token that was added and is not special, such as `<tool_call>`: a grammar may spell
    it. Those beyond ASCII are left; their bytes have other letters in a vocabulary.
    """
    tree = orjson.loads(tokenizer_json)
    kept = []
    for added in tree["added_tokens"]:
        text = added["content"]
        if added["special"] or not (text.isascii() and text.isprintable() and " " not in text):
            kept.append(added)
        else:
            tree["model"]["vocab"][text] = added["id"]
    tree["added_tokens"] = kept
    return orjson.dumps(tree).decode()


def refusal(kind: GrammarKind, why: str) -> GrammarRefused:
    """The refusal of a grammar, as SGLang words it, in one line."""
    name = "json" if kind == "json_schema" else kind
    return GrammarRefused(f"Failed to compile {name} grammar: {' '.join(why.split())}")
