"""Parsing and refusing bodies of /generate and their sampling parameters."""

import json
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from rollmesh.core.errors import EngineRefused
from rollmesh.engine.embedded.model import Model
from rollmesh.engine.embedded.request import Sampling
from rollmesh.engine.embedded.request_parser import (
    ParsedBody,
    RequestParser,
    SamplingBody,
    SamplingParser,
)
from rollmesh.engine.embedded.shaping import Shaping
from tests.unit.engine.embedded.tiny_models import EOS, VOCAB_SIZE


@pytest.fixture
def reader(model: Model, letters: Tokenizer) -> SamplingParser:
    return SamplingParser(model.architecture, letters, seed=0)


def read(reader: SamplingParser, **params: Any) -> Sampling:
    return reader.read(SamplingBody(**params), 8, 0)


def test_neutral_parameters_change_no_logits(reader: SamplingParser) -> None:
    sampling = read(reader)
    assert (sampling.shaping, sampling.grammar, sampling.stop) == (None, None, None)
    nothing = {"frequency_penalty": 0.0, "repetition_penalty": 1.0, "logit_bias": {}, "regex": ""}
    assert read(reader, **nothing).shaping is None
    assert read(reader, **nothing).grammar is None


def test_penalties_and_biases_reach_the_logits(reader: SamplingParser) -> None:
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


def test_end_tokens_are_forbidden_below_the_least_length_even_if_ignored(
    reader: SamplingParser,
) -> None:
    sampling = read(reader, min_new_tokens=2, ignore_eos=True)
    assert sampling.stop_token_ids == frozenset()
    assert sampling.shaping is not None
    assert sampling.shaping.end_tokens == (EOS,)


def test_a_grammar_is_compiled_once(reader: SamplingParser) -> None:
    first, again = (read(reader, regex="[ab]+").grammar for _ in range(2))
    assert first is not None
    assert again is first
    assert read(reader, regex="[ab]*").grammar is not first


@pytest.mark.parametrize(
    ("params", "error_text"),
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
def test_invalid_sampling_parameters_are_refused_in_one_line(
    reader: SamplingParser, params: dict[str, Any], error_text: str
) -> None:
    with pytest.raises(EngineRefused) as refused:
        read(reader, **params)
    assert error_text in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("params", [{"stop": "x"}, {"stop_regex": "x"}, {"regex": "x"}])
def test_parameters_that_need_a_tokenizer_are_refused_without_one(
    model: Model, params: dict[str, Any]
) -> None:
    with pytest.raises(EngineRefused, match="need a tokenizer, and the model folder has none"):
        read(SamplingParser(model.architecture, None, seed=0), **params)


PROMPT = [1, 2, 3]


@pytest.fixture
def parser(model: Model) -> RequestParser:
    return new_parser(model)


def new_parser(model: Model, seed: int = 0, tokenizer: Tokenizer | None = None) -> RequestParser:
    params = SamplingParser(model.architecture, tokenizer, seed)
    return RequestParser(model.architecture, 1024, params)


def decode(parser: RequestParser, **body: Any) -> ParsedBody:
    return parser.decode(parser.read(json.dumps(body).encode()))


def test_a_bare_prompt_gets_sglangs_defaults(parser: RequestParser) -> None:
    requests = decode(parser, input_ids=PROMPT)
    (ask,) = requests.requests
    sampling = ask.request.sampling
    assert not requests.is_list
    assert not requests.streams
    assert not ask.wants_logprobs
    assert ask.request.tokens[:3].tolist() == PROMPT
    assert (sampling.max_new_tokens, sampling.temperature, sampling.top_p) == (128, 1.0, 1.0)
    assert sampling.stop_token_ids == {EOS}
    assert ask.request.logprob_start is None


def test_fields_reach_the_request(parser: RequestParser) -> None:
    params = {
        "max_new_tokens": 5,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 4,
        "stop_token_ids": [9],
        "sampling_seed": -3,
    }
    requests = decode(
        parser,
        input_ids=PROMPT,
        sampling_params=params,
        rid="mine",
        extra_key="v1",
        return_logprob=True,
        logprob_start_len=0,
        stream=True,
    )
    request = requests.requests[0].request
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 4)
    assert (sampling.max_new_tokens, sampling.seed) == (5, -3)
    assert sampling.stop_token_ids == {9, EOS}
    assert (request.rid, request.extra_key, request.logprob_start) == ("mine", "v1", 0)
    assert requests.streams
    assert request.streams


