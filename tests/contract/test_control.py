"""The contract of control: aborts, pauses, flushes and weight updates around running requests."""

import asyncio

import httpx
import pytest

from tests.contract.engines import LONG, WAIT_S, EngineUnderContract, Json

PROMPT = [11, 12, 13, 14, 15, 16, 17, 18]
GOES_ON: Json = {"max_new_tokens": 1000, "ignore_eos": True}
SHARED: Json = {"max_new_tokens": 900, "ignore_eos": True}
"""A long output of which as many as may run at once still fit in memory together."""
LATER: Json = {"max_new_tokens": 200, "ignore_eos": True}


async def cut_short(engine: EngineUnderContract, order: str, **body: object) -> list[Json]:
    """Give `order` during a long stream; return the stream's events."""
    events: list[Json] = []
    async with engine.streaming(
        PROMPT, sampling_params=LONG, rid="long", return_logprob=True
    ) as stream:
        async for event in stream:
            if not events:
                response = await engine.post(order, **body)
                assert response.status_code == 200
            events.append(event)
    return events


async def test_an_aborted_stream_ends_with_the_tokens_so_far(engine: EngineUnderContract) -> None:
    events = await cut_short(engine, "/abort_request", rid="long")
    meta = events[-1]["meta_info"]
    assert meta["finish_reason"]["type"] == "abort"
    assert 0 < meta["completion_tokens"] < 3000
    assert meta["output_token_logprobs_length"] == meta["completion_tokens"]
    assert meta["weight_versions"][-1]["end"] == meta["completion_tokens"]


async def test_abort_all_ends_all(engine: EngineUnderContract) -> None:
    plain = asyncio.create_task(engine.generate(PROMPT, sampling_params=LONG, rid="plain"))
    await engine.until_running(1)
    events = await cut_short(engine, "/abort_request", abort_all=True)
    assert events[-1]["meta_info"]["finish_reason"]["type"] == "abort"
    answer = await plain
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"


async def test_aborting_an_unknown_request_is_answered_and_has_no_effect(
    engine: EngineUnderContract,
) -> None:
    assert (await engine.post("/abort_request", rid="later")).status_code == 200
    answer = await engine.generate(PROMPT, rid="later")
    assert answer["meta_info"]["finish_reason"]["type"] == "length"


async def test_a_repeated_abort_ends_a_request_once(engine: EngineUnderContract) -> None:
    async with engine.streaming(PROMPT, sampling_params=LONG, rid="twice") as stream:
        await anext(stream)
        for _ in range(3):
            assert (await engine.post("/abort_request", rid="twice")).status_code == 200
        events = [event async for event in stream]
    ends = [e["meta_info"]["finish_reason"] for e in events if e["meta_info"]["finish_reason"]]
    assert [end["type"] for end in ends] == ["abort"]
    again = await engine.generate(PROMPT, rid="twice")
    assert again["meta_info"]["finish_reason"]["type"] == "length"


async def test_a_cut_generation_resumes_from_its_exact_tokens_under_another_key(
    engine: EngineUnderContract,
) -> None:
    greedy = {"max_new_tokens": 400, "temperature": 0, "ignore_eos": True}
    whole = await engine.generate(PROMPT, sampling_params=greedy, extra_key="1")
    events: list[Json] = []
    async with engine.streaming(PROMPT, sampling_params=greedy, extra_key="1", rid="cut") as stream:
        async for event in stream:
            if not events:
                await engine.post("/pause_generation", mode="abort")
                assert (await engine.post("/flush_cache")).status_code == 200
                await engine.post("/continue_generation")
            events.append(event)
    parts = events if engine.is_incremental else events[-1:]
    first = [token for event in parts for token in event["output_ids"]]
    assert events[-1]["meta_info"]["finish_reason"]["type"] == "abort"
    assert 0 < len(first) < 400
    rest = {**greedy, "max_new_tokens": 400 - len(first)}
    resumed = await engine.generate(PROMPT + first, sampling_params=rest, extra_key="2")
    assert resumed["meta_info"]["cached_tokens"] == 0
    assert first + resumed["output_ids"] == whole["output_ids"]


