"""The contract of /generate: requests, answers and their forms."""

import asyncio
import math
from typing import Any

import pytest

from tests.contract.engines import EngineUnderContract, Json, logprobs_of

PROMPT = [11, 12, 13, 14, 15, 16, 17, 18]
GREEDY: Json = {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True}


async def test_an_answer_has_tokens_logprobs_and_versions(engine: EngineUnderContract) -> None:
    answer = await engine.generate(PROMPT, sampling_params=GREEDY, return_logprob=True, rid="mine")
    meta = answer["meta_info"]
    assert len(answer["output_ids"]) == 6
    assert isinstance(answer["text"], str)
    assert meta["id"] == "mine"
    assert meta["finish_reason"] == {"type": "length", "length": 6}
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (8, 6)
    assert meta["output_token_logprobs_length"] == 6
    assert [entry[1] for entry in meta["output_token_logprobs"]] == answer["output_ids"]
    assert all(len(entry) == 3 and entry[0] <= 0 for entry in meta["output_token_logprobs"])
    assert meta["input_token_logprobs"] == []
    serving = (await engine.get("/model_info"))["weight_version"]
    assert meta["weight_version"] == serving
    assert meta["weight_versions"] == [{"version": serving, "start": 0, "end": 6}]
    assert meta["num_retractions"] == 0


async def test_logprobs_are_returned_only_on_request(engine: EngineUnderContract) -> None:
    meta = (await engine.generate(PROMPT))["meta_info"]
    assert "output_token_logprobs" not in meta
    assert "input_token_logprobs" not in meta


async def test_greedy_sampling_repeats_itself(engine: EngineUnderContract) -> None:
    first = await engine.generate(PROMPT, sampling_params=GREEDY, return_logprob=True)
    again = await engine.generate(PROMPT, sampling_params=GREEDY, return_logprob=True)
    assert again["output_ids"] == first["output_ids"]
    assert logprobs_of(again) == pytest.approx(logprobs_of(first), abs=1e-3)


async def test_all_but_the_last_token_of_a_known_prompt_is_cached(
    engine: EngineUnderContract,
) -> None:
    first = await engine.generate(PROMPT, extra_key="k")
    assert first["meta_info"]["cached_tokens"] == 0
    again = await engine.generate(PROMPT, extra_key="k")
    assert again["meta_info"]["cached_tokens"] == 7
    longer = await engine.generate([*PROMPT, *first["output_ids"], 5, 6], extra_key="k")
    assert longer["meta_info"]["cached_tokens"] >= 8 + 3


async def test_extra_key_keeps_prefixes_apart(engine: EngineUnderContract) -> None:
    await engine.generate(PROMPT, extra_key="1")
    other = await engine.generate(PROMPT, extra_key="2")
    assert other["meta_info"]["cached_tokens"] == 0


async def test_a_stop_token_ends_the_answer_and_is_part_of_it(engine: EngineUnderContract) -> None:
    free = await engine.generate(PROMPT, sampling_params=GREEDY)
    token = free["output_ids"][2]
    params = {**GREEDY, "ignore_eos": False, "stop_token_ids": [token]}
    stopped = await engine.generate(PROMPT, sampling_params=params)
    cut = free["output_ids"].index(token) + 1
    assert stopped["output_ids"] == free["output_ids"][:cut]
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": token}


async def test_a_stop_token_wins_over_the_length(engine: EngineUnderContract) -> None:
    free = await engine.generate(PROMPT, sampling_params=GREEDY)
    token = free["output_ids"][0]
    params = {"max_new_tokens": 1, "temperature": 0, "stop_token_ids": [token]}
    stopped = await engine.generate(PROMPT, sampling_params=params)
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": token}


@pytest.mark.parametrize("start", [0, 3, 7])
async def test_a_prompt_is_scored_from_the_requested_position(
    engine: EngineUnderContract, start: int
) -> None:
    whole = await engine.generate(PROMPT, return_logprob=True, logprob_start_len=0)
    await engine.generate(PROMPT)
    scored = await engine.generate(PROMPT, return_logprob=True, logprob_start_len=start)
    entries = scored["meta_info"]["input_token_logprobs"]
    assert [entry[1] for entry in entries] == PROMPT[start:]
    assert entries[0][0] is None
    expected = [entry[0] for entry in whole["meta_info"]["input_token_logprobs"]][start + 1 :]
    assert [entry[0] for entry in entries[1:]] == pytest.approx(expected, abs=1e-3)
    assert scored["meta_info"]["cached_tokens"] <= start


