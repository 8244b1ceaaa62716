"""Backends: the factory, a backend of a user's own, and the memory state in names of weights."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pytest

from rollmesh.core.config import Config, EngineConfig
from rollmesh.core.errors import ConfigError, EngineUnavailable
from rollmesh.core.types import UNVERSIONED, SamplingParams, policy_version_of
from rollmesh.engine.backend import (
    EngineLoad,
    EngineMemory,
    EngineRequest,
    Finish,
    MemoryState,
    ModelInfo,
    TokenChunk,
    TokenReceiver,
    backend_factory,
    configured_backend,
    memory_state_of,
    register_backend,
    weights_name,
)
from rollmesh.engine.http import HttpClient
from rollmesh.engine.sglang import SglangBackend
from rollmesh.engine.view import FleetView
from rollmesh.runtime.generation.events import GenerationRequest
from rollmesh.runtime.generation.sampler import Sampler, SamplerDeps
from rollmesh.wire.fleet import EnginePhase, EngineRow, FleetChanged
from tests.unit.engine.http_peer import Wire, serving

URL = "toy://one"


class ToyRequest:
    """A request that has ended."""

    def close(self) -> None:
        pass


class ToyMemory:
    async def release(self) -> None:
        raise NotImplementedError

    async def resume(self) -> None:
        raise NotImplementedError


class ToyBackend:
    """Sample the successor of each token, in this process."""

    def __init__(
        self,
        url: str,
        http: HttpClient,
        *,
        vocab_size: int = 2**31,
        key: str | None = None,
        control_timeout_s: float = 1.0,
        read_timeout_s: float = 1.0,
    ) -> None:
        self.url = url
        self.vocab_size = vocab_size
        self.memory: EngineMemory = ToyMemory()

    def generate(self, request: EngineRequest, receiver: TokenReceiver) -> ToyRequest:
        last = request.prompt_ids[-1]
        tokens = [last + 1 + n for n in range(request.max_new_tokens)]
        chunk = TokenChunk(tokens, [-0.5] * len(tokens), 3, Finish("length"))
        loop = asyncio.get_running_loop()
        loop.call_soon(receiver.on_chunk, chunk)
        loop.call_soon(receiver.on_end)
        return ToyRequest()

    async def abort(self, rid: str) -> None:
        pass

    async def score(
        self, token_ids: Sequence[int], extra_key: str, adapter: str = ""
    ) -> list[float]:
        return [-0.5] * (len(token_ids) - 1)

    async def pause(self, mode: Literal["abort", "retract", "in_place"] = "abort") -> None:
        pass

    async def resume(self) -> None:
        pass

    async def flush(self) -> None:
        pass

    async def command(
        self, path: str, body: dict[str, Any], timeout_s: float | None = None
    ) -> None:
        raise NotImplementedError

    async def update_from_disk(
        self, path: Path, policy_version: int, timeout_s: float | None = None
    ) -> None:
        raise NotImplementedError

    async def load_adapter(self, name: str, path: Path) -> None:
        raise NotImplementedError

    async def unload_adapter(self, name: str) -> None:
        raise NotImplementedError

    async def adapters(self) -> list[str]:
        return []

    async def model_info(self) -> ModelInfo:
        return ModelInfo("toy", 3)

    async def server_info(self) -> dict[str, Any]:
        return {}

    async def loads(self) -> EngineLoad:
        return EngineLoad(0, 0)


async def test_a_registered_backend_samples_a_generation() -> None:
    register_backend("toy", ToyBackend)
    view = FleetView()
    view.update(FleetChanged(1, (EngineRow(URL, "i", EnginePhase.READY, 3),)), "router")
    connect = backend_factory("toy")
    parts = SamplerDeps(view=view, vocab_size=100, report=print, connect=connect)
    sampler = Sampler(parts)
    request = GenerationRequest(
        generation_id="g",
        session_key="s",
        prompt_ids=[5, 6],
        params=SamplingParams(max_tokens=4),
        stream=True,
    )
    generation = sampler.start(request)
    generation.join()
    await generation.wait(2**31)
    await sampler.close()
    assert list(generation.token_ids) == [7, 8, 9, 10]
    assert generation.engines == [URL]


async def test_an_engine_that_does_not_pause_in_time_is_unavailable() -> None:
    connect = configured_backend(EngineConfig(control_timeout_s=0.05))
    async with serving(Wire.gone) as server, HttpClient() as http:
        with pytest.raises(EngineUnavailable, match=r"no answer within 0.05 s"):
            await connect(server.url, http).pause()


async def test_an_engine_that_does_not_answer_a_read_in_time_is_unavailable() -> None:
    async with serving(Wire.gone) as server, HttpClient() as http:
        client = SglangBackend(server.url, http, read_timeout_s=0.05)
        for read in (client.model_info, client.server_info, client.loads, client.adapters):
            with pytest.raises(EngineUnavailable, match=r"no answer within 0.05 s"):
                await read()


def test_a_backend_is_found_by_module_and_attribute() -> None:
    assert backend_factory("tests.unit.engine.test_backend:ToyBackend") is ToyBackend


def test_sglang_and_the_embedded_engine_share_one_client() -> None:
    assert backend_factory() is backend_factory(Config().engine.backend) is SglangBackend
    assert backend_factory("embedded") is SglangBackend


@pytest.mark.parametrize("name", ["vllm", "no.such.module:Backend", "rollmesh.engine:Nothing"])
def test_an_unknown_backend_is_one_line_that_names_the_key(name: str) -> None:
    with pytest.raises(ConfigError) as refused:
        backend_factory(name)
    assert str(refused.value).startswith("engine.backend: ")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("state", list(MemoryState))
@pytest.mark.parametrize("weights", ["7", "default", "moving-target"])
def test_name_of_weights_carries_the_memory_state(state: MemoryState, weights: str) -> None:
    if state is MemoryState.HELD and weights.startswith("moving-"):
        return  # publishers never use such a name
    assert memory_state_of(weights_name(state, weights)) == (state, weights)


def test_weights_whose_memory_is_gone_have_no_version() -> None:
    for state in (MemoryState.MOVING, MemoryState.RELEASED):
        assert policy_version_of(weights_name(state, "7")) == UNVERSIONED
