"""The contract of the information that an engine reports."""

from tests.contract.engines import LONG, EngineUnderContract


async def test_model_info_names_model_and_weights(engine: EngineUnderContract) -> None:
    info = await engine.get("/model_info")
    assert info["is_generation"] is True
    assert isinstance(info["weight_version"], str)
    assert info["model_path"]
    assert info["served_model_name"]
    assert await engine.get("/get_model_info") == info


async def test_server_info_has_the_stream_form(engine: EngineUnderContract) -> None:
    info = await engine.get("/server_info")
    assert isinstance(info["incremental_streaming_output"], bool)
    assert isinstance(info["random_seed"], int)
    assert info["version"]
    again = await engine.get("/get_server_info")
    assert again["incremental_streaming_output"] == info["incremental_streaming_output"]


async def test_loads_count_running_requests(engine: EngineUnderContract) -> None:
    (idle,) = (await engine.get("/v1/loads"))["loads"]
    assert (idle["num_running_reqs"], idle["num_waiting_reqs"]) == (0, 0)
    assert idle["max_total_num_tokens"] > 0
    async with engine.streaming([1, 2, 3], sampling_params=LONG) as stream:
        await anext(stream)
        (busy,) = (await engine.get("/v1/loads"))["loads"]
    assert busy["num_running_reqs"] == 1


async def test_models_lists_one_model_and_its_context(engine: EngineUnderContract) -> None:
    models = await engine.get("/v1/models")
    (model,) = models["data"]
    assert models["object"] == "list"
    assert model["max_model_len"] > 0
    assert model["id"] == (await engine.get("/model_info"))["served_model_name"]


async def test_health_answers(engine: EngineUnderContract) -> None:
    for route in ("/health", "/health_generate"):
        assert (await engine.client.get(route)).status_code == 200


async def test_unknown_routes_and_methods_are_refused(engine: EngineUnderContract) -> None:
    assert (await engine.client.get("/no_such_route")).status_code == 404
    assert (await engine.client.get("/abort_request")).status_code == 405
