"""`sampling_params`: SGLang's bounds in SGLang's words, and what reaches the step loop."""

from typing import Any

import pytest
from tokenizers import Tokenizer

from rollmesh.core.errors import EngineRefused
from rollmesh.engine.embedded.model import Model
from rollmesh.engine.embedded.params import ParamsReader, SamplingBody
from rollmesh.engine.embedded.request import Sampling
from rollmesh.engine.embedded.shaping import Shaping
from tests.unit.engine.embedded.tiny_models import EOS, VOCAB_SIZE


@pytest.fixture
def reader(model: Model, letters: Tokenizer) -> ParamsReader:
    return ParamsReader(model.architecture, letters, seed=0)


def read(reader: ParamsReader, **params: Any) -> Sampling:
    return reader.read(SamplingBody(**params), 8, 0)


def test_what_is_not_asked_changes_no_logits(reader: ParamsReader) -> None:
    sampling = read(reader)
    assert (sampling.shaping, sampling.grammar, sampling.stop) == (None, None, None)
    nothing = {"frequency_penalty": 0.0, "repetition_penalty": 1.0, "logit_bias": {}, "regex": ""}
    assert read(reader, **nothing).shaping is None
    assert read(reader, **nothing).grammar is None


def test_penalties_and_biases_reach_the_logits(reader: ParamsReader) -> None:
    sampling = read(
        reader,
        frequency_penalty=0.5,
        presence_penalty=-1.0,
        repetition_penalty=1.5,
        min_new_tokens=2,
        stop_token_ids=[9, 10**6],
        logit_bias={"3": 1.5, "04": -2.0},
        min_p=0.25,
    )
    assert sampling.min_p == 0.25
    assert sampling.shaping == Shaping(
        frequency_penalty=0.5,
        presence_penalty=-1.0,
        repetition_penalty=1.5,
        min_new_tokens=2,
        end_tokens=(EOS, 9),
        bias_tokens=(3, 4),
        biases=(1.5, -2.0),
    )


def test_end_tokens_are_held_back_below_the_least_length_even_where_they_do_not_end(
    reader: ParamsReader,
) -> None:
    sampling = read(reader, min_new_tokens=2, ignore_eos=True)
    assert sampling.stop_token_ids == frozenset()
    assert sampling.shaping is not None
    assert sampling.shaping.end_tokens == (EOS,)


def test_a_grammar_is_compiled_once(reader: ParamsReader) -> None:
    first, again = (read(reader, regex="[ab]+").grammar for _ in range(2))
    assert first is not None
    assert again is first
    assert read(reader, regex="[ab]*").grammar is not first


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"max_new_tokens": -1}, "max_new_tokens must be at least 0, got -1."),
        ({"min_new_tokens": -1}, "min_new_tokens must be in [0, max_new_tokens(128)], got -1."),
        ({"min_new_tokens": 5, "max_new_tokens": 4}, "[0, max_new_tokens(4)], got 5."),
        ({"temperature": -1.0}, "temperature must be a non-negative finite number"),
        ({"top_p": 0.0}, "top_p must be in (0, 1], got 0"),
        ({"top_k": 0}, "top_k must be -1 (disable) or at least 1, got 0."),
        ({"min_p": 1.5}, "min_p must be in [0, 1], got 1.5."),
        ({"frequency_penalty": 2.5}, "frequency_penalty must be in [-2, 2], got 2.5."),
        ({"presence_penalty": -2.5}, "presence_penalty must be in [-2, 2], got -2.5."),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be in (0, 2]"),
        ({"logit_bias": {str(VOCAB_SIZE): 1.0}}, f"keys in [0, {VOCAB_SIZE - 1}], got 96."),
        ({"logit_bias": {"-1": 1.0}}, "got -1."),
        ({"stop": ["x"] * 33}, "at most 32 stop strings are allowed"),
        ({"stop_regex": "((("}, "invalid stop_regex '((('"),
        ({"stop_regex": "a" * 257}, "stop_regex is over the 256-byte limit"),
        ({"regex": "(((\n"}, "Failed to compile regex grammar: "),
        ({"ebnf": "root = x"}, "Failed to compile ebnf grammar: "),
        ({"json_schema": '{"type": "nope"}'}, "Failed to compile json grammar: "),
        ({"json_schema": "{nope"}, "Failed to compile json grammar: "),
        ({"regex": "a", "ebnf": 'root ::= "a"'}, "Only one of json_schema, regex, ebnf"),
        ({"structural_tag": "{}"}, "structural_tag is not run by the embedded engine"),
        ({"custom_params": {"a": 1}}, "custom_params is not run by the embedded engine"),
    ],
)
def test_what_means_nothing_is_refused_in_one_line(
    reader: ParamsReader, params: dict[str, Any], says: str
) -> None:
    with pytest.raises(EngineRefused) as refused:
        read(reader, **params)
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("params", [{"stop": "x"}, {"stop_regex": "x"}, {"regex": "x"}])
def test_what_needs_a_tokenizer_is_refused_without_one(
    model: Model, params: dict[str, Any]
) -> None:
    with pytest.raises(EngineRefused, match="need a tokenizer, and the model folder has none"):
        read(ParamsReader(model.architecture, None, seed=0), **params)
