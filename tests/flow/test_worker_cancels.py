"""A cancelled group stops generating at once, whatever state its calls are in.

The engine would hold them forever: nothing else ends them.
"""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from rollmesh.serve.client.client import Dropped
from rollmesh.testing.engine import ScriptedEngine
from tests.flow.worker_mesh import PATIENCE_S, Mesh, ask, open_mesh, take

NUM_SAMPLES = 4


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    async with open_mesh(tmp_path) as mesh:
        yield mesh


LONG_TURN = """
from rollmesh.envs.echo import EchoEnv

class TheEnv(EchoEnv):
    def __init__(self):
        super().__init__(num_turns=1, prompt_chars=20, turn_chars=10, max_tokens=64)
"""


async def nothing_yet(engine: ScriptedEngine) -> None:
    """Queued: the engine has not sampled for it."""
    assert engine.num_sampled == 0


async def stream(engine: ScriptedEngine) -> None:
    """During a turn."""
    await engine.allow(NUM_SAMPLES)
    await engine.until(lambda: engine.num_sampled == NUM_SAMPLES)


async def pause(engine: ScriptedEngine) -> None:
    """During a turn, paused as by a weight update."""
    await stream(engine)
    engine.is_paused = True
    await engine.release()


async def ignore_aborts(engine: ScriptedEngine) -> None:
    """The first abort of each call has no effect, like one that arrives before its request."""
    engine.num_ignored_aborts = NUM_SAMPLES


@pytest.mark.parametrize("moment", [nothing_yet, stream, pause, ignore_aborts])
async def test_cancel_ends_generation(mesh: Mesh, moment: object) -> None:
    assert callable(moment)
    env = mesh.write_env("long_turn", LONG_TURN)
    await asyncio.to_thread(mesh.worker, "worker-0", env)
    client, engine = mesh.client(), mesh.engine
    engine.hold()
    group_id = ask(client, NUM_SAMPLES, env)
    await engine.until(lambda: engine.num_live == NUM_SAMPLES)
    await moment(engine)
    client.cancel(group_id, "no longer needed")
    await engine.until(lambda: engine.num_live == 0)
    assert engine.num_seen("/abort_request") >= NUM_SAMPLES
    assert await take(client) == [Dropped(group_id, "cancelled: no longer needed")]
    await mesh.until(lambda: mesh.worker_status("worker-0").get("in_flight") == 0)
    engine.is_paused = False


AGENT = """
import json, os, urllib.request
head = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
body = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), head))
"""
HARNESS = f"""
from rollmesh.envs.harness import HarnessEnv

class TheEnv(HarnessEnv):
    def __init__(self):
        super().__init__(argv=[sys.executable, "-c", {AGENT!r}])

    def tasks(self, split, seed):
        yield Task(id="t")

    def score(self, task, transcript):
        return Score(reward=1.0)
"""


async def test_cancel_ends_an_agents_program_and_its_call(mesh: Mesh) -> None:
    env = mesh.write_env("agents", HARNESS)
    worker = await asyncio.to_thread(mesh.worker, "worker-0", env)
    client, engine = mesh.client(), mesh.engine
    engine.hold()
    group_id = ask(client, num_samples=2, env=env)
    await engine.until(lambda: engine.num_live == 2)
    started = psutil.Process(worker.popen.pid).children(recursive=True)
    programs = [each for each in started if AGENT in each.cmdline()]
    assert len(programs) >= 2
    client.cancel(group_id, "no longer needed")
    await engine.until(lambda: engine.num_live == 0)
    gone, left = await asyncio.to_thread(psutil.wait_procs, programs, PATIENCE_S)
    assert (len(gone), left) == (len(programs), [])
    assert await take(client) == [Dropped(group_id, "cancelled: no longer needed")]