async def test_a_request_to_a_full_queue_gets_a_retry_answer(engine: EngineUnderContract) -> None:
    info = await engine.get("/server_info")
    held: list[asyncio.Task[httpx.Response]] = []
    for num in (info["max_running_requests"], info["max_queued_requests"]):
        asked = [
            engine.post("/generate", input_ids=PROMPT, sampling_params=SHARED) for _ in range(num)
        ]
        held += map(asyncio.create_task, asked)
        await engine.until_running(len(held))
    refused = await engine.post("/generate", input_ids=PROMPT)
    assert refused.status_code == 503
    assert refused.json()["message"] == "The request queue is full."
    async with engine.streaming(PROMPT, sampling_params=LONG) as stream:
        (event,) = [event async for event in stream]
    reason = event["meta_info"]["finish_reason"]
    assert (reason["type"], reason["status_code"]) == ("abort", 503)
    await engine.post("/abort_request", abort_all=True)
    assert {response.status_code for response in await asyncio.gather(*held)} == {200}


async def test_no_disconnect_leaves_anything_running(engine: EngineUnderContract) -> None:
    async def leave_early(number: int) -> None:
        body: Json = {"sampling_params": LONG, "rid": f"left-{number}"}
        async with engine.streaming([number, *PROMPT], **body) as stream:
            await anext(stream)

    await asyncio.gather(*(leave_early(number) for number in range(1, 17)))
    await engine.until_idle()
    again = await engine.generate(PROMPT, rid="left-3")
    assert again["meta_info"]["finish_reason"]["type"] == "length"


async def test_a_second_request_with_the_id_of_a_running_one_is_refused(
    engine: EngineUnderContract,
) -> None:
    async with engine.streaming(PROMPT, sampling_params=LONG, rid="twin") as stream:
        await anext(stream)
        response = await engine.post("/generate", input_ids=[1], rid="twin")
        assert response.status_code == 400
        assert "twin" in response.json()["error"]["message"]


async def test_a_client_that_leaves_aborts_its_request(engine: EngineUnderContract) -> None:
    async with engine.streaming(PROMPT, sampling_params=LONG) as stream:
        await anext(stream)
        assert await engine.num_running() == 1
    await engine.until_idle()
    with pytest.raises(httpx.ReadTimeout):
        await engine.client.post(
            "/generate",
            json={"input_ids": PROMPT, "sampling_params": LONG},
            timeout=httpx.Timeout(WAIT_S, read=0.3),
        )
    await engine.until_idle()


async def test_pause_abort_ends_running_requests_and_holds_new_ones(
    engine: EngineUnderContract,
) -> None:
    events = await cut_short(engine, "/pause_generation", mode="abort")
    assert events[-1]["meta_info"]["finish_reason"]["type"] == "abort"
    held = asyncio.create_task(engine.generate(PROMPT, rid="held"))
    assert (await engine.post("/flush_cache")).status_code == 200
    done, _ = await asyncio.wait([held], timeout=0.2)
    assert not done
    assert (await engine.post("/continue_generation")).status_code == 200
    assert (await held)["meta_info"]["finish_reason"]["type"] == "length"


