"""mini-swe-agent as the agent of examples/bugs: the real program, in its own environment."""

from pathlib import Path

import pytest

from examples.bugs.env import BugsEnv
from rollmesh.envs.env import Endpoint
from tests.clients.exactness import calls_of, faults
from tests.clients.harnesses import VENVS
from tests.clients.tasks import open_deployment
from tests.flow.example_scripts import mini

MINI = VENVS / "mini/bin/mini"


@pytest.mark.clients
async def test_mini_swe_agent_fixes_a_bug_and_its_samples_are_exact(tmp_path: Path) -> None:
    assert MINI.exists(), "`make clients` installs it"
    env = BugsEnv(mini=str(MINI), timeout_s=90.0)
    task = next(env.tasks("eval", 0))
    async with open_deployment(tmp_path / "model", mini) as deployment:
        opened = await deployment.gateway.open()
        transcript = await env.run(task, Endpoint(opened.base_url, opened.api_key, "policy"))
        account = await deployment.gateway.finish(opened)
        found = faults(
            calls_of(deployment.engine, deployment.agent), account["samples"], deployment.agent
        )
    assert (await env.score(task, transcript)).reward == 1.0, transcript.data["output"]
    assert not transcript.truncated
    assert (account["num_calls"], account["forks"], found) == (3, [], [])