def test_ignore_eos_ignores_all_stop_tokens_as_sglang_does(parser: RequestParser) -> None:
    params = {"ignore_eos": True, "stop_token_ids": [9]}
    request = decode(parser, input_ids=PROMPT, sampling_params=params).requests[0].request
    assert request.sampling.stop_token_ids == frozenset()


def test_a_prompt_is_scored_only_with_logprobs_and_a_start(parser: RequestParser) -> None:
    def start(**body: Any) -> int | None:
        return decode(parser, input_ids=PROMPT, **body).requests[0].request.logprob_start

    assert start(logprob_start_len=0) is None
    assert start(return_logprob=True) is None
    assert start(return_logprob=True, logprob_start_len=-1) is None
    assert start(return_logprob=True, logprob_start_len=2) == 2


def test_a_list_of_prompts_takes_values_for_each_or_for_all(parser: RequestParser) -> None:
    requests = decode(
        parser,
        input_ids=[[1], [2, 3]],
        sampling_params=[{"max_new_tokens": 1}, {"max_new_tokens": 2}],
        rid="r",
        extra_key="v",
        return_logprob=[True, False],
    )
    assert requests.is_list
    assert [ask.request.rid for ask in requests.requests] == ["r_0", "r_1"]
    assert [ask.request.sampling.max_new_tokens for ask in requests.requests] == [1, 2]
    assert [ask.request.extra_key for ask in requests.requests] == ["v", "v"]
    assert [ask.wants_logprobs for ask in requests.requests] == [True, False]
    named = decode(parser, input_ids=[[1]], rid=["x"])
    assert named.is_list
    assert named.requests[0].request.rid == "x"


def test_text_is_encoded_where_there_is_a_tokenizer(parser: RequestParser) -> None:
    def encode(text: str) -> list[int]:
        return [ord(letter) - ord("a") for letter in text]

    requests = parser.decode(parser.read(b'{"text": ["ab", "c"]}'), encode)
    assert [ask.request.tokens[: ask.request.num_tokens].tolist() for ask in requests.requests] == [
        [0, 1],
        [2],
    ]
    with pytest.raises(EngineRefused, match="input_ids should be provided"):
        decode(parser, text="ab")


def test_n_outputs_follow_each_prompt_and_answer_a_list(parser: RequestParser) -> None:
    params = {"n": 2, "sampling_seed": 5, "max_new_tokens": 1}
    alone = decode(parser, input_ids=PROMPT, sampling_params=params, rid="mine")
    assert alone.is_list
    assert [ask.request.sampling.seed for ask in alone.requests] == [5, 6]
    rids = {ask.request.rid for ask in alone.requests}
    assert len(rids) == 2
    assert "mine" not in rids
    several = decode(parser, input_ids=[[1], [2, 3]], sampling_params=params, rid=["a", "b"])
    assert [ask.request.num_prompt_tokens for ask in several.requests] == [1, 1, 2, 2]
    for nothing in (0, None):
        once = decode(parser, input_ids=PROMPT, sampling_params={"n": nothing}, rid="mine")
        assert not once.is_list
        assert once.requests[0].request.rid == "mine"


