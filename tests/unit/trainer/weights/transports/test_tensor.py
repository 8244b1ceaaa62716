"""Memory is offered only to engines of this host; the bodies of the calls are in tests/contract."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rollmesh.core.errors import EngineRefused
from rollmesh.engine.http import HttpClient
from rollmesh.engine.sglang import SglangBackend
from rollmesh.testing.engine import ScriptedEngine
from rollmesh.trainer.weights.transfer import Payload
from rollmesh.trainer.weights.transports.tensor import (
    TensorTransport,
    is_on_this_host,
    shares_our_memory,
)

ELSEWHERE = "http://192.0.2.1:30000"
"""TEST-NET-1 of RFC 5737, which no host has."""


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "http://localhost:1", "http://127.3.2.1:1"])
def test_addresses_of_this_host_are_recognized(url: str) -> None:
    assert is_on_this_host(url)


@pytest.mark.parametrize("url", [ELSEWHERE, "http://no.such.host.invalid:1"])
def test_addresses_of_another_host_are_not(url: str) -> None:
    assert not is_on_this_host(url)


LISTENS = """
import socket, sys
with socket.create_server(("127.0.0.1", 0)) as listening:
    print("http://127.0.0.1:%d" % listening.getsockname()[1], flush=True)
    sys.stdin.read()
"""


@contextmanager
def listener(*arguments: str, folder: Path) -> Iterator[str]:
    """Start Python with these arguments; yield the address where it listens."""
    argv = [sys.executable, *arguments]
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe, text=True, cwd=folder) as process:
        assert process.stdin
        assert process.stdout
        yield process.stdout.readline().strip()
        process.stdin.close()


@pytest.fixture
def sglang(tmp_path: Path) -> Path:
    """A folder in which Python finds an SGLang that only listens."""
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "__init__.py").touch()
    (tmp_path / "sglang" / "launch_server.py").write_text(LISTENS)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "sglang").write_text(LISTENS)
    return tmp_path


@pytest.mark.parametrize("command", ["-m sglang.launch_server --port 0", "bin/sglang serve"])
def test_sglang_with_our_folders_shares_memory_and_a_stopped_one_does_not(
    command: str, sglang: Path
) -> None:
    with listener(*command.split(), folder=sglang) as address:
        assert shares_our_memory(address)
    assert not shares_our_memory(address)


def test_port_forwarder_does_not_share_memory(tmp_path: Path) -> None:
    """`ssh -L` and `kubectl port-forward` have our folders, but their engine is elsewhere."""
    forward = ["port-forward", "sglang", "30000:30000", "-m", "sglang.launch_server"]
    with listener("-c", LISTENS, *forward, folder=tmp_path) as address:
        assert not shares_our_memory(address)


async def test_sglang_without_our_memory_is_never_offered_it() -> None:
    """A real SGLang would exit."""
    async with ScriptedEngine() as engine, HttpClient() as http:
        transport = TensorTransport(can_share=lambda _: False)
        with pytest.raises(EngineRefused, match="access to our memory"):
            await transport.load(SglangBackend(engine.url, http), Payload(1, "/v1"), 1.0)
        assert [each.path for each in engine.seen] == ["/server_info"]


async def test_engine_of_another_host_is_not_called() -> None:
    async with HttpClient() as http:
        client = SglangBackend(ELSEWHERE, http)
        with pytest.raises(EngineRefused, match="another host"):
            await TensorTransport().load(client, Payload(1, "/v1"), 1.0)


async def test_engine_without_update_sessions_gets_no_weights() -> None:
    """SGLang before 0.5.21 has no update sessions; it loads the file."""
    async with ScriptedEngine() as engine, HttpClient() as http:
        transport = TensorTransport(can_share=lambda _: True)
        with pytest.raises(EngineRefused, match="404"):
            await transport.load(SglangBackend(engine.url, http), Payload(1, "/v1"), 1.0)
        await transport.close()
        assert [each.path for each in engine.seen] == ["/server_info", "/begin_weight_update"]
