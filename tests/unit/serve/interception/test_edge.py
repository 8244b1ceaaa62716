"""Routes, keys and limits, over a real socket."""

from collections.abc import AsyncIterator

import pytest

from rollmesh.core.config import InterceptionConfig
from tests.unit.serve.interception.conftest import MakeDesk

ASK = {"messages": [{"role": "user", "content": "guess"}]}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/a/b/v1/chat/completions?x=1"])
async def test_any_prefix_may_stand_before_v1(make_desk: MakeDesk, path: str) -> None:
    desk = await make_desk("4")
    status, answer = await desk.answer(ASK, path)
    assert status == 200
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "4"}


async def test_the_path_secret_opens_the_session_without_a_key(make_desk: MakeDesk) -> None:
    desk = await make_desk("4")
    path = f"/s/{desk.opened.path_secret}/v1/chat/completions"
    status, _ = await desk.answer(ASK, path, Authorization="Bearer sk-whatever")
    assert status == 200


async def test_a_wrong_key_is_401_in_openais_shape(make_desk: MakeDesk) -> None:
    desk = await make_desk("4")
    status, answer = await desk.answer(ASK, Authorization="Bearer sk-wrong")
    assert status == 401
    assert answer["error"]["code"] == "invalid_api_key"
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert desk.runtime.num_calls == 0


async def test_the_model_is_listed_for_who_has_a_key(make_desk: MakeDesk) -> None:
    desk = await make_desk()
    key = {"x-api-key": desk.opened.api_key}
    async with desk.client.get(desk.base + "/v1/models", headers=key) as response:
        assert (await response.json())["data"][0]["id"] == "policy"
    async with desk.client.get(desk.base + "/v1/models") as response:
        assert response.status == 401


async def test_health_needs_no_key_and_other_routes_are_404(make_desk: MakeDesk) -> None:
    desk = await make_desk()
    async with desk.client.get(desk.base + "/healthz") as response:
        assert response.status == 200
    status, answer = await desk.answer(ASK, "/v1/embeddings")
    assert status == 404
    assert "POST /v1/chat/completions" in answer["error"]["message"]


async def test_a_body_over_the_limit_is_413_before_it_is_read(make_desk: MakeDesk) -> None:
    desk = await make_desk(config=InterceptionConfig(max_body_bytes=1000))
    status, answer = await desk.answer(b"x" * 1001)
    assert (status, answer["error"]["code"]) == (413, "body_too_large")

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b"x" * 100

    key = {"x-api-key": desk.opened.api_key}
    url = desk.base + "/v1/chat/completions"
    async with desk.client.post(url, data=chunks(), headers=key) as response:
        assert response.status == 413
