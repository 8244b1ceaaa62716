"""The embedded engine only: its process, and where it deliberately accepts more than SGLang.

docs/reference/engine.md lists these differences.
"""

import asyncio
import os
import shutil
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import pytest
from safetensors.torch import load_file

from rollmesh.engine.http import HttpClient
from rollmesh.engine.sglang import SglangBackend
from rollmesh.engine.shared_memory import LOAD_FORMAT, SharedSegment, TensorPiece, encode_parts
from rollmesh.trainer.weights.transfer import Payload, WeightBuffer
from rollmesh.trainer.weights.transports.sglang import update_session
from rollmesh.trainer.weights.transports.tensor import TensorTransport
from tests.contract.engines import LONG, WAIT_S
from tests.contract.processes import EngineProcess, embedded_engine

PROMPT = [11, 12, 13]


@pytest.fixture(scope="module")
def process(model_folder: Path) -> Iterator[EngineProcess]:
    with embedded_engine(model_folder, "--weight-version", "0", "--skip-tokenizer-init") as found:
        yield found


@pytest.fixture
def client(process: EngineProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=process.address, timeout=WAIT_S) as found:
        yield found
        found.post("/abort_request", json={"abort_all": True})
        found.post("/continue_generation")


def test_the_engine_reports_ready_once_it_serves(process: EngineProcess) -> None:
    assert process.ready["role"] == "engine"
    assert process.ready["pid"] == process.pid
    assert httpx.get(process.address + "/model_info").json()["weight_version"] == "0"


def test_without_a_tokenizer_answers_carry_no_text(client: httpx.Client) -> None:
    answer = client.post("/generate", json={"input_ids": PROMPT}).json()
    assert "text" not in answer
    assert client.post("/generate", json={"text": "w1 w2"}).status_code == 400


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"input_ids": [1, 999]}, "token id 999 is not in the vocabulary of 265 tokens"),
        ({"input_ids": [-1]}, "token id -1 is not in the vocabulary"),
        ({"input_ids": [1], "sampling_params": {"seed": 1}}, "unknown field `seed`"),
        ({"input_ids": [1], "sampling_params": {"json_schema": {}}}, "Expected `str | null`"),
        ({"input_ids": [1], "sampling_params": {"logit_bias": [1]}}, "Expected `object | null`"),
        (
            {"input_ids": [1], "return_logprob": True, "top_logprobs_num": 999},
            "must be in [0, 265]",
        ),
        ({"input_ids": [1], "image_data": "x"}, "image_data is not run by the embedded engine"),
    ],
)
def test_a_request_that_would_kill_or_confuse_sglang_is_a_one_line_400(
    client: httpx.Client, body: dict[str, object], reason: str
) -> None:
    response = client.post("/generate", json=body)
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert reason in message
    assert "\n" not in message
    assert client.post("/generate", json={"input_ids": PROMPT}).status_code == 200


def test_a_request_that_arrives_in_a_pause_can_be_aborted_in_it(client: httpx.Client) -> None:
    client.post("/pause_generation", json={"mode": "abort"})
    body = {"input_ids": PROMPT, "stream": True, "rid": "held"}
    with client.stream("POST", "/generate", json=body) as response:
        client.post("/abort_request", json={"rid": "held"})
        lines = [line for line in response.iter_lines() if line]
    assert '"type":"abort"' in lines[-2]
    assert lines[-1] == "data: [DONE]"


def test_health_answers_while_paused(client: httpx.Client) -> None:
    client.post("/pause_generation", json={"mode": "in_place"})
    assert client.get("/health").status_code == 200


def test_an_update_that_would_flush_memory_in_use_is_refused(
    client: httpx.Client, model_folder: Path
) -> None:
    body = {"input_ids": PROMPT, "stream": True, "sampling_params": LONG}
    with client.stream("POST", "/generate", json=body) as response:
        lines = response.iter_lines()  # kept: the connection closes when the response is collected
        next(lines)
        client.post("/pause_generation", json={"mode": "in_place"})
        refused = client.post("/update_weights_from_disk", json={"model_path": str(model_folder)})
    assert refused.status_code == 400
    assert "flush_cache false" in refused.json()["message"]


def test_a_part_of_the_model_is_refused(
    client: httpx.Client, model_folder: Path, tmp_path: Path
) -> None:
    """SGLang accepts a part, and serves a mixture."""
    weights = load_file(model_folder / "model.safetensors")
    few = {"model.norm.weight": 2 * weights["model.norm.weight"]}
    buffer = WeightBuffer()
    part = buffer.store(few, set(few), tmp_path)
    ask = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 4, "temperature": 0}}
    before = client.post("/generate", json=ask).json()
    assert client.post("/begin_weight_update").status_code == 200
    assert update_from(client, part).status_code == 200
    refused = client.post("/end_weight_update")
    assert (refused.status_code, refused.json()["success"]) == (400, False)
    assert "do not fit" in refused.json()["message"]
    after = client.post("/generate", json=ask).json()
    assert after["output_ids"] == before["output_ids"]
    assert client.get("/model_info").json()["weight_version"] == "0"
    assert client.post("/end_weight_update").status_code == 400, "it is closed all the same"
    buffer.close()