async def test_a_scoring_request_samples_nothing(engine: EngineUnderContract) -> None:
    params = {"max_new_tokens": 0, "temperature": 1}
    scored = await engine.generate(
        PROMPT, sampling_params=params, return_logprob=True, logprob_start_len=0
    )
    assert scored["output_ids"] == []
    assert len(scored["meta_info"]["input_token_logprobs"]) == 8
    assert scored["meta_info"]["output_token_logprobs"] == []
    assert scored["meta_info"]["finish_reason"] == {"type": "length", "length": 0}


async def test_scoring_sampled_tokens_gives_their_recorded_logprobs(
    engine: EngineUnderContract,
) -> None:
    params = {"max_new_tokens": 12, "temperature": 1.0, "ignore_eos": True}
    answer = await engine.generate(PROMPT, sampling_params=params, return_logprob=True)
    scored = await engine.generate(
        PROMPT + answer["output_ids"],
        sampling_params={"max_new_tokens": 0},
        return_logprob=True,
        logprob_start_len=0,
    )
    entries = scored["meta_info"]["input_token_logprobs"][len(PROMPT) :]
    assert [entry[0] for entry in entries] == pytest.approx(logprobs_of(answer), abs=2e-3)


async def test_logprobs_are_tempered_and_not_renormalised_by_top_k(
    engine: EngineUnderContract,
) -> None:
    greedy = await engine.generate(PROMPT, sampling_params={"max_new_tokens": 1, "temperature": 0})
    best = greedy["output_ids"][0]
    # Not top_k 1: SGLang may take that for greedy, depending on what else is in the batch.
    seen = {}
    for temperature in (2.0, 1.0, 0.5):
        params = {"max_new_tokens": 1, "temperature": temperature, "top_k": 2}
        answers = await engine.post(
            "/generate", input_ids=[PROMPT] * 32, sampling_params=params, return_logprob=True
        )
        found = {a["output_ids"][0]: logprobs_of(a)[0] for a in answers.json()}
        assert len(found) <= 2
        assert sum(math.exp(logprob) for logprob in found.values()) < 1 - 1e-3
        seen[temperature] = found[best]
    assert seen[2.0] < seen[1.0] < seen[0.5]


@pytest.mark.parametrize("scores", [False, True])
async def test_a_stream_has_the_content_of_a_whole_answer(
    engine: EngineUnderContract, scores: bool
) -> None:
    body: Json = {"sampling_params": GREEDY, "return_logprob": True}
    if scores:
        body["logprob_start_len"] = 0
    whole = await engine.generate(PROMPT, **body)
    async with engine.streaming(PROMPT, **body) as stream:
        events = [event async for event in stream]
    *early, last = events
    assert all(event["meta_info"]["finish_reason"] is None for event in early)
    assert last["meta_info"]["finish_reason"] == whole["meta_info"]["finish_reason"]
    assert last["meta_info"]["weight_versions"] == whole["meta_info"]["weight_versions"]
    assert last["meta_info"]["completion_tokens"] == 6
    ids, logprobs, text = joined(events, engine.is_incremental)
    assert ids == whole["output_ids"]
    assert logprobs == pytest.approx(logprobs_of(whole), abs=1e-3)
    assert text == whole["text"]
    entries = last["meta_info"]["input_token_logprobs"]
    assert len(entries) == (8 if scores else 0)


def joined(events: list[Json], is_incremental: bool) -> tuple[list[int], list[float], str]:
    """Ids, log-probs and text of a stream of either form."""
    parts = events if is_incremental else events[-1:]
    return (
        [token for event in parts for token in event["output_ids"]],
        [logprob for event in parts for logprob in logprobs_of(event)],
        "".join(event["text"] for event in parts),
    )


