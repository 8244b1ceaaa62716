"""Bodies of /generate: SGLang's fields and defaults, and one line for everything wrong."""

import json
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from rollmesh.core.errors import EngineRefused
from rollmesh.engine.embedded.asks import AskDecoder, Asks
from rollmesh.engine.embedded.model import Model
from rollmesh.engine.embedded.params import ParamsReader
from tests.unit.engine.embedded.tiny_models import EOS, VOCAB_SIZE

PROMPT = [1, 2, 3]


@pytest.fixture
def decoder(model: Model) -> AskDecoder:
    return new_decoder(model)


def new_decoder(model: Model, seed: int = 0, tokenizer: Tokenizer | None = None) -> AskDecoder:
    params = ParamsReader(model.architecture, tokenizer, seed)
    return AskDecoder(model.architecture, 1024, params)


def decode(decoder: AskDecoder, **body: Any) -> Asks:
    return decoder.decode(decoder.read(json.dumps(body).encode()))


def test_a_bare_prompt_gets_sglangs_defaults(decoder: AskDecoder) -> None:
    asks = decode(decoder, input_ids=PROMPT)
    (ask,) = asks.asks
    sampling = ask.request.sampling
    assert not asks.is_list
    assert not asks.streams
    assert not ask.wants_logprobs
    assert ask.request.tokens[:3].tolist() == PROMPT
    assert (sampling.max_new_tokens, sampling.temperature, sampling.top_p) == (128, 1.0, 1.0)
    assert sampling.stop_token_ids == {EOS}
    assert ask.request.logprob_start is None


def test_fields_reach_the_request(decoder: AskDecoder) -> None:
    params = {
        "max_new_tokens": 5,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 4,
        "stop_token_ids": [9],
        "sampling_seed": -3,
    }
    asks = decode(
        decoder,
        input_ids=PROMPT,
        sampling_params=params,
        rid="mine",
        extra_key="v1",
        return_logprob=True,
        logprob_start_len=0,
        stream=True,
    )
    request = asks.asks[0].request
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 4)
    assert (sampling.max_new_tokens, sampling.seed) == (5, -3)
    assert sampling.stop_token_ids == {9, EOS}
    assert (request.rid, request.extra_key, request.logprob_start) == ("mine", "v1", 0)
    assert asks.streams
    assert request.streams


def test_ignore_eos_ignores_all_stop_tokens_as_sglang_does(decoder: AskDecoder) -> None:
    params = {"ignore_eos": True, "stop_token_ids": [9]}
    request = decode(decoder, input_ids=PROMPT, sampling_params=params).asks[0].request
    assert request.sampling.stop_token_ids == frozenset()


def test_a_prompt_is_scored_only_with_logprobs_and_a_start(decoder: AskDecoder) -> None:
    def start(**body: Any) -> int | None:
        return decode(decoder, input_ids=PROMPT, **body).asks[0].request.logprob_start

    assert start(logprob_start_len=0) is None
    assert start(return_logprob=True) is None
    assert start(return_logprob=True, logprob_start_len=-1) is None
    assert start(return_logprob=True, logprob_start_len=2) == 2


def test_a_list_of_prompts_takes_values_for_each_or_for_all(decoder: AskDecoder) -> None:
    asks = decode(
        decoder,
        input_ids=[[1], [2, 3]],
        sampling_params=[{"max_new_tokens": 1}, {"max_new_tokens": 2}],
        rid="r",
        extra_key="v",
        return_logprob=[True, False],
    )
    assert asks.is_list
    assert [ask.request.rid for ask in asks.asks] == ["r_0", "r_1"]
    assert [ask.request.sampling.max_new_tokens for ask in asks.asks] == [1, 2]
    assert [ask.request.extra_key for ask in asks.asks] == ["v", "v"]
    assert [ask.wants_logprobs for ask in asks.asks] == [True, False]
    named = decode(decoder, input_ids=[[1]], rid=["x"])
    assert named.is_list
    assert named.asks[0].request.rid == "x"