def test_likeliest_tokens_are_reported_only_with_logprobs(parser: RequestParser) -> None:
    def num_top(**body: Any) -> list[int]:
        requests = decode(parser, input_ids=[[1], [2]], top_logprobs_num=[3, 0], **body).requests
        return [ask.request.num_top for ask in requests]

    assert num_top(return_logprob=True) == [3, 0]
    assert num_top() == [0, 0]
    for wrong in (-1, VOCAB_SIZE + 1):  # the latter crashes a real SGLang
        with pytest.raises(EngineRefused, match="top_logprobs_num must be in"):
            decode(parser, input_ids=PROMPT, return_logprob=True, top_logprobs_num=wrong)


def test_unseeded_requests_differ_and_a_seeded_server_repeats_itself(model: Model) -> None:
    def seeds() -> list[int]:
        parser = new_parser(model, seed=5)
        requests = decode(
            parser, input_ids=[[1]] * 4, sampling_params={"max_new_tokens": 1}
        ).requests
        return [ask.request.sampling.seed for ask in requests]

    assert len(set(seeds())) == 4
    assert seeds() == seeds()


@pytest.mark.parametrize(
    ("body", "error_text"),
    [
        ({}, "input_ids should be provided"),
        ({"input_ids": []}, "input_ids cannot be empty"),
        ({"input_ids": [[]]}, "input_ids cannot be empty"),
        ({"input_ids": [[1], 2]}, "list of token ids"),
        ({"input_ids": "abc"}, "Expected `array | null`, got `str` - at `$.input_ids`"),
        ({"input_ids": [1, VOCAB_SIZE]}, f"token id {VOCAB_SIZE} is not in the vocabulary"),
        ({"input_ids": [-1]}, "token id -1 is not in the vocabulary"),
        ({"input_ids": [2**62]}, "is not in the vocabulary"),
        ({"input_ids": [1] * 256}, "longer than the model's context length"),
        ({"input_ids": [1], "rid": ["a", "b"]}, "a list of values needs a list"),
        ({"input_ids": [[1], [2]], "rid": ["a"]}, "a list of values needs a list"),
        ({"input_ids": [1], "lora_path": "x"}, "LoRA adapter that has never been loaded: x"),
    ],
)
def test_wrong_bodies_are_refused_in_one_line(
    parser: RequestParser, body: dict[str, Any], error_text: str
) -> None:
    with pytest.raises(EngineRefused) as refused:
        decode(parser, **body)
    assert error_text in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("params", "error_text"),
    [
        ({"max_new_tokens": 254}, "exceeds the model's maximum context length of 256"),
        ({"temperature": "x"}, "Expected `float | null`, got `str`"),
        ({"seed": 1}, "unknown field `seed`"),
        ({"json_schema": {"type": "object"}}, "Expected `str | null`, got `object`"),
        ({"logit_bias": [1]}, "Expected `object | null`, got `array`"),
        ({"sampling_seed": 2**63}, "sampling_seed"),
    ],
)
def test_invalid_sampling_fields_of_a_body_are_refused_in_one_line(
    parser: RequestParser, params: dict[str, Any], error_text: str
) -> None:
    with pytest.raises(EngineRefused) as refused:
        decode(parser, input_ids=PROMPT, sampling_params=params)
    assert error_text in str(refused.value)


def test_empty_and_unknown_fields_are_accepted(parser: RequestParser) -> None:
    params: dict[str, Any] = {
        "stop": [],
        "regex": None,
        "min_p": 0,
        "n": 1,
        "repetition_penalty": 1,
    }
    requests = decode(parser, input_ids=PROMPT, sampling_params=params, top_logprobs_num=0, zzz=1)
    np.testing.assert_array_equal(requests.requests[0].request.tokens[:3], PROMPT)


def test_without_a_limit_a_request_may_fill_the_context(parser: RequestParser) -> None:
    params = {"max_new_tokens": None}
    request = decode(parser, input_ids=PROMPT, sampling_params=params).requests[0].request
    assert request.sampling.max_new_tokens == 253
