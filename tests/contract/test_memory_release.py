"""The contract of memory: released and resumed, with weights loaded afterwards.

SGLang without --enable-memory-saver, as on a CPU, answers the same and keeps its memory; these
tests pass with and without it.
"""

import asyncio

from tests.contract.engines import EngineUnderContract, Json

PROMPT = [11, 12, 13, 14, 15, 16, 17, 18]
GREEDY: Json = {"max_new_tokens": 24, "temperature": 0, "ignore_eos": True}


async def load(engine: EngineUnderContract, name: str) -> None:
    """Load the weights of the start, under that name."""
    response = await engine.post(
        "/update_weights_from_disk", model_path=engine.model_path, weight_version=name
    )
    assert response.json()["success"], response.text


async def test_an_engine_that_released_its_memory_samples_the_same_after_a_load(
    engine: EngineUnderContract,
) -> None:
    before = await engine.generate(PROMPT, sampling_params=GREEDY)
    called = (await engine.get("/model_info"))["weight_version"]
    assert (await engine.post("/pause_generation", mode="abort")).status_code == 200
    assert (await engine.post("/flush_cache")).status_code == 200
    assert (await engine.post("/release_memory_occupation")).status_code == 200
    asked = asyncio.create_task(engine.generate(PROMPT, sampling_params=GREEDY))
    renamed = await engine.post(
        "/update_weight_version", new_version="released-7", abort_all_requests=False
    )
    assert renamed.json()["success"]
    assert (await engine.get("/model_info"))["weight_version"] == "released-7"
    assert not asked.done()
    assert (await engine.post("/resume_memory_occupation")).status_code == 200
    await load(engine, called)
    assert (await engine.post("/continue_generation")).status_code == 200
    assert (await asked)["output_ids"] == before["output_ids"]
    assert (await engine.get("/model_info"))["weight_version"] == called


async def test_requests_without_weights_wait_for_them(
    engine: EngineUnderContract,
) -> None:
    info = await engine.get("/server_info")
    if "memory_occupation" not in info:
        return  # SGLang without its memory saver has its weights all the time
    called = (await engine.get("/model_info"))["weight_version"]
    for _ in range(2):
        assert (await engine.post("/release_memory_occupation")).status_code == 200
    assert (await engine.get("/server_info"))["memory_occupation"] == "released"
    asked = asyncio.create_task(engine.generate(PROMPT, sampling_params=GREEDY))
    refused = await engine.post("/update_weights_from_disk", model_path=engine.model_path)
    assert "released" in refused.json()["message"]
    assert (await engine.post("/resume_memory_occupation")).status_code == 200
    assert (await engine.get("/server_info"))["memory_occupation"] == "bare"
    assert not asked.done()
    await load(engine, called)
    assert len((await asked)["output_ids"]) == 24