@pytest.mark.parametrize(("mode", "retractions"), [("retract", 1), ("in_place", 0)])
async def test_a_paused_request_continues_and_its_versions_are_spans(
    engine: EngineUnderContract, mode: str, retractions: int
) -> None:
    before = (await engine.get("/model_info"))["weight_version"]
    events: list[Json] = []
    async with engine.streaming(PROMPT, sampling_params=GOES_ON) as stream:
        events.append(await anext(stream))
        assert (await engine.post("/pause_generation", mode=mode)).status_code == 200
        flushed = (await engine.post("/flush_cache")).status_code
        updated = await engine.post(
            "/update_weights_from_disk",
            model_path=engine.model_path,
            weight_version=f"{before}+",
            flush_cache=mode == "retract",
        )
        assert updated.json()["success"] is True
        assert (await engine.post("/continue_generation")).status_code == 200
        events += [event async for event in stream]
    assert flushed == (200 if mode == "retract" else 400)
    meta = events[-1]["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "length": 1000}
    assert meta["num_retractions"] == retractions
    first, second = meta["weight_versions"]
    assert (first["version"], first["start"]) == (before, 0)
    assert (second["version"], second["end"]) == (f"{before}+", 1000)
    assert first["end"] == second["start"] > 0
    assert meta["weight_version"] == f"{before}+"


async def test_flush_is_refused_while_requests_run(engine: EngineUnderContract) -> None:
    async with engine.streaming(PROMPT, sampling_params=LONG) as stream:
        await anext(stream)
        assert (await engine.post("/flush_cache")).status_code == 400


async def test_flush_forgets_prefixes(engine: EngineUnderContract) -> None:
    await engine.generate(PROMPT)
    assert (await engine.post("/flush_cache")).status_code == 200
    assert (await engine.generate(PROMPT))["meta_info"]["cached_tokens"] == 0


async def test_an_update_names_the_weights_and_forgets_prefixes(
    engine: EngineUnderContract,
) -> None:
    await engine.generate(PROMPT)
    updated = await engine.post(
        "/update_weights_from_disk", model_path=engine.model_path, weight_version="41"
    )
    assert updated.status_code == 200
    assert updated.json()["success"] is True
    info = await engine.get("/model_info")
    assert (info["weight_version"], info["model_path"]) == ("41", engine.model_path)
    meta = (await engine.generate(PROMPT))["meta_info"]
    assert (meta["weight_version"], meta["cached_tokens"]) == ("41", 0)
    again = await engine.post("/update_weights_from_disk", model_path=engine.model_path)
    assert again.json()["success"] is True
    assert (await engine.get("/model_info"))["weight_version"] == "41"


async def test_a_busy_engine_updates_after_its_running_requests(
    engine: EngineUnderContract,
) -> None:
    before = (await engine.get("/model_info"))["weight_version"]
    async with engine.streaming(PROMPT, sampling_params=LATER) as stream:
        await anext(stream)
        updating = asyncio.create_task(
            engine.post(
                "/update_weights_from_disk", model_path=engine.model_path, weight_version="51"
            )
        )
        events = [event async for event in stream]
    assert (await updating).json()["success"] is True
    spans = events[-1]["meta_info"]["weight_versions"]
    assert spans == [{"version": before, "start": 0, "end": 200}]
    assert (await engine.generate(PROMPT))["meta_info"]["weight_version"] == "51"


async def test_an_update_may_abort_running_requests(engine: EngineUnderContract) -> None:
    events = await cut_short(
        engine,
        "/update_weights_from_disk",
        model_path=engine.model_path,
        weight_version="61",
        abort_all_requests=True,
    )
    assert events[-1]["meta_info"]["finish_reason"]["type"] == "abort"
    assert (await engine.get("/model_info"))["weight_version"] == "61"


async def test_an_update_from_an_invalid_folder_is_refused_and_the_engine_survives(
    engine: EngineUnderContract,
) -> None:
    before = await engine.get("/model_info")
    refused = await engine.post(
        "/update_weights_from_disk", model_path="/no/such/model", weight_version="x"
    )
    assert refused.status_code == 400
    assert refused.json()["success"] is False
    assert refused.json()["message"]
    assert (await engine.post("/update_weights_from_disk")).status_code == 400
    assert await engine.get("/model_info") == before
    await engine.generate(PROMPT)


async def test_a_pause_may_be_repeated_and_a_continue_needs_no_pause(
    engine: EngineUnderContract,
) -> None:
    for order in ("/pause_generation", "/pause_generation", "/continue_generation"):
        assert (await engine.post(order)).status_code == 200
    assert (await engine.post("/continue_generation")).status_code == 200
    assert (await engine.post("/pause_generation", mode="no_such")).status_code == 400
    await engine.generate(PROMPT)
