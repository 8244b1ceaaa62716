"""Logits are changed by SGLang's formulas, in its order, and for output tokens only."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from rollmesh.engine.embedded.model import Model
from rollmesh.engine.embedded.shaping import GrammarCompiler, Shaping, shape
from tests.unit.engine.embedded.driving import ask, finish_all, make_engine, output, random_prompt
from tests.unit.engine.embedded.references import Reference

LOGITS = [2.0, -2.0, 1.0, 0.5]


def shaped(output: list[int], **asked: Any) -> list[float]:
    logits_V = torch.tensor(LOGITS)
    shape(logits_V, Shaping(**asked), None, torch.tensor(output, dtype=torch.int64))
    found: list[float] = logits_V.tolist()
    return found


def test_frequency_counts_and_presence_does_not() -> None:
    assert shaped([0, 0, 1], frequency_penalty=0.5) == [1.0, -2.5, 1.0, 0.5]
    assert shaped([0, 0, 1], presence_penalty=0.5) == [1.5, -2.5, 1.0, 0.5]
    assert shaped([], frequency_penalty=0.5, presence_penalty=0.5) == LOGITS


def test_the_repetition_penalty_lowers_logits_of_either_sign() -> None:
    assert shaped([0, 1, 1], repetition_penalty=2.0) == [1.0, -4.0, 1.0, 0.5]


def test_penalties_are_subtracted_then_scaled_and_biases_come_last() -> None:
    asked: dict[str, Any] = {"presence_penalty": 1.0, "repetition_penalty": 2.0}
    assert shaped([0], **asked, bias_tokens=(0, 3), biases=(3.0, -1.0)) == [3.5, -2.0, 1.0, -0.5]


@pytest.mark.parametrize(("output", "held"), [([], True), ([3], True), ([3, 3], False)])
def test_end_tokens_are_impossible_below_the_least_length(output: list[int], held: bool) -> None:
    least, _, _, _ = shaped(output, min_new_tokens=2, end_tokens=(0,))
    assert (least == -torch.inf) is held


def test_a_bias_does_not_break_a_grammar(letters: Tokenizer) -> None:
    matcher = GrammarCompiler(letters, 96, [7]).compile("regex", "a").start()
    logits_V = torch.zeros(96)
    wanted, other = letters.encode("ab").ids
    bias = Shaping(bias_tokens=(other,), biases=(100.0,))
    shape(logits_V, bias, matcher, torch.empty(0, dtype=torch.int64))
    assert logits_V.argmax() == wanted
    assert (logits_V > -torch.inf).sum() == 1


def test_penalties_depend_on_the_output_only(model: Model, folder: Path) -> None:
    prompt = random_prompt(9)
    shaping = Shaping(frequency_penalty=2.0, presence_penalty=1.0)
    request = ask(prompt, new=12, temperature=0.0, shaping=shaping)
    finish_all(make_engine(model), request)
    logits_TV = Reference(folder).logits([*prompt, *output(request)])
    logits_TV = logits_TV[len(prompt) - 1 : -1].clone()
    for at, logits_V in enumerate(logits_TV):
        for token in output(request)[:at]:
            logits_V[token] -= 2.0
        for token in set(output(request)[:at]):
            logits_V[token] -= 1.0
        assert int(logits_V.argmax()) == output(request)[at]
        expected = logits_V.log_softmax(-1).max().item()
        assert request.logprobs[at] == pytest.approx(expected, abs=1e-4)
