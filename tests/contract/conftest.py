"""The engines under contract: the embedded one in both stream forms, and a real SGLang.

SGLang is the one that `make sglang` installed, started once; or the one that ROLLMESH_SGLANG_URL
names, which must serve tests/contract/model.py's folder in float32, with LIMITS, in either form of
streams. Tests restore its state.
"""

import os
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from tests.contract.engines import WAIT_S, EngineUnderContract
from tests.contract.model import write_contract_model
from tests.contract.processes import SGLANG_INSTALLED, embedded_engine, sglang_engine

LIMITS = ("--max-running-requests", "32", "--max-queued-requests", "64")
"""So that a queue can be filled; other flags have their defaults."""
NOT_INSTALLED = "SGLang is not installed: make sglang"


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The contract's model."""
    return write_contract_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(
    scope="session",
    params=[
        "embedded",
        "embedded_incremental",
        pytest.param("sglang", marks=pytest.mark.sglang),
        pytest.param("sglang_incremental", marks=pytest.mark.sglang),
    ],
)
def address(request: pytest.FixtureRequest, model_folder: Path) -> Iterator[str]:
    """The address at which the engine serves."""
    given = os.environ.get("ROLLMESH_SGLANG_URL", "").rstrip("/")
    name, _, form = request.param.partition("_")
    flags = [*LIMITS, *["--incremental-streaming-output"] * bool(form)]
    with ExitStack() as stack:
        if name == "embedded":
            yield stack.enter_context(embedded_engine(model_folder, *flags)).address
        elif given:
            yield given
        elif SGLANG_INSTALLED.exists():
            yield stack.enter_context(sglang_engine(model_folder, *flags)).address
        else:
            pytest.skip(NOT_INSTALLED)


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