def test_an_abandoned_transfer_session_with_a_part_of_the_model_is_closed(
    client: httpx.Client, model_folder: Path, tmp_path: Path
) -> None:
    """Its publisher was killed; the next publisher is not refused."""
    weights = load_file(model_folder / "model.safetensors")
    buffer = WeightBuffer()
    part = buffer.store(weights, {"model.norm.weight"}, tmp_path)
    assert client.post("/begin_weight_update").status_code == 200
    assert update_from(client, part).status_code == 200

    async def update() -> None:
        async with HttpClient() as http, update_session(SglangBackend(str(client.base_url), http)):
            pass

    asyncio.run(update())
    assert client.post("/end_weight_update").status_code == 400, "it is closed"
    assert client.get("/model_info").json()["weight_version"] == "0"
    buffer.close()


@pytest.fixture
def part_in_memory(
    client: httpx.Client, model_folder: Path, tmp_path: Path
) -> Iterator[SharedSegment]:
    """All of the model, in memory that a test may remove."""
    weights = load_file(model_folder / "model.safetensors")
    buffer = WeightBuffer()
    part = buffer.store(weights, set(weights), tmp_path)
    part_in_memory = shutil.copy(part.path, f"{part.path}-copy")
    yield msgspec.structs.replace(part, path=part_in_memory)
    Path(part_in_memory).unlink(missing_ok=True)
    buffer.close()
    client.post("/update_weight_version", json={"new_version": "0"})


def test_staged_weights_are_used_once_by_the_matching_update(
    client: httpx.Client, part_in_memory: SharedSegment
) -> None:
    assert update_from(client, part_in_memory, path="/stage_weights").status_code == 200
    assert client.get("/model_info").json()["weight_version"] == "0", "it serves as before"
    Path(part_in_memory.path).unlink()
    assert client.post("/begin_weight_update").status_code == 200
    assert update_from(client, part_in_memory).status_code == 200
    assert update_from(client, part_in_memory).status_code == 400, "it is used once"
    assert client.post("/end_weight_update").status_code == 200
    assert client.get("/model_info").json()["weight_version"] == "9"


def test_staged_weights_of_one_version_are_not_used_for_another(
    client: httpx.Client, part_in_memory: SharedSegment
) -> None:
    assert update_from(client, part_in_memory, path="/stage_weights").status_code == 200
    Path(part_in_memory.path).unlink()
    assert client.post("/begin_weight_update").status_code == 200
    assert update_from(client, part_in_memory, policy_version="10").status_code == 400
    assert client.post("/end_weight_update").status_code == 200


def test_unreadable_staging_is_a_400_and_stages_nothing(
    client: httpx.Client, part_in_memory: SharedSegment
) -> None:
    gone = msgspec.structs.replace(part_in_memory, path=f"/dev/shm/rollmesh-{os.getuid()}-none")
    assert update_from(client, part_in_memory, path="/stage_weights").status_code == 200
    refused = update_from(client, gone, path="/stage_weights")
    assert refused.status_code == 400
    assert gone.path in refused.json()["message"]
    assert client.post("/stage_weights", json={"serialized_named_tensors": []}).status_code == 400


async def test_a_paused_engine_copies_only_what_it_could_not_copy_before(
    client: httpx.Client, part_in_memory: SharedSegment
) -> None:
    carrier, payload = TensorTransport(), Payload(9, "/none", (part_in_memory,))
    async with HttpClient() as http:
        engine = SglangBackend(str(client.base_url), http)
        await carrier.begin(payload, [engine], 10.0)
        await asyncio.to_thread(Path(part_in_memory.path).unlink)
        await engine.pause()
        await carrier.load(engine, payload, 10.0)
        await engine.resume()
        assert (await engine.model_info()).policy_version == 9
    await carrier.close()


@pytest.mark.parametrize("path", ["/dev/shm/no-such-memory", "/dev/null"])
def test_missing_memory_is_a_400_and_the_engine_survives(path: str, client: httpx.Client) -> None:
    """SGLang would exit."""
    assert client.post("/begin_weight_update").status_code == 200
    piece = TensorPiece("model.norm.weight", "float32", (32,), 0, 128)
    refused = update_from(client, SharedSegment(path, (piece,)))
    assert refused.status_code == 400
    assert path in refused.json()["message"]
    assert client.post("/end_weight_update").status_code == 200
    assert client.post("/generate", json={"input_ids": PROMPT}).status_code == 200


def update_from(
    client: httpx.Client,
    part: SharedSegment,
    *,
    policy_version: str = "9",
    path: str = "/update_weights_from_tensor",
) -> httpx.Response:
    """Send the engine an update from memory."""
    body = {"serialized_named_tensors": encode_parts([part]), "load_format": LOAD_FORMAT}
    return client.post(path, json=body | {"weight_version": policy_version})


def test_a_seed_repeats_an_answer(client: httpx.Client) -> None:
    def sampled(seed: int) -> list[int]:
        params = {"max_new_tokens": 20, "sampling_seed": seed, "ignore_eos": True}
        body = {"input_ids": PROMPT, "sampling_params": params}
        found: list[int] = client.post("/generate", json=body).json()["output_ids"]
        return found

    assert sampled(5) == sampled(5)
    assert sampled(5) != sampled(6)


def test_sigterm_ends_the_engine_even_during_a_stream(model_folder: Path) -> None:
    with embedded_engine(model_folder) as process:
        body = {"input_ids": PROMPT, "stream": True, "sampling_params": LONG}
        url = process.address + "/generate"
        with httpx.stream("POST", url, json=body, timeout=WAIT_S) as response:
            lines = response.iter_lines()
            next(lines)
            process.child.terminate()
            assert process.child.wait(WAIT_S) == 0
            with pytest.raises(httpx.TransportError):
                deque(lines)  # it has not run to its full length