def test_text_is_encoded_where_there_is_a_tokenizer(decoder: AskDecoder) -> None:
    def encode(text: str) -> list[int]:
        return [ord(letter) - ord("a") for letter in text]

    asks = decoder.decode(decoder.read(b'{"text": ["ab", "c"]}'), encode)
    assert [ask.request.tokens[: ask.request.num_tokens].tolist() for ask in asks.asks] == [
        [0, 1],
        [2],
    ]
    with pytest.raises(EngineRefused, match="input_ids should be provided"):
        decode(decoder, text="ab")


def test_n_outputs_follow_each_prompt_and_answer_a_list(decoder: AskDecoder) -> None:
    params = {"n": 2, "sampling_seed": 5, "max_new_tokens": 1}
    alone = decode(decoder, input_ids=PROMPT, sampling_params=params, rid="mine")
    assert alone.is_list
    assert [ask.request.sampling.seed for ask in alone.asks] == [5, 6]
    rids = {ask.request.rid for ask in alone.asks}
    assert len(rids) == 2
    assert "mine" not in rids
    several = decode(decoder, input_ids=[[1], [2, 3]], sampling_params=params, rid=["a", "b"])
    assert [ask.request.num_prompt_tokens for ask in several.asks] == [1, 1, 2, 2]
    for nothing in (0, None):
        once = decode(decoder, input_ids=PROMPT, sampling_params={"n": nothing}, rid="mine")
        assert not once.is_list
        assert once.asks[0].request.rid == "mine"


def test_likeliest_tokens_are_told_beside_logprobs_alone(decoder: AskDecoder) -> None:
    def num_top(**body: Any) -> list[int]:
        asks = decode(decoder, input_ids=[[1], [2]], top_logprobs_num=[3, 0], **body).asks
        return [ask.request.num_top for ask in asks]

    assert num_top(return_logprob=True) == [3, 0]
    assert num_top() == [0, 0]
    for wrong in (-1, VOCAB_SIZE + 1):  # the latter ends a real SGLang
        with pytest.raises(EngineRefused, match="top_logprobs_num must be in"):
            decode(decoder, input_ids=PROMPT, return_logprob=True, top_logprobs_num=wrong)


def test_unseeded_requests_differ_and_a_seeded_server_repeats_itself(model: Model) -> None:
    def seeds() -> list[int]:
        decoder = new_decoder(model, seed=5)
        asks = decode(decoder, input_ids=[[1]] * 4, sampling_params={"max_new_tokens": 1}).asks
        return [ask.request.sampling.seed for ask in asks]

    assert len(set(seeds())) == 4
    assert seeds() == seeds()


@pytest.mark.parametrize(
    ("body", "says"),
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
    decoder: AskDecoder, body: dict[str, Any], says: str
) -> None:
    with pytest.raises(EngineRefused) as refused:
        decode(decoder, **body)
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"max_new_tokens": 254}, "exceeds the model's maximum context length of 256"),
        ({"temperature": "x"}, "Expected `float | null`, got `str`"),
        ({"seed": 1}, "unknown field `seed`"),
        ({"json_schema": {"type": "object"}}, "Expected `str | null`, got `object`"),
        ({"logit_bias": [1]}, "Expected `object | null`, got `array`"),
        ({"sampling_seed": 2**63}, "sampling_seed"),
    ],
)
def test_wrong_sampling_is_refused_in_one_line(
    decoder: AskDecoder, params: dict[str, Any], says: str
) -> None:
    with pytest.raises(EngineRefused) as refused:
        decode(decoder, input_ids=PROMPT, sampling_params=params)
    assert says in str(refused.value)


def test_fields_that_ask_for_nothing_pass(decoder: AskDecoder) -> None:
    params: dict[str, Any] = {
        "stop": [],
        "regex": None,
        "min_p": 0,
        "n": 1,
        "repetition_penalty": 1,
    }
    asks = decode(decoder, input_ids=PROMPT, sampling_params=params, top_logprobs_num=0, zzz=1)
    np.testing.assert_array_equal(asks.asks[0].request.tokens[:3], PROMPT)


def test_without_a_limit_a_request_may_fill_the_context(decoder: AskDecoder) -> None:
    params = {"max_new_tokens": None}
    request = decode(decoder, input_ids=PROMPT, sampling_params=params).asks[0].request
    assert request.sampling.max_new_tokens == 253
