"""Adapters are loaded, requested and forgotten by name; and weights may change their name only.

SGLang is restarted with room for adapters: its results with one are compared with the embedded
engine's, which unit tests compare with merged weights. On a CPU it pads an MLP to a multiple of 64
without padding its adapter's, so this model's MLP is a multiple of 64.
"""

from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from rollmesh.core.config import PublishConfig
from rollmesh.core.types import policy_version_of
from rollmesh.engine.http import HttpClient
from rollmesh.engine.members import adapter_name
from rollmesh.engine.sglang import SglangBackend
from rollmesh.trainer.publish import PublishShell
from rollmesh.trainer.weights.transports.sglang import swap_adapter
from tests.contract.engines import WAIT_S, EngineUnderContract
from tests.contract.model import write_contract_model
from tests.contract.processes import (
    SGLANG_INSTALLED,
    announced,
    embedded_engine,
    sglang_engine,
)
from tests.contract.test_updates import PROMPT as WORKERS_PROMPT
from tests.contract.test_updates import TO_THE_END, VOCAB_SIZE, Worker
from tests.unit.engine.embedded.tiny_adapters import TARGETS, write_adapter

PROMPT = list(range(3, 43))
LORA = ("--enable-lora", "--max-lora-rank", "8", "--lora-target-modules", *TARGETS)
"""Flags that SGLang needs at its start."""


@pytest.fixture(scope="module")
def wide_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The contract's model with another width of its MLP."""
    return write_contract_model(tmp_path_factory.mktemp("models") / "wide", intermediate_size=64)


