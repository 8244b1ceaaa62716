"""Memory is for engines of this host alone; what they are told is in tests/contract."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rollmesh.core.errors import EngineRefused
from rollmesh.engine.client import EngineClient
from rollmesh.engine.http import HttpClient
from rollmesh.testing.engine import ScriptedEngine
from rollmesh.trainer.weights.carriers.cargo import Cargo
from rollmesh.trainer.weights.carriers.tensor import TensorCarrier, is_here, sees_us

ELSEWHERE = "http://192.0.2.1:30000"
"""TEST-NET-1 of RFC 5737: nobody has it."""


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "http://localhost:1", "http://127.3.2.1:1"])
def test_this_host_is_here(url: str) -> None:
    assert is_here(url)


@pytest.mark.parametrize("url", [ELSEWHERE, "http://no.such.host.invalid:1"])
def test_another_host_is_not(url: str) -> None:
    assert not is_here(url)


LISTENS = """
import socket, sys
with socket.create_server(("127.0.0.1", 0)) as listening:
    print("http://127.0.0.1:%d" % listening.getsockname()[1], flush=True)
    sys.stdin.read()
"""


@contextmanager
def listener(*words: str, folder: Path) -> Iterator[str]:
    """A python that was started with these words; where it listens."""
    argv = [sys.executable, *words]
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe, text=True, cwd=folder) as process:
        assert process.stdin
        assert process.stdout
        yield process.stdout.readline().strip()
        process.stdin.close()


@pytest.fixture
def sglang(tmp_path: Path) -> Path:
    """Where python finds an SGLang that only listens."""
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "__init__.py").touch()
    (tmp_path / "sglang" / "launch_server.py").write_text(LISTENS)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "sglang").write_text(LISTENS)
    return tmp_path


@pytest.mark.parametrize("words", ["-m sglang.launch_server --port 0", "bin/sglang serve"])
def test_an_sglang_with_our_folders_sees_us_and_one_that_is_not_there_does_not(
    words: str, sglang: Path
) -> None:
    with listener(*words.split(), folder=sglang) as address:
        assert sees_us(address)
    assert not sees_us(address)


def test_what_forwards_to_an_sglang_is_none(tmp_path: Path) -> None:
    """As `ssh -L` and `kubectl port-forward`: it has our folders, and its engine is elsewhere."""
    forward = ["port-forward", "sglang", "30000:30000", "-m", "sglang.launch_server"]
    with listener("-c", LISTENS, *forward, folder=tmp_path) as address:
        assert not sees_us(address)


async def test_an_sglang_that_may_not_see_our_memory_is_told_of_none() -> None:
    """It would end."""
    async with ScriptedEngine() as engine, HttpClient() as http:
        carrier = TensorCarrier(look=lambda _: False)
        with pytest.raises(EngineRefused, match="sees our memory"):
            await carrier.load(EngineClient(engine.url, http), Cargo(1, "/v1"), 1.0)
        assert [each.path for each in engine.seen] == ["/server_info"]


async def test_an_engine_of_another_host_is_asked_nothing() -> None:
    async with HttpClient() as http:
        client = EngineClient(ELSEWHERE, http)
        with pytest.raises(EngineRefused, match="another host"):
            await TensorCarrier().load(client, Cargo(1, "/v1"), 1.0)


async def test_an_engine_that_knows_no_bracket_is_told_of_no_weights() -> None:
    """As SGLang before 0.5.21; shipping.py reaches it by the file."""
    async with ScriptedEngine() as engine, HttpClient() as http:
        carrier = TensorCarrier(look=lambda _: True)
        with pytest.raises(EngineRefused, match="404"):
            await carrier.load(EngineClient(engine.url, http), Cargo(1, "/v1"), 1.0)
        await carrier.close()
        assert [each.path for each in engine.seen] == ["/server_info", "/begin_weight_update"]
