"""Addresses that processes give to others: never 0.0.0.0, and for agents the public URL."""

from pathlib import Path

import pytest

from rollmesh.core.addresses import own_address, split_address
from rollmesh.serve.client.client import Finished
from rollmesh.testing.model_folder import write_model_folder
from rollmesh.wire.keys import KEYS_VARIABLE, new_keys
from tests.flow.gateway_process import serving
from tests.flow.worker_mesh import ask, ended, open_mesh, running, take

SHOWS_ITS_ADDRESS = """
class TheEnv(Plain):
    async def run(self, task, agent):
        await agent.openai().chat.completions.create(
            model=agent.model, messages=[{"role": "user", "content": "hello"}], max_tokens=2
        )
        return Transcript(data={"url": agent.base_url})

    async def score(self, task, transcript):
        return Score(reward=1.0, metrics={transcript.data["url"]: 1.0})
"""


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new_keys(tmp_path / "keys")
    monkeypatch.setenv(KEYS_VARIABLE, str(tmp_path / "keys"))


@pytest.mark.usefixtures("keys")
@pytest.mark.parametrize("advertise", ["", "gpu-1"])
def test_a_router_on_all_interfaces_keeps_its_port_and_reports_a_host_that_peers_reach(
    tmp_path: Path, advertise: str
) -> None:
    args = ["router", "--set", "router.bind=tcp://0.0.0.0:0", "--set", f"run.folder={tmp_path}"]
    args += ["--set", f"network.advertise={advertise!r}"]
    with running(tmp_path, *args) as first:
        address = first.ready.address
    assert split_address(address)[0] == (advertise or own_address())
    with running(tmp_path, *args, "--known-as", address) as again:
        assert again.ready.address == address


async def test_agents_get_the_public_url_and_programs_of_this_machine_the_local_one(
    tmp_path: Path,
) -> None:
    async with open_mesh(tmp_path) as mesh:
        env = mesh.write_env("shows", SHOWS_ITS_ADDRESS)
        args = mesh.worker_args("worker-0", env)
        args += ["--set", "interception.bind=0.0.0.0:0", "--set", "network.advertise=gpu-1"]
        args += ["--set", "interception.public_url=https://agents.example/{host}/{port}/"]
        with running(tmp_path, *args) as worker:
            host, port = split_address(worker.ready.address)
            assert host == "gpu-1"
            client = mesh.client()
            ask(client, num_samples=1, env=env)
            [finished] = await take(client)
            assert isinstance(finished, Finished)
            [rollout] = finished.record.rollouts
            assert list(rollout.metrics) == [f"https://agents.example/gpu-1/{port}/v1"]


async def test_without_a_public_url_agents_get_an_address_of_the_worker(tmp_path: Path) -> None:
    async with open_mesh(tmp_path) as mesh:
        env = mesh.write_env("shows", SHOWS_ITS_ADDRESS)
        args = [*mesh.worker_args("worker-0", env), "--set", "interception.bind=0.0.0.0:0"]
        with running(tmp_path, *args) as worker:
            client = mesh.client()
            ask(client, num_samples=1, env=env)
            [finished] = await take(client)
            assert isinstance(finished, Finished)
            assert list(finished.record.rollouts[0].metrics) == [f"{worker.ready.address}/v1"]
            assert split_address(worker.ready.address)[0] == own_address()


async def test_sessions_of_a_gateway_get_the_public_url(tmp_path: Path) -> None:
    public = ("--set", "interception.public_url=https://agents.example/{port}")
    relay = ("--capture", "relay", "--engine", "http://127.0.0.1:9/v1")
    async with serving(tmp_path, *relay, *public) as gateway:
        opened = await gateway.open()
        base = f"https://agents.example/{split_address(gateway.address)[1]}"
        assert opened["base_url"] == f"{base}/v1"
        assert opened["path_url"].startswith(f"{base}/s/")


async def test_a_public_url_that_agents_cannot_use_ends_a_worker_in_one_line(
    tmp_path: Path,
) -> None:
    model = write_model_folder(tmp_path / "model")
    args = ["worker", "--router", "tcp://127.0.0.1:1", "--env", "echo", "--model-dir", str(model)]
    args += ["--set", "interception.public_url=http://{ip}:{port}"]
    code, err = await ended(args, tmp_path)
    assert code == 2
    assert "interception: public_url: http://{ip}" in err
    assert "{ip} is unknown; write {host} and {port}" in err
    assert len(err.splitlines()) == 1
