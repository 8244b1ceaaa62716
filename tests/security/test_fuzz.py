"""Fuzzing of every surface that strangers, agents, engines and members reach.

    make chaos                                        60 s a surface, from a new seed

Each surface is a real process. After the inputs it still lives, answers as before, has no more
files open, has not grown by 64 MiB, never answered 500, and its log holds no traceback.
"""

import asyncio
import random
import sys
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import psutil
import pytest

from tests.flow.worker_mesh import look_until
from tests.security.mutations import Mutator
from tests.security.spawner_surface import spawner
from tests.security.surfaces import SURFACES, Surface

SHORT_S, LONG_S = 2.0, 60.0
BATCH = 8
SHOWN_CHARS = 3000

SURFACE = pytest.mark.parametrize("surface", [*SURFACES, spawner], ids=lambda each: each.__name__)
Opened = Callable[[Path, Mutator], AbstractAsyncContextManager[Surface]]


async def fuzz(surface: Opened, folder: Path, seed: int, lasts_s: float) -> int:
    """Send inputs for `lasts_s`, check the surface, and return the number of inputs."""
    mutator, num_inputs = Mutator(seed), 0
    async with surface(folder, mutator) as target:
        await target.check()
        for _ in range(20):
            await asyncio.gather(*[target.send(mutator) for _ in range(BATCH)])
        process = psutil.Process(target.pid)
        before, num_files = process.memory_info().rss, process.num_fds()
        end_s = time.monotonic() + lasts_s
        while time.monotonic() < end_s:
            await asyncio.gather(*[target.send(mutator) for _ in range(BATCH)])
            num_inputs += BATCH
        await target.check()
        assert process.is_running()
        await asyncio.to_thread(look_until, lambda: process.num_fds() <= num_files + BATCH)
        assert process.memory_info().rss - before <= target.max_growth_bytes
    return num_inputs


def check_logs(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Check that no rollmesh process logged or printed a traceback."""
    printed = capfd.readouterr().err
    for text in (printed, *(log.read_text() for log in folder.rglob("*.log"))):
        assert text.partition("Traceback")[2][:SHOWN_CHARS] == ""


@pytest.mark.slow
@SURFACE
async def test_a_surface_survives_odd_inputs(
    surface: Opened, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert await fuzz(surface, tmp_path, 1, SHORT_S)
    check_logs(tmp_path, capfd)


@SURFACE
@pytest.mark.chaos
@pytest.mark.timeout(300)
async def test_a_surface_survives_odd_inputs_for_a_minute(
    surface: Opened, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    seed = random.SystemRandom().randrange(2**31)
    with capfd.disabled():
        sys.stdout.write(f"\n{surface.__name__}: seed {seed}, ")
        sys.stdout.flush()
    num_inputs = await fuzz(surface, tmp_path, seed, LONG_S)
    with capfd.disabled():
        sys.stdout.write(f"{num_inputs} inputs in {LONG_S:g} s ")
    check_logs(tmp_path, capfd)
