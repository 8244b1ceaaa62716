"""The embedded engine alone: its process, and where it is kinder than SGLang on purpose.

docs/engine.md lists these differences.
"""

import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

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


def test_it_reports_once_it_serves(process: EngineProcess) -> None:
    assert process.ready["role"] == "engine"
    assert process.ready["pid"] == process.pid
    assert httpx.get(process.address + "/model_info").json()["weight_version"] == "0"


def test_without_a_tokenizer_answers_carry_no_text(client: httpx.Client) -> None:
    answer = client.post("/generate", json={"input_ids": PROMPT}).json()
    assert "text" not in answer
    assert client.post("/generate", json={"text": "w1 w2"}).status_code == 400


@pytest.mark.parametrize(
    ("body", "says"),
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
def test_what_would_kill_or_confuse_sglang_is_a_400_in_one_line(
    client: httpx.Client, body: dict[str, object], says: str
) -> None:
    response = client.post("/generate", json=body)
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert says in message
    assert "\n" not in message
    assert client.post("/generate", json={"input_ids": PROMPT}).status_code == 200


def test_what_arrived_in_a_pause_can_be_aborted_in_it(client: httpx.Client) -> None:
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
        lines = response.iter_lines()  # kept: when it goes, the connection goes
        next(lines)
        client.post("/pause_generation", json={"mode": "in_place"})
        refused = client.post("/update_weights_from_disk", json={"model_path": str(model_folder)})
    assert refused.status_code == 400
    assert "flush_cache false" in refused.json()["message"]


def test_a_seed_repeats_an_answer(client: httpx.Client) -> None:
    def sampled(seed: int) -> list[int]:
        params = {"max_new_tokens": 20, "sampling_seed": seed, "ignore_eos": True}
        body = {"input_ids": PROMPT, "sampling_params": params}
        found: list[int] = client.post("/generate", json=body).json()["output_ids"]
        return found

    assert sampled(5) == sampled(5)
    assert sampled(5) != sampled(6)


def test_sigterm_ends_it_within_a_second_even_in_mid_stream(model_folder: Path) -> None:
    with embedded_engine(model_folder) as process:
        body = {"input_ids": PROMPT, "stream": True, "sampling_params": LONG}
        url = process.address + "/generate"
        with httpx.stream("POST", url, json=body, timeout=WAIT_S) as response:
            lines = response.iter_lines()
            next(lines)
            told_s = time.monotonic()
            process.child.terminate()
            assert process.child.wait(WAIT_S) == 0
            assert time.monotonic() - told_s < 1.0
