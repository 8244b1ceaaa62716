"""Attacks on the embedded engine: web pages, strangers on the network, and requests that leak."""

import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from rollmesh.core.errors import EngineError
from rollmesh.engine.http import HttpClient
from rollmesh.engine.sglang import SglangBackend
from rollmesh.engine.shared_memory import LOAD_FORMAT, SharedSegment, TensorPiece, encode_parts
from tests.contract.engines import WAIT_S
from tests.contract.processes import EngineProcess, embedded_engine
from tests.unit.engine.embedded.tiny_models import write_model

KEY = "engine-key-0123456789"
NUM_REFUSED = 160


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny", "qwen3", seed=0)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[EngineProcess]:
    with embedded_engine(folder, "--skip-tokenizer-init") as found:
        yield found


@pytest.fixture
def client(engine: EngineProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=engine.address, timeout=WAIT_S) as found:
        yield found


@pytest.mark.parametrize("path", ["/abort_request", "/pause_generation", "/generate"])
@pytest.mark.parametrize(
    "header",
    [
        {"Origin": "http://evil.example"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Host": "evil.example"},
        {"Host": "127.0.0.1.evil.example:80"},
    ],
)
def test_a_web_page_cannot_use_an_engine_on_loopback(
    client: httpx.Client, path: str, header: dict[str, str]
) -> None:
    sent = client.post(path, content=b"{}", headers={"Content-Type": "text/plain", **header})
    assert sent.status_code == 403
    assert client.post("/generate", json={"input_ids": [1, 2]}).status_code == 200


def test_two_host_headers_are_a_400(engine: EngineProcess) -> None:
    port = int(engine.address.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port)) as line:
        line.sendall(b"GET /model_info HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n")
        assert b" 400 " in line.recv(100)


@pytest.mark.parametrize("path", ["/generate", "/abort_request", "/stage_weights"])
def test_bytes_that_are_no_text_are_a_400(client: httpx.Client, path: str) -> None:
    for body in (b'{"rid": "\xff\xfe"}', b"[" * 100_000, b"\xff"):
        assert client.post(path, content=body).status_code == 400


def test_a_weight_group_is_joined_at_allowed_hosts_only(client: httpx.Client) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        body = {"master_port": listening.getsockname()[1], "rank_offset": 1, "world_size": 2}
        for address in ("192.0.2.1", "evil.example", "127.0.0.1.evil.example"):
            answer = client.post(
                "/init_weights_update_group", json=body | {"master_address": address}
            )
            assert answer.status_code == 400
            assert "--allow-host" in answer.json()["message"]


@pytest.fixture
def refused_parts() -> Iterator[list[SharedSegment]]:
    """Weights in our shared memory that cannot be read as described."""
    path = Path(f"/dev/shm/rollmesh-{os.getuid()}-{secrets.token_hex(8)}")
    pieces = [
        TensorPiece("w", "float32", (10**6,), 0, 4 * 10**6),
        TensorPiece("w", "float32", (3,), 0, 4096),
        TensorPiece("w", "no_dtype", (4,), 0, 16),
        TensorPiece("w", "nn", (4,), 0, 16),
        TensorPiece("w", "float32", (4,), -8, 16),
    ]
    path.write_bytes(b"x" * 4096)
    yield [SharedSegment(str(path), (piece,)) for piece in pieces]
    path.unlink()


def test_refused_weights_leave_no_descriptor(
    engine: EngineProcess, client: httpx.Client, refused_parts: list[SharedSegment]
) -> None:
    def num_open() -> int:
        maps = Path(f"/proc/{engine.pid}/maps").read_text().count("/dev/shm/rollmesh-")
        return len(os.listdir(f"/proc/{engine.pid}/fd")) + maps

    def staging_status(part: SharedSegment) -> int:
        body = {"load_format": LOAD_FORMAT, "serialized_named_tensors": encode_parts([part])}
        return client.post("/stage_weights", json=body).status_code

    staging_status(refused_parts[0])
    before = num_open()
    for number in range(NUM_REFUSED):
        assert staging_status(refused_parts[number % len(refused_parts)]) == 400
    assert num_open() == before


@pytest.mark.parametrize("path", ["/etc/hostname", "/dev/shm/other", "/dev/shm/rollmesh-0/../x"])
def test_weights_are_read_from_our_shared_memory_only(client: httpx.Client, path: str) -> None:
    body = {"load_format": LOAD_FORMAT}
    answers = []
    for name in (path, f"{path}-that-is-not-there"):
        entries = encode_parts([SharedSegment(name, (TensorPiece("w", "float32", (1,), 0, 4),))])
        answer = client.post("/stage_weights", json=body | {"serialized_named_tensors": entries})
        answers.append((answer.status_code, answer.json()["message"].replace(name, "")))
    assert answers[0] == answers[1], "it does not reveal whether a file exists"
    assert answers[0][0] == 400


async def test_with_a_key_every_path_but_health_needs_it(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(KEY)
    file.chmod(0o600)
    with embedded_engine(folder, "--skip-tokenizer-init", "--api-key-file", str(file)) as keyed:
        async with httpx.AsyncClient(base_url=keyed.address, timeout=WAIT_S) as client:
            bearers: list[Any] = [{}, bearer("other"), {"Authorization": KEY}, bearer(b"\xff\xfe")]
            for headers in bearers:
                for path in ("/model_info", "/server_info", "/v1/loads", "/nowhere"):
                    assert (await client.get(path, headers=headers)).status_code == 401
                sent = await client.post("/generate", json={"input_ids": [1]}, headers=headers)
                assert sent.status_code == 401
            assert (await client.get("/health")).status_code == 200
            assert (await client.get("/model_info", headers=bearer(KEY))).status_code == 200
        async with HttpClient() as http:
            await SglangBackend(keyed.address, http, key=KEY).model_info()
            await SglangBackend(keyed.address, http, key=KEY).score([1, 2], "0")
            with pytest.raises(EngineError, match="ROLLMESH_ENGINE_KEY"):
                await SglangBackend(keyed.address, http, key="").model_info()


def bearer(key: str | bytes) -> Any:
    return {"Authorization": b"Bearer " + (key if isinstance(key, bytes) else key.encode())}


def test_an_engine_that_others_reach_needs_a_key(folder: Path) -> None:
    argv = [sys.executable, "-m", "rollmesh.engine.embedded", "--model-dir", str(folder)]
    argv += ["--host", "0.0.0.0"]
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert ended.returncode == 2
    assert len(ended.stderr.splitlines()) == 1
    assert "--api-key-file" in ended.stderr