@pytest.fixture(scope="module")
def folders(wide_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two adapters over it."""
    place = tmp_path_factory.mktemp("adapters")
    return [write_adapter(place / f"a{seed}", wide_folder, seed, size=0.1) for seed in (1, 2)]


@pytest.fixture(
    scope="module",
    params=["embedded", pytest.param("sglang", marks=pytest.mark.sglang)],
)
def adapter_engine_url(request: pytest.FixtureRequest, wide_folder: Path) -> Iterator[str]:
    """The address of an engine that takes adapters."""
    with ExitStack() as stack:
        if request.param == "embedded":
            yield stack.enter_context(embedded_engine(wide_folder)).address
        elif SGLANG_INSTALLED.exists():
            flags = (*LORA, "--lora-backend", "torch_native")
            yield stack.enter_context(sglang_engine(wide_folder, *flags)).address
        else:
            pytest.skip("SGLang is not installed: make sglang")


@pytest.fixture
async def engine(adapter_engine_url: str) -> AsyncIterator[EngineUnderContract]:
    """That engine, idle and without adapters."""
    limits = httpx.Limits(max_keepalive_connections=0)
    async with httpx.AsyncClient(
        base_url=adapter_engine_url, timeout=WAIT_S, limits=limits
    ) as client:
        found = EngineUnderContract(client, "", False)
        yield found
        await found.until_idle()
        for name in await adapters_of(found):
            assert (await found.post("/unload_lora_adapter", lora_name=name)).status_code == 200


async def adapters_of(engine: EngineUnderContract) -> list[str]:
    cards = (await engine.get("/v1/models"))["data"]
    return [card["id"] for card in cards if card.get("parent")]


async def load(engine: EngineUnderContract, name: str, folder: Path) -> None:
    response = await engine.post("/load_lora_adapter", lora_name=name, lora_path=str(folder))
    assert response.status_code == 200, response.text


async def scores(engine: EngineUnderContract, name: str | None = None) -> list[float]:
    asked = {"lora_path": name} if name else {}
    answer = await engine.generate(
        PROMPT,
        sampling_params={"max_new_tokens": 0},
        return_logprob=True,
        logprob_start_len=0,
        **asked,
    )
    return [entry[0] for entry in answer["meta_info"]["input_token_logprobs"][1:]]


async def test_each_request_is_answered_with_the_adapter_it_names(
    engine: EngineUnderContract, folders: list[Path], wide_folder: Path
) -> None:
    plain = await scores(engine)
    for at, folder in enumerate(folders):
        await load(engine, f"a{at}", folder)
    assert await adapters_of(engine) == ["a0", "a1"]
    adapted = [await scores(engine, f"a{at}") for at in range(2)]
    assert await scores(engine) == pytest.approx(plain, abs=1e-3)
    assert adapted[0] != pytest.approx(plain, abs=1e-2)
    assert adapted[0] != pytest.approx(adapted[1], abs=1e-2)
    with embedded_engine(wide_folder) as ours:
        async with httpx.AsyncClient(base_url=ours.address, timeout=WAIT_S) as client:
            reference = EngineUnderContract(client, "", False)
            for at, folder in enumerate(folders):
                await load(reference, f"a{at}", folder)
                expected = await scores(reference, f"a{at}")
                assert adapted[at] == pytest.approx(expected, abs=2e-3)


@pytest.mark.sglang
async def test_an_sglang_with_room_for_one_adapter_takes_the_next(
    wide_folder: Path, folders: list[Path]
) -> None:
    if not SGLANG_INSTALLED.exists():
        pytest.skip("SGLang is not installed: make sglang")
    few = ("--max-loaded-loras", "1", "--max-loras-per-batch", "1")
    flags = (*LORA, "--lora-backend", "torch_native", *few)
    with sglang_engine(wide_folder, *flags) as process:
        async with HttpClient() as http:
            client = SglangBackend(process.address, http)
            scored = []
            for at, folder in enumerate([*folders, folders[0]], start=1):
                await client.pause()
                await swap_adapter(client, at, folder, adapter_name(at))
                await client.resume()
                assert await client.adapters() == [adapter_name(at)]
                scored.append(await client.score(PROMPT, str(at), adapter_name(at)))
    assert scored[0] == pytest.approx(scored[2])
    assert scored[0] != pytest.approx(scored[1], abs=1e-2)


async def test_adapters_are_published_during_generation(
    engine: EngineUnderContract,
    adapter_engine_url: str,
    folders: list[Path],
    wide_folder: Path,
    tmp_path: Path,
) -> None:
    first = policy_version_of((await engine.get("/model_info"))["weight_version"]) + 1
    argv = ["-m", "rollmesh.cli.main", "router", "--set", f"run.folder={tmp_path}"]
    with announced([*argv, "--set", "router.beat_s=0.1", "--engine", adapter_engine_url]) as router:
        worker = Worker(router.address, VOCAB_SIZE)
        shell = PublishShell(router.address, PublishConfig(lease_s=60.0))
        assert (await shell.publish(first, wide_folder)).updated == (adapter_engine_url,)
        turns = [worker.start(at) for at in range(12)]
        for at, folder in enumerate(folders):
            for turn in turns[::2]:
                await turn.wait(20 + len(turn.token_ids))
            assert (await shell.publish(first + 1 + at, folder)).updated == (adapter_engine_url,)
        newest = adapter_name(first + 2)
        await worker.watch.row(adapter_engine_url, lambda row: row.adapter == newest)
        async with HttpClient() as http:
            client = SglangBackend(adapter_engine_url, http)
            assert await client.adapters() == [newest]
            for turn in turns:
                await turn.wait(TO_THE_END)
                assert turn.error is None
            spanning = [
                turn for turn in turns if turn.policy_versions[-1].policy_version == first + 2
            ]
            assert spanning
            for turn in spanning:
                num = turn.policy_versions[-1].num_tokens
                scored = await client.score([*WORKERS_PROMPT, *turn.token_ids], "x", newest)
                assert turn.logprobs[-num:].tolist() == pytest.approx(scored[-num:], abs=5e-3)
        await shell.publish(first + 3, wide_folder)
        await shell.close()
        await worker.close()


async def test_an_unknown_adapter_name_is_refused_with_the_reason(
    engine: EngineUnderContract, folders: list[Path]
) -> None:
    await load(engine, "gone", folders[0])
    assert (await engine.post("/unload_lora_adapter", lora_name="gone")).status_code == 200
    assert await adapters_of(engine) == []
    response = await engine.post(
        "/generate",
        input_ids=PROMPT,
        sampling_params={"max_new_tokens": 1},
        lora_path="never-there",
    )
    assert response.status_code == 400
    assert "LoRA adapter" in response.text


async def test_folder_without_an_adapter_is_refused_and_the_engine_survives(
    engine: EngineUnderContract, tmp_path: Path
) -> None:
    body = {"lora_name": "none", "lora_path": str(tmp_path)}
    assert (await engine.post("/load_lora_adapter", **body)).status_code == 400
    assert await adapters_of(engine) == []
    assert len(await scores(engine)) == len(PROMPT) - 1


async def test_renamed_weights_stamp_later_samples_with_the_new_name(
    engine: EngineUnderContract, folders: list[Path]
) -> None:
    await load(engine, "a", folders[0])
    asked = {"new_version": "77", "abort_all_requests": False}
    assert (await engine.post("/update_weight_version", **asked)).status_code == 200
    assert (await engine.get("/model_info"))["weight_version"] == "77"
    answer = await engine.generate(PROMPT, lora_path="a")
    assert answer["meta_info"]["weight_version"] == "77"
