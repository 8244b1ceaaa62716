"""A mistake is reported before anything starts, with the name of the setting."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from rollmesh.core.config import Config, DashboardConfig, EngineConfig, ModelConfig
from rollmesh.core.errors import AddressError, ModelError
from rollmesh.core.process import http_address, listen
from rollmesh.launch.checks import check


@pytest.fixture
def model(tmp_path: Path) -> Path:
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / name).touch()
    return tmp_path


class Server(TestServer):
    """A server that answers /model_info only."""

    def __init__(self) -> None:
        app = web.Application()
        app.router.add_get("/model_info", self.model_info)
        super().__init__(app)
        self.num_asked = 0
        self.key = ""

    async def model_info(self, request: web.Request) -> web.Response:
        self.num_asked += 1
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({}, status=401)
        return web.json_response({})

    def url(self, path: str = "") -> str:
        return str(self.make_url(path))


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    server = Server()
    await server.start_server()
    yield server
    await server.close()


def config_of(model: Path | str, *urls: str) -> Config:
    return Config(model=ModelConfig(path=str(model)), engine=EngineConfig(urls=urls))


async def test_a_model_folder_and_engines_that_answer_pass(model: Path, server: Server) -> None:
    await check(config_of(model, server.url("/"), server.url()), makes_model=False)
    assert server.num_asked == 2


async def test_an_engine_gets_its_api_key_and_a_wrong_one_is_named(
    model: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.key = "abc"
    monkeypatch.setenv("ROLLMESH_ENGINE_KEY", "abc")
    await check(config_of(model, server.url()), makes_model=False)
    monkeypatch.setenv("ROLLMESH_ENGINE_KEY", "another")
    with pytest.raises(AddressError, match="refuses our API key; set ROLLMESH_ENGINE_KEY_FILE"):
        await check(config_of(model, server.url()), makes_model=False)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
async def test_an_incomplete_model_folder_is_refused(model: Path, name: str) -> None:
    (model / name).unlink()
    with pytest.raises(ModelError, match=r"model\.path = .* not a model folder: it has no"):
        await check(config_of(model), makes_model=False)


async def test_a_missing_folder_is_named_with_its_key(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"model\.path = .*/none: no such folder"):
        await check(config_of(tmp_path / "none"), makes_model=False)
    with pytest.raises(ModelError, match=r"model\.path is not set"):
        await check(config_of(""), makes_model=False)


async def test_a_model_that_will_be_made_may_be_missing(tmp_path: Path) -> None:
    config = config_of(tmp_path / "none")
    with pytest.raises(ModelError):
        await check(config, makes_model=False)
    await check(config, makes_model=True)


@pytest.mark.parametrize("bind", ["0.0.0.0:80", "[::]:80", "10.0.0.1:80", ":80"])
async def test_a_page_that_others_could_reach_is_refused(model: Path, bind: str) -> None:
    config = Config(model=ModelConfig(path=str(model)), dashboard=DashboardConfig(bind=bind))
    with pytest.raises(AddressError, match=r"dashboard\.bind = .* has no login"):
        await check(config, makes_model=False)


async def test_an_engine_that_does_not_answer_is_named(model: Path) -> None:
    with listen("127.0.0.1:0") as taken:
        url = http_address(taken)
    with pytest.raises(AddressError, match=rf"engine\.urls: {url} does not answer"):
        await check(config_of(model, url), makes_model=False)


def test_an_invalid_engine_url_is_named(model: Path) -> None:
    with pytest.raises(ValueError, match=r"urls: nonsense: not an http"):
        config_of(model, "nonsense")


def test_an_engine_url_with_a_path_is_named(model: Path) -> None:
    with pytest.raises(ValueError, match=r"http://h:1/other: an engine's URL is scheme, host and"):
        config_of(model, "http://h:1/other")
