"""A malformed reply is an error and ends the sender; what libraries print is ignored."""

import asyncio
import sys
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from rollmesh.core.errors import EngineUnavailable
from rollmesh.trainer.weights.transports import sender
from rollmesh.trainer.weights.transports.sender import PROGRAM, JoinGroup, ShareParts, WeightSender


async def started(*argv: str, **environ: str) -> asyncio.subprocess.Process:
    """Start Python with these arguments and with pipes."""
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(
        sys.executable, *argv, stdin=pipe, stdout=pipe, limit=100, env=environ
    )


async def test_library_output_is_not_a_reply(tmp_path: Path) -> None:
    """NCCL prints if NCCL_DEBUG is set; here a fake torch prints."""
    (tmp_path / "torch.py").write_text("print('NCCL INFO Bootstrap: using lo')\n1 / 0\n")
    path = ":".join([str(tmp_path), *filter(None, sys.path)])
    process = await started("-m", PROGRAM, PYTHONPATH=path)
    output, _ = await process.communicate()
    assert output == b""


@pytest.mark.parametrize("line", [b"NCCL INFO\n", b'{"type":"JoinGroup"}\n', b"[" * 200])
async def test_malformed_reply_ends_the_sender(line: bytes) -> None:
    sunk = WeightSender(
        await started("-c", f"import os, sys; os.write(1, {line!r}); sys.stdin.read()")
    )
    with pytest.raises(EngineUnavailable, match="malformed reply"):
        await sunk.order(JoinGroup())
    with pytest.raises(EngineUnavailable, match="exited"):
        await sunk.order(JoinGroup())


ECHOES = """
import sys
for line in sys.stdin:
    print('{"type":"CommandDone","port":%d}' % len(line), flush=True)
"""


async def test_caller_after_a_cancelled_one_gets_its_own_reply() -> None:
    living = WeightSender(await started("-c", ECHOES))
    shares = [ShareParts(policy_version, (), 1) for policy_version in (1, 100)]
    asked = asyncio.create_task(living.order(shares[0]))
    await asyncio.sleep(0)
    asked.cancel()
    done = await living.order(shares[1])
    assert done.port == len(msgspec.json.encode(shares[1])) + 1
    await living.end()


class UnkillableProcess:
    """A process that the kernel does not release, such as one that waits for a device."""

    def __init__(self) -> None:
        self.stdin = self
        self.num_kills = 0

    def kill(self) -> None:
        self.num_kills += 1

    def close(self) -> None:
        """Close standard input."""

    async def wait(self) -> None:
        await asyncio.Event().wait()


@pytest.mark.parametrize("way", ["close", "end"])
async def test_sender_that_does_not_exit_is_killed_and_abandoned(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender, "END_S", 0.01)
    process = UnkillableProcess()
    await getattr(WeightSender(cast("Any", process)), way)()
    assert process.num_kills == 1
