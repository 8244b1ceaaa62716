"""`rollmesh.Gateway` against a real gateway process."""

import asyncio
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from rollmesh import Gateway
from rollmesh.core.errors import AddressError
from rollmesh.core.process import listen
from rollmesh.core.types import Outcome
from rollmesh.testing.engine import ScriptedEngine
from tests.flow.gateway_process import next_token, sampling


async def test_a_program_opens_rewards_and_finishes_a_session(tmp_path: Path) -> None:
    async with ScriptedEngine(next_token) as engine, sampling(tmp_path, engine) as served:
        with Gateway(served.address, tmp_path / "token") as gateway:
            session = await asyncio.to_thread(gateway.open, metadata={"task": 7}, seed=5)
            opened = {"api_key": session.api_key, "base_url": session.base_url}
            body = {"messages": [{"role": "user", "content": "guess"}]}
            assert (await served.call(opened, body))[0] == 200
            await asyncio.to_thread(session.reward, 0.5)
            [state] = await asyncio.to_thread(gateway.sessions)
            assert (state["metadata"], state["reward"]) == ({"task": 7}, 0.5)
            finished = await asyncio.to_thread(session.finish, Outcome.TRUNCATED)
            assert await asyncio.to_thread(session.finish) == finished
            await asyncio.to_thread(session.delete)
            assert await asyncio.to_thread(gateway.sessions) == []
            with pytest.raises(AddressError, match=f"{session.session_id}/finish: HTTP 404: "):
                await asyncio.to_thread(session.finish)
    assert finished["outcome"] == "truncated"
    assert [sample["reward"] for sample in finished["samples"]] == [0.5]


def test_an_address_without_a_gateway_is_a_one_line_error(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret\n")
    token.chmod(0o600)
    with listen("127.0.0.1:0") as closed:
        port = closed.getsockname()[1]
    message = rf"127\.0\.0\.1:{port}: no answer \("
    with (
        Gateway(f"http://127.0.0.1:{port}", token) as gateway,
        pytest.raises(AddressError, match=message) as error,
    ):
        gateway.open()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (200, b"<html>hello</html>", "HTTP 200: not a rollmesh gateway"),
        (404, b'{"error": "no such page"}', "HTTP 404: no such page"),
        (502, b"bad gateway", "HTTP 502: not a rollmesh gateway"),
    ],
)
async def test_an_address_of_another_program_is_a_one_line_error(
    tmp_path: Path, status: int, body: bytes, message: str
) -> None:
    token = tmp_path / "token"
    token.write_text("secret\n")
    token.chmod(0o600)

    async def answer(_: web.Request) -> web.Response:
        return web.Response(status=status, body=body)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    async with TestServer(app) as server:
        with (
            Gateway(str(server.make_url("")), token) as gateway,
            pytest.raises(AddressError, match=message),
        ):
            await asyncio.to_thread(gateway.open)


def test_a_gateway_without_a_token_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ROLLMESH_ADMIN_TOKEN", raising=False)
    with pytest.raises(AddressError, match="set ROLLMESH_ADMIN_TOKEN"):
        Gateway("http://127.0.0.1:1")
