"""What is no answer is an error and ends the ferry; libraries may print what they like."""

import asyncio
import sys
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from rollmesh.core.errors import EngineUnavailable
from rollmesh.trainer.weights.carriers import ferry
from rollmesh.trainer.weights.carriers.cargo import Cargo
from rollmesh.trainer.weights.carriers.ferry import PROGRAM, Ferry, Meet, Share


async def started(*words: str, **environ: str) -> asyncio.subprocess.Process:
    """A python with these words, and pipes."""
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(
        sys.executable, *words, stdin=pipe, stdout=pipe, limit=100, env=environ
    )


async def test_what_a_library_prints_is_no_answer(tmp_path: Path) -> None:
    """As NCCL does with NCCL_DEBUG; here it is a torch that only prints."""
    (tmp_path / "torch.py").write_text("print('NCCL INFO Bootstrap: using lo')\n1 / 0\n")
    path = ":".join([str(tmp_path), *filter(None, sys.path)])
    process = await started("-m", PROGRAM, PYTHONPATH=path)
    told, _ = await process.communicate()
    assert told == b""


@pytest.mark.parametrize("line", [b"NCCL INFO\n", b'{"type":"Meet"}\n', b"[" * 200])
async def test_what_is_no_answer_ends_the_ferry(line: bytes) -> None:
    sunk = Ferry(await started("-c", f"import os, sys; os.write(1, {line!r}); sys.stdin.read()"))
    with pytest.raises(EngineUnavailable, match="no answer"):
        await sunk.order(Meet())
    with pytest.raises(EngineUnavailable, match="has ended"):
        await sunk.order(Meet())


ECHOES = """
import sys
for line in sys.stdin:
    print('{"type":"Done","port":%d}' % len(line), flush=True)
"""


async def test_who_asks_after_one_that_went_gets_its_own_answer() -> None:
    living = Ferry(await started("-c", ECHOES))
    shares = [Share(Cargo(1, folder), 1) for folder in ("/v1", "/v000002")]
    asked = asyncio.create_task(living.order(shares[0]))
    await asyncio.sleep(0)
    asked.cancel()
    done = await living.order(shares[1])
    assert done.port == len(msgspec.json.encode(shares[1])) + 1
    await living.end()


class Kept:
    """A process that the system does not let go, as one that waits for a device."""

    def __init__(self) -> None:
        self.stdin = self
        self.num_kills = 0

    def kill(self) -> None:
        self.num_kills += 1

    def close(self) -> None:
        """Its input ends."""

    async def wait(self) -> None:
        await asyncio.Event().wait()


@pytest.mark.parametrize("way", ["close", "end"])
async def test_a_ferry_that_the_system_keeps_is_killed_and_left(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ferry, "END_S", 0.01)
    kept = Kept()
    await getattr(Ferry(cast(Any, kept)), way)()
    assert kept.num_kills == 1
