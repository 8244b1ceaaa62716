"""Changes logits before sampling: penalties, minimum length, grammars (JSON schema, regex, EBNF),
biases.

- Order as in SGLang: frequency, presence and minimum length, repetition penalty, grammar mask,
  biases; then temperature and cuts. Log-probs are of the result.
- Penalties count the output only, never the prompt. An output that is resumed as a prompt would not
  be penalised for its first part, so requests with penalties are not resumed.
- A grammar (by `llguidance`, which SGLang has as a backend too) is compiled once and each request
  uses a copy. It allows end tokens exactly where it may end, and nothing else where it must.

Shapes: V vocabulary.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

import msgspec
import numpy as np
import orjson
import torch
from llguidance import LLMatcher, LLTokenizer, grammar_from
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from rollmesh.core.errors import EngineRefused

GrammarKind = Literal["json_schema", "regex", "ebnf"]

_NUM_KEPT = 64


class GrammarRefused(EngineRefused):
    """A grammar is invalid or unsupported."""


class GrammarMatcher:
    """Position of one output in a grammar."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size

    def allowed_V(self) -> NDArray[np.bool_]:
        """Return which tokens may come next."""
        packed = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        return np.unpackbits(packed, count=self._vocab_size, bitorder="little").view(np.bool_)

    def take(self, token: int) -> str:
        """Advance by a token; return why it is not allowed, which ends the output, else ''.

        The library occasionally allows a token that it then rejects: a special one whose text a
        grammar spells.
        """
        if self._matcher.consume_token(token):
            return ""
        return f"token {token} is not in the grammar"


class CompiledGrammar:
    """A compiled grammar; each output has a matcher of its own."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._pristine = matcher
        self._vocab_size = vocab_size

    def start(self) -> GrammarMatcher:
        """Return a matcher at the grammar's start."""
        return GrammarMatcher(self._pristine.deep_copy(), self._vocab_size)


class GrammarCompiler:
    """Compiles for one tokenizer, with a cache of recent grammars."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, ends: Sequence[int]) -> None:
        """`ends`: the model's end tokens, which alone may follow a complete output."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._ends = list(ends)
        self.compile = lru_cache(_NUM_KEPT)(self._compile)
        """(kind, text) -> CompiledGrammar; GrammarRefused in the library's words if it is
        invalid."""
        self._ll_tokenizer: LLTokenizer | None = None

    def _compile(self, kind: GrammarKind, text: str) -> CompiledGrammar:
        if self._ll_tokenizer is None:  # on first use: it takes seconds for a wide vocabulary
            self._ll_tokenizer = LLTokenizer(
                as_text(self._tokenizer.to_str()), n_vocab=self._vocab_size, eos_token=self._ends
            )
        try:
            matcher = LLMatcher(self._ll_tokenizer, grammar_from(kind, text), log_level=0)
        except ValueError as error:
            raise refusal(kind, str(error)) from None
        if matcher.is_error():
            raise refusal(kind, matcher.get_error())
        return CompiledGrammar(matcher, self._vocab_size)


def as_text(tokenizer_json: str) -> str:
    """Return the tokenizer with its marks as plain words, since the library does not treat them as
    text.

    A mark is an added token that is not special, such as `<tool_call>`, which a grammar may spell.
    Those beyond ASCII are left; their bytes have other letters in a vocabulary.
    """
    tree = orjson.loads(tokenizer_json)
    remaining = []
    for added in tree["added_tokens"]:
        text = added["content"]
        if added["special"] or not (text.isascii() and text.isprintable() and " " not in text):
            remaining.append(added)
        else:
            tree["model"]["vocab"][text] = added["id"]
    tree["added_tokens"] = remaining
    return orjson.dumps(tree).decode()


def refusal(kind: GrammarKind, why: str) -> GrammarRefused:
    """Return the refusal of a grammar in SGLang's words, in one line."""
    name = "json" if kind == "json_schema" else kind
    return GrammarRefused(f"Failed to compile {name} grammar: {' '.join(why.split())}")


class Shaping(msgspec.Struct, frozen=True, kw_only=True):
    """Changes of a request's logits besides its grammar; SGLang's names and defaults."""

    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    end_tokens: tuple[int, ...] = ()
    """Tokens that are excluded below min_new_tokens, if that is set."""
    bias_tokens: tuple[int, ...] = ()
    biases: tuple[float, ...] = ()
    """Biases of bias_tokens, in their order."""


def shape(
    logits_V: Tensor, shaping: Shaping | None, matcher: GrammarMatcher | None, output: Tensor
) -> None:
    """Change `logits_V` in place; `output` are the tokens so far, int64."""
    if shaping is not None:
        penalise(logits_V, shaping, output)
    if matcher is not None:
        logits_V.masked_fill_(torch.from_numpy(~matcher.allowed_V()), -torch.inf)
    if shaping is not None and shaping.bias_tokens:
        logits_V[list(shaping.bias_tokens)] += torch.tensor(shaping.biases)


def penalise(logits_V: Tensor, shaping: Shaping, output: Tensor) -> None:
    """Subtract penalties in place.

    Frequency and presence as the OpenAI API defines them; repetition as in CTRL (Keskar et al.,
    2019): a seen token's logit is divided by the penalty, or multiplied by it if negative.
    """
    counts_V = torch.bincount(output, minlength=len(logits_V))
    seen_V = counts_V > 0
    logits_V -= counts_V * shaping.frequency_penalty + seen_V * shaping.presence_penalty
    if len(output) < shaping.min_new_tokens:
        logits_V[list(shaping.end_tokens)] = -torch.inf
    scale_V = 1.0 + seen_V * (shaping.repetition_penalty - 1.0)
    logits_V.copy_(torch.where(logits_V < 0, logits_V * scale_V, logits_V / scale_V))
