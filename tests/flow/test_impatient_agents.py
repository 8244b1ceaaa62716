"""An agent whose SDK times out and retries while all engines sleep: its turn is sampled once."""

import asyncio
from contextlib import ExitStack
from pathlib import Path

import pytest

from rollmesh.core.config import JournalConfig
from rollmesh.core.types import Outcome
from rollmesh.serve.client.client import Finished, RolloutClient
from rollmesh.testing.engine import FakeMemoryState, ScriptedEngine
from rollmesh.testing.model_folder import write_model_folder
from tests.flow.sleeping_mesh import SleepingMesh
from tests.flow.worker_mesh import ENV_HEAD, ask, byte_token, look_until, running, take

ENV = "impatient:TheEnv"
NUM_TOKENS = 8
NUM_TRIES = 3
SOURCE = f"""
import httpx, openai

async def tried(request):
    with open("tries", "a") as file:
        file.write("x")

class TheEnv(Plain):
    async def run(self, task, agent):
        http = httpx.AsyncClient(event_hooks={{"request": [tried]}}, trust_env=False)
        words = dict(base_url=agent.base_url, api_key=agent.api_key, http_client=http)
        async with openai.AsyncOpenAI(timeout=2.0, max_retries=1000, **words) as client:
            said = [{{"role": "user", "content": "hm"}}]
            await client.chat.completions.create(model="m", messages=said, max_tokens={NUM_TOKENS})
        return Transcript()
"""


@pytest.mark.slow
async def test_a_turn_that_is_retried_while_all_engines_sleep_is_sampled_once(
    tmp_path: Path,
) -> None:
    write_model_folder(tmp_path / "model")
    (tmp_path / "impatient.py").write_text(ENV_HEAD + SOURCE)
    tries = tmp_path / "tries"

    def has_given_up() -> bool:
        return tries.exists() and len(tries.read_text()) >= NUM_TRIES

    async with ScriptedEngine(byte_token, weight_version="released-0") as engine:
        engine.memory_state = FakeMemoryState.RELEASED
        with ExitStack() as stack:
            mesh = await asyncio.to_thread(begin, stack, engine.url, tmp_path)
            client = RolloutClient(mesh.router, JournalConfig(), tmp_path / "client")
            stack.callback(client.close)
            client.start()
            ask(client, num_samples=1, env=ENV)
            await asyncio.to_thread(look_until, has_given_up)
            assert not engine.num_sampled
            await mesh.scheduler.resize(True, 0)
            [finished] = await take(client)
            await asyncio.to_thread(
                stack.close
            )  # in a thread, since the engine serves from this loop
    assert isinstance(finished, Finished)
    [rollout] = finished.record.rollouts
    assert (rollout.outcome, finished.attempt) == (Outcome.COMPLETED, 1), rollout
    [turn] = [node for node in rollout.nodes if node.sampled]
    assert turn.num_tokens == sum(run.num_tokens for run in turn.policy_versions) == NUM_TOKENS


def begin(stack: ExitStack, engine: str, folder: Path) -> SleepingMesh:
    """Start a router, a coordinator and a worker that serves these agents."""
    mesh = SleepingMesh([engine], folder)
    stack.callback(mesh.end)
    asyncio.run(mesh.until_ready())
    args = ["worker", "--router", mesh.router, "--worker-id", "worker-0"]
    for setting in (f"env={ENV}", "run.folder=.", f"model.path={folder / 'model'}"):
        args += ["--set", setting]
    stack.enter_context(running(folder, *args))
    return mesh
