"""The contract of sampling: allowed tokens, reported log-probs, and the end of an output.

Log-probs are compared with transformers' logits of the same tokens, for every engine.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from tests.contract.engines import EngineUnderContract, Json, logprobs_of
from tests.unit.engine.embedded.references import Reference

PROMPT = [11, 12, 13, 14, 15, 16, 17, 18]
LOOP = [11] * 4
"""A prompt after which the greedy model repeats itself."""
SPELT = 'root ::= "abcabc" "dddd"'
"""A grammar of one text, so that a test knows the output."""
TOLERANCE = 2e-3
LOGPROB_OF_NOTHING = torch.finfo(torch.float32).min

Logits = Callable[[list[int]], torch.Tensor]


@pytest.fixture(scope="session")
def references() -> dict[str, Reference]:
    return {}


@pytest.fixture
def logits(engine: EngineUnderContract, references: dict[str, Reference]) -> Logits:
    """(output tokens, vocabulary): the logits from which each output token after PROMPT was
    drawn.
    """
    path = engine.model_path
    reference = references.get(path) or references.setdefault(path, Reference(Path(path)))
    return lambda output: reference.logits([*PROMPT, *output])[len(PROMPT) - 1 : -1].clone()


@pytest.fixture
def letters(engine: EngineUnderContract) -> Tokenizer:
    return Tokenizer.from_file(f"{engine.model_path}/tokenizer.json")


def tops_of(answer: Json) -> list[list[tuple[float, int]]]:
    tops = answer["meta_info"]["output_top_logprobs"]
    return [[(logprob, token) for logprob, token, _text in top] for top in tops]


@pytest.mark.parametrize("temperature", [0, 0.5, 1.0])
async def test_the_likeliest_tokens_have_tempered_logprobs(
    engine: EngineUnderContract, logits: Logits, temperature: float
) -> None:
    params = {"max_new_tokens": 6, "temperature": temperature, "ignore_eos": True}
    answer = await engine.generate(
        PROMPT, sampling_params=params, return_logprob=True, top_logprobs_num=3
    )
    output = answer["output_ids"]
    logprobs_TV = (logits(output) / (temperature or 1.0)).log_softmax(-1)
    values, ids = logprobs_TV.topk(3)
    tops = tops_of(answer)
    assert [[token for _, token in top] for top in tops] == ids.tolist()
    found = torch.tensor([[logprob for logprob, _ in top] for top in tops])
    assert torch.allclose(found, values, atol=TOLERANCE)
    picked = logprobs_TV.gather(1, torch.tensor(output).unsqueeze(1)).squeeze(1)
    assert logprobs_of(answer) == pytest.approx(picked.tolist(), abs=TOLERANCE)


async def test_the_likeliest_tokens_need_logprobs_and_match_the_tokens_of_a_stream(
    engine: EngineUnderContract,
) -> None:
    params = {"max_new_tokens": 5, "temperature": 0, "ignore_eos": True}
    silent = await engine.generate(PROMPT, sampling_params=params, top_logprobs_num=2)
    assert "output_top_logprobs" not in silent["meta_info"]
    body = {"sampling_params": params, "return_logprob": True, "top_logprobs_num": 2}
    whole = await engine.generate(PROMPT, **body)
    async with engine.streaming(PROMPT, **body) as stream:
        events = [event async for event in stream]
    for event in events:
        assert len(tops_of(event)) == len(event["output_ids"])
    parts = events if engine.is_incremental else events[-1:]
    ids = [[token for _, token in top] for event in parts for top in tops_of(event)]
    assert ids == [[token for _, token in top] for top in tops_of(whole)]


async def test_the_likeliest_tokens_of_a_scored_prompt_begin_with_none(
    engine: EngineUnderContract,
) -> None:
    answer = await engine.generate(
        PROMPT,
        sampling_params={"max_new_tokens": 0},
        return_logprob=True,
        logprob_start_len=4,
        top_logprobs_num=2,
    )
    first, *rest = answer["meta_info"]["input_top_logprobs"]
    assert first is None
    assert [len(top) for top in rest] == [2, 2, 2]


async def test_logprobs_under_a_grammar_are_normalised_over_the_allowed_tokens(
    engine: EngineUnderContract, logits: Logits, letters: Tokenizer
) -> None:
    params = {"max_new_tokens": 9, "temperature": 0.5, "regex": "[abc]d"}
    answer = await engine.generate(
        PROMPT, sampling_params=params, return_logprob=True, top_logprobs_num=4
    )
    first, second, _end = answer["output_ids"]
    allowed = letters.encode("abc").ids
    assert first in allowed
    assert [second] == letters.encode("d").ids
    expected = (logits(answer["output_ids"])[0, allowed] / 0.5).log_softmax(-1)
    top = {token: logprob for logprob, token in tops_of(answer)[0]}
    assert [top.pop(token) for token in allowed] == pytest.approx(expected.tolist(), abs=TOLERANCE)
    assert list(top.values()) == [LOGPROB_OF_NOTHING]
    assert logprobs_of(answer)[1] == pytest.approx(0.0, abs=1e-6)


async def test_a_complete_grammar_ends_with_an_end_token(
    engine: EngineUnderContract, letters: Tokenizer
) -> None:
    params = {"max_new_tokens": 40, "temperature": 1, "ebnf": SPELT}
    answer = await engine.generate(PROMPT, sampling_params=params)
    *spelt, end = answer["output_ids"]
    assert spelt == letters.encode("abcabcdddd").ids
    assert answer["text"] == "abcabcdddd"
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": end}


async def test_a_schema_gives_objects_of_it(engine: EngineUnderContract) -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}, "size": {"enum": [1, 2]}},
        "required": ["ok", "size"],
        "additionalProperties": False,
    }
    params = {"max_new_tokens": 600, "temperature": 1, "n": 8, "json_schema": json.dumps(schema)}
    answers = (await engine.post("/generate", input_ids=PROMPT, sampling_params=params)).json()
    complete = [a for a in answers if a["meta_info"]["finish_reason"]["type"] == "stop"]
    objects = [json.loads(answer["text"]) for answer in complete]
    assert objects, "blanks are free, so that one or another may take too long, but not all"
    for found in objects:
        assert set(found) == {"ok", "size"}
        assert isinstance(found["ok"], bool)
        assert found["size"] in (1, 2)


@pytest.mark.parametrize(
    ("kind", "text", "name"),
    [
        ("regex", "(((", "regex"),
        ("ebnf", "root = x", "ebnf"),
        ("json_schema", "{nope", "json"),
        ("json_schema", '{"type": "nope"}', "json"),
    ],
)
async def test_an_invalid_grammar_is_refused(
    engine: EngineUnderContract, kind: str, text: str, name: str
) -> None:
    assert f"Failed to compile {name} grammar" in await engine.refusal(PROMPT, **{kind: text})
    async with engine.streaming(PROMPT, sampling_params={kind: text}) as stream:
        (event,) = [event async for event in stream]
    reason = event["meta_info"]["finish_reason"]
    assert (reason["type"], reason["status_code"]) == ("abort", 400)
    assert f"Failed to compile {name} grammar" in reason["message"]
    await engine.until_idle()


async def test_a_bias_is_added_before_logprobs_are_taken(
    engine: EngineUnderContract, logits: Logits
) -> None:
    params = {"max_new_tokens": 4, "temperature": 1, "logit_bias": {"5": 9.0, "6": -50.0}}
    params["ignore_eos"] = True
    answer = await engine.generate(PROMPT, sampling_params=params, return_logprob=True)
    biased_TV = logits(answer["output_ids"])
    biased_TV[:, 5] += 9.0
    biased_TV[:, 6] -= 50.0
    ids = torch.tensor(answer["output_ids"]).unsqueeze(1)
    expected = biased_TV.log_softmax(-1).gather(1, ids).squeeze(1)
    assert logprobs_of(answer) == pytest.approx(expected.tolist(), abs=TOLERANCE)


async def test_no_output_ends_below_the_minimum_length(
    engine: EngineUnderContract, letters: Tokenizer
) -> None:
    end = letters.token_to_id("<|im_end|>")
    params = {"max_new_tokens": 9, "temperature": 0, "logit_bias": {str(end): 100.0}}
    assert (await engine.generate(PROMPT, sampling_params=params))["output_ids"] == [end]
    # A bias cannot raise an impossible token.
    longer = await engine.generate(PROMPT, sampling_params={**params, "min_new_tokens": 3})
    assert longer["output_ids"].index(end) == 3
    assert len(longer["output_ids"]) == 4


@pytest.mark.parametrize("penalty", ["frequency_penalty", "presence_penalty", "repetition_penalty"])
async def test_a_penalty_leads_out_of_a_loop(engine: EngineUnderContract, penalty: str) -> None:
    params = {"max_new_tokens": 100, "temperature": 0, "ignore_eos": True}
    free = await engine.generate(LOOP, sampling_params=params)
    assert len(set(free["output_ids"])) < 20
    penalised = await engine.generate(LOOP, sampling_params={**params, penalty: 2.0})
    assert len(set(penalised["output_ids"])) > 60


async def test_min_p_of_one_leaves_only_the_likeliest_token(engine: EngineUnderContract) -> None:
    params = {"max_new_tokens": 12, "ignore_eos": True}
    greedy = await engine.generate(PROMPT, sampling_params={**params, "temperature": 0})
    drawn = await engine.generate(
        PROMPT, sampling_params={**params, "temperature": 1, "min_p": 1.0}, return_logprob=True
    )
    assert drawn["output_ids"] == greedy["output_ids"]
    assert min(logprobs_of(drawn)) < -0.1, "what is cut off does not raise the rest"


@pytest.mark.parametrize(
    ("stop", "text", "spelt", "matched"),
    [
        ({"stop": "ca"}, "ab", "abca", "ca"),
        ({"stop": ["zz", "d"], "ignore_eos": True}, "abcabc", "abcabcd", "d"),
        ({"stop": "ca", "no_stop_trim": True}, "abca", "abca", "ca"),
        ({"stop_regex": "d+"}, "abcabcd", "abcabcd", "d+"),
    ],
)
async def test_a_stop_string_ends_the_output_and_is_cut_from_its_text(
    engine: EngineUnderContract,
    letters: Tokenizer,
    stop: Json,
    text: str,
    spelt: str,
    matched: str,
) -> None:
    params = {"max_new_tokens": 30, "temperature": 0, "ebnf": SPELT, **stop}
    answer = await engine.generate(PROMPT, sampling_params=params)
    assert answer["text"] == text
    assert answer["output_ids"] == letters.encode(spelt).ids
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": matched}
    async with engine.streaming(PROMPT, sampling_params=params) as stream:
        events = [event async for event in stream]
    parts = events if engine.is_incremental else events[-1:]
    assert "".join(event["text"] for event in parts) == text
    assert [token for event in parts for token in event["output_ids"]] == answer["output_ids"]


async def test_a_stream_never_shows_the_beginning_of_its_stop_string(
    engine: EngineUnderContract, letters: Tokenizer
) -> None:
    params = {"max_new_tokens": 30, "temperature": 0, "ebnf": SPELT, "stop": "cabcdd"}
    async with engine.streaming(PROMPT, sampling_params=params) as stream:
        *early, last = [event async for event in stream]
    shown = "".join(event["text"] for event in early) if engine.is_incremental else ""
    assert shown in ("", "a", "ab")
    assert all("c" not in event["text"] for event in [*early, last])
    assert last["meta_info"]["completion_tokens"] == len(letters.encode("abcabcdd").ids)


async def test_n_outputs_are_a_list_prompt_by_prompt(engine: EngineUnderContract) -> None:
    params = {"max_new_tokens": 3, "temperature": 1, "n": 2, "ignore_eos": True}
    response = await engine.post(
        "/generate", input_ids=[PROMPT, PROMPT[:3]], sampling_params=params, rid=["x", "y"]
    )
    answers = response.json()
    assert [answer["meta_info"]["prompt_tokens"] for answer in answers] == [8, 8, 3, 3]
    assert len({answer["meta_info"]["id"] for answer in answers}) == 4
    async with engine.streaming(PROMPT, sampling_params=params) as stream:
        events = [event async for event in stream]
    assert {event["index"] for event in events} == {0, 1}
    ended = [event for event in events if event["meta_info"]["finish_reason"]]
    assert sorted(event["index"] for event in ended) == [0, 1]


async def test_a_seed_is_accepted(engine: EngineUnderContract) -> None:
    # SGLang uses it only with --enable-deterministic-inference; test_embedded.py has the rest.
    params = {"max_new_tokens": 3, "temperature": 1, "sampling_seed": -(2**63)}
    answer = await engine.generate(PROMPT, sampling_params=params)
    assert answer["meta_info"]["completion_tokens"] > 0


async def test_an_unknown_sampling_field_is_refused(engine: EngineUnderContract) -> None:
    response = await engine.post("/generate", input_ids=PROMPT, sampling_params={"seed": 1})
    assert response.status_code in (400, 500), "SGLang has 500; see docs/reference/engine.md"
    assert (await engine.generate(PROMPT))["meta_info"]["completion_tokens"] == 4