async def test_a_list_of_prompts_is_answered_by_a_list(engine: EngineUnderContract) -> None:
    params = {"max_new_tokens": 2, "temperature": 0}
    response = await engine.post(
        "/generate", input_ids=[PROMPT, PROMPT[:3]], sampling_params=params, rid=["x", "y"]
    )
    answers = response.json()
    assert [answer["meta_info"]["id"] for answer in answers] == ["x", "y"]
    assert [answer["meta_info"]["prompt_tokens"] for answer in answers] == [8, 3]
    alone = await engine.generate(PROMPT[:3], sampling_params=params)
    assert answers[1]["output_ids"] == alone["output_ids"]
    single = await engine.post("/generate", input_ids=[PROMPT], sampling_params=params)
    assert isinstance(single.json(), list)


async def test_many_requests_at_once_are_all_answered(engine: EngineUnderContract) -> None:
    params = {"max_new_tokens": 16, "temperature": 0, "ignore_eos": True}
    alone = [await engine.generate([n, *PROMPT], sampling_params=params) for n in range(1, 25)]
    together = await asyncio.gather(
        *(engine.generate([n, *PROMPT], sampling_params=params) for n in range(1, 25))
    )
    assert [len(answer["output_ids"]) for answer in together] == [16] * 24
    equal = sum(a["output_ids"] == b["output_ids"] for a, b in zip(alone, together, strict=True))
    assert equal >= 22, "rounding may tip a greedy tie, no more"


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"input_ids": []},
        {"input_ids": [1] * 100_000},
        {"input_ids": [1], "sampling_params": {"max_new_tokens": -1}},
        {"input_ids": [1], "sampling_params": {"max_new_tokens": 10**6}},
        {"input_ids": [1], "sampling_params": {"temperature": -1}},
        {"input_ids": [1], "sampling_params": {"top_p": 0}},
        {"input_ids": [1], "sampling_params": {"top_k": 0}},
        {"input_ids": [1], "sampling_params": {"min_p": 2}},
        {"input_ids": [1], "sampling_params": {"frequency_penalty": 3}},
        {"input_ids": [1], "sampling_params": {"presence_penalty": -3}},
        {"input_ids": [1], "sampling_params": {"repetition_penalty": 0}},
        {"input_ids": [1], "sampling_params": {"logit_bias": {"9999": 1}}},
        {"input_ids": [1], "sampling_params": {"stop": ["x"] * 33}},
        {"input_ids": [1], "sampling_params": {"regex": "a", "ebnf": 'root ::= "a"'}},
    ],
)
async def test_a_wrong_request_is_refused_with_a_message(
    engine: EngineUnderContract, body: dict[str, Any]
) -> None:
    response = await engine.post("/generate", **body)
    assert response.status_code == 400
    assert response.json()["error"]["message"]


async def test_a_wrong_request_for_a_stream_gets_an_error_in_its_only_event(
    engine: EngineUnderContract,
) -> None:
    async with engine.streaming(PROMPT, sampling_params={"top_p": 0}) as stream:
        (event,) = [event async for event in stream]
    assert event["error"]["code"] == 400
    assert "top_p must be in (0, 1]" in event["error"]["message"]


async def test_a_prompt_beyond_the_context_gets_an_error_with_its_length(
    engine: EngineUnderContract,
) -> None:
    context = (await engine.get("/v1/models"))["data"][0]["max_model_len"]
    too_long = await engine.post("/generate", input_ids=[1] * context)
    assert too_long.status_code == 400
    message = too_long.json()["error"]["message"]
    assert f"longer than the model's context length ({context} tokens)" in message
    half = [1] * (context // 2)
    message = await engine.refusal(half, max_new_tokens=context)
    assert f"exceeds the model's maximum context length of {context} tokens" in message


async def test_a_body_that_does_not_parse_is_refused(engine: EngineUnderContract) -> None:
    for body in (b"{nope", b"[1]", b'{"input_ids": "abc"}', b'{"input_ids": ["a"]}'):
        response = await engine.client.post(
            "/generate", content=body, headers={"Content-Type": "application/json"}
        )
        assert response.status_code == 400


async def test_unknown_top_level_fields_are_ignored(engine: EngineUnderContract) -> None:
    answer = await engine.generate(PROMPT, no_such_field=1)
    assert answer["meta_info"]["completion_tokens"] == 4
