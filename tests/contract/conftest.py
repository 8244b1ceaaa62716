"""The engines that the contract is held against: ours in both stream forms, and a real SGLang.

A real one is named by ROLLMESH_SGLANG_URL; it must run with the defaults of its flags but for
`--incremental-streaming-output`, which may be set or not, and it is left as it was found.
"""

import os
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from tokenizers import Tokenizer, models

from tests.contract.engines import WAIT_S, EngineUnderContract
from tests.contract.processes import embedded_engine
from tests.unit.engine.embedded.tiny_models import VOCAB_SIZE, write_model


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a long context and a tokenizer of one word for each id."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    write_model(folder, "qwen3", max_position_embeddings=4096)
    words = {f"w{number}": number for number in range(VOCAB_SIZE)}
    Tokenizer(models.WordLevel(words, unk_token="w0")).save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(
    scope="session",
    params=["embedded", "embedded_incremental", pytest.param("sglang", marks=pytest.mark.sglang)],
)
def address(request: pytest.FixtureRequest, model_folder: Path) -> Iterator[str]:
    """Where the engine serves."""
    if request.param == "sglang":
        url = os.environ.get("ROLLMESH_SGLANG_URL")
        if not url:
            pytest.skip("ROLLMESH_SGLANG_URL names no running SGLang")
        yield url.rstrip("/")
        return
    options = ["--incremental-streaming-output"] if "incremental" in request.param else []
    with ExitStack() as stack:
        yield stack.enter_context(embedded_engine(model_folder, *options)).address


@pytest.fixture
async def engine(address: str) -> AsyncIterator[EngineUnderContract]:
    """The engine, idle, with an empty cache."""
    # SGLang closes idle connections early and drops them after a 500: none is kept.
    limits = httpx.Limits(max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=address, timeout=WAIT_S, limits=limits) as client:
        info = (await client.get("/server_info")).json()
        model_path = (await client.get("/model_info")).json()["model_path"]
        found = EngineUnderContract(client, model_path, info["incremental_streaming_output"])
        await found.until_idle()
        assert (await client.post("/flush_cache")).status_code == 200
        yield found
        await found.post("/abort_request", abort_all=True)
        await found.post("/continue_generation")
        await found.until_idle()
