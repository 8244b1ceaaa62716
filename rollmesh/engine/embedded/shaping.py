"""Changes logits before a token is drawn: penalties, a least length, a grammar, biases.

Invariant: the order is SGLang's: frequency, presence and the least length are taken off, then the
repetition penalty scales, then the grammar masks, then biases are added; temperature and the cuts
come after, so log-probs are of what all this has left. Penalties look at the output alone, never
at the prompt: an output that is resumed as a prompt is not penalised for its first part, which is
why a leg with penalties is not resumed. Driven by the Runner, for the rows that ask for any of it.

Shapes: V vocabulary.
"""

import msgspec
import torch
from torch import Tensor

from rollmesh.engine.embedded.grammars import Guide


class Shaping(msgspec.Struct, frozen=True, kw_only=True):
    """What a request changes of its logits, beside its grammar; SGLang's names and defaults."""

    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    end_tokens: tuple[int, ...] = ()
    """What may not be drawn below min_new_tokens; told only where there are any."""
    bias_tokens: tuple[int, ...] = ()
    biases: tuple[float, ...] = ()
    """Of bias_tokens, in their order."""


def shape(logits_V: Tensor, shaping: Shaping | None, guide: Guide | None, output: Tensor) -> None:
    """Change `logits_V` in place; `output` are the tokens so far, int64."""
    if shaping is not None:
        penalise(logits_V, shaping, output)
    if guide is not None:
        logits_V.masked_fill_(torch.from_numpy(~guide.allowed_V()), -torch.inf)
    if shaping is not None and shaping.bias_tokens:
        logits_V[list(shaping.bias_tokens)] += torch.tensor(shaping.biases)


def penalise(logits_V: Tensor, shaping: Shaping, output: Tensor) -> None:
    """Take penalties off in place.

    Frequency and presence as the OpenAI API defines them; repetition as CTRL does (Keskar et al.,
    2019): a seen token's logit is divided by the penalty, or multiplied by it if negative.
    """
    counts_V = torch.bincount(output, minlength=len(logits_V))
    seen_V = counts_V > 0
    logits_V -= counts_V * shaping.frequency_penalty + seen_V * shaping.presence_penalty
    if len(output) < shaping.min_new_tokens:
        logits_V[list(shaping.end_tokens)] = -torch.inf
    scale_V = 1.0 + seen_V * (shaping.repetition_penalty - 1.0)
    logits_V.copy_(torch.where(logits_V < 0, logits_V * scale_V, logits_V / scale_V))
