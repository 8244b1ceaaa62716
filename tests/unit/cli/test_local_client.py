"""Rollouts without a mesh, through a gateway that may fail."""

from pathlib import Path

from rollmesh.cli.local_client import LocalRollouts
from rollmesh.core.config import WorkerConfig
from rollmesh.core.types import Outcome, Task
from rollmesh.envs.echo import EchoEnv
from rollmesh.serve.client.gateway import Gateway
from tests.ports import free_ports


async def test_a_gateway_that_does_not_answer_ends_a_rollout_and_not_the_evaluation(
    tmp_path: Path,
) -> None:
    (port,) = free_ports(1)
    address, token = f"http://127.0.0.1:{port}", tmp_path / "token"
    token.write_text("secret" * 8)
    token.chmod(0o600)
    with Gateway(address, token) as gateway:
        settings = WorkerConfig(num_infra_retries=1)
        rollouts = LocalRollouts(EchoEnv(), gateway, "model", settings, is_relay=True)
        played = await rollouts.play(Task(id="one"), index=0, seed=0)
    assert played.record.outcome is Outcome.INFRA_ERROR
    assert address in played.record.error
