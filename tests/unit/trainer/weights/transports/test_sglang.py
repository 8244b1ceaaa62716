"""An adapter replaces the last one, whatever the engine drops by itself."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from rollmesh.core.errors import EngineRefused
from rollmesh.engine.backend import EngineBackend
from rollmesh.engine.http import HttpClient
from rollmesh.engine.sglang import SglangBackend
from rollmesh.trainer.weights.transports.sglang import adapter_in, drop_adapters, swap_adapter


class Sglang:
    """The adapter calls of SGLang 0.5.21 (managers/tokenizer_control_mixin.py): beyond `max_loaded`
    it drops the least recently used; for an unknown one it answers 400."""

    def __init__(self, max_loaded: int) -> None:
        self.max_loaded = max_loaded
        self.loaded: list[str] = []
        self.policy_version = ""
        self.url = ""

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/load_lora_adapter", self._load)
        app.router.add_post("/unload_lora_adapter", self._unload)
        app.router.add_post("/update_weight_version", self._rename)
        return app

    async def _models(self, _: web.Request) -> web.Response:
        cards = [{"id": name, "parent": "base"} for name in self.loaded]
        return web.json_response({"data": [{"id": "base", "parent": None}, *cards]})

    async def _load(self, request: web.Request) -> web.Response:
        name = (await request.json())["lora_name"]
        if name in self.loaded:
            return _reply(f"LoRA with name {name} already exists")
        self.loaded = [*self.loaded, name][-self.max_loaded :]
        return _reply()

    async def _unload(self, request: web.Request) -> web.Response:
        name = (await request.json())["lora_name"]
        if name not in self.loaded:
            return _reply(f"LoRA with name {name} does not exist")
        self.loaded.remove(name)
        return _reply()

    async def _rename(self, request: web.Request) -> web.Response:
        self.policy_version = (await request.json())["new_version"]
        return _reply()


def _reply(failure: str = "") -> web.Response:
    answer: dict[str, Any] = {"success": not failure, "error_message": failure, "message": failure}
    return web.json_response(answer, status=400 if failure else 200)


@pytest.fixture(params=[1, 2, 8])
async def sglang(request: pytest.FixtureRequest) -> AsyncIterator[Sglang]:
    sglang = Sglang(request.param)
    runner = web.AppRunner(sglang.app())
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    sglang.url = f"http://{host}:{port}"
    yield sglang
    await runner.cleanup()


@pytest.fixture
async def client(sglang: Sglang) -> AsyncIterator[SglangBackend]:
    async with HttpClient() as http:
        yield SglangBackend(sglang.url, http)


async def publish(client: EngineBackend, policy_version: int) -> None:
    name = f"rollmesh-v{policy_version}"
    await swap_adapter(client, policy_version, Path(f"/v{policy_version}"), name)


async def test_next_adapter_takes_the_place_of_the_last(
    sglang: Sglang, client: EngineBackend
) -> None:
    for policy_version in (1, 2, 3):
        await publish(client, policy_version)
        assert sglang.loaded == [f"rollmesh-v{policy_version}"]
        assert sglang.policy_version == str(policy_version)


async def test_interrupted_attempt_is_repeated(sglang: Sglang, client: EngineBackend) -> None:
    await publish(client, 1)
    await client.load_adapter("rollmesh-v2", Path("/v2"))
    with pytest.raises(EngineRefused, match="already exists"):
        await client.load_adapter("rollmesh-v2", Path("/v2"))
    await publish(client, 2)
    assert sglang.loaded == ["rollmesh-v2"]


async def test_full_weights_drop_only_our_adapters(sglang: Sglang, client: EngineBackend) -> None:
    sglang.loaded = ["my-own", "rollmesh-v1"]
    await drop_adapters(client)
    assert sglang.loaded == ["my-own"]


def test_folder_without_an_adapter_config_has_no_adapter(tmp_path: Path) -> None:
    assert adapter_in(7, tmp_path) == ""
    (tmp_path / "adapter_config.json").touch()
    assert adapter_in(7, tmp_path) == "rollmesh-v7"
