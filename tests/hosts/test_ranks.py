"""A trainer whose ranks are on two hosts, with keys; a host vanishes, and fewer ranks continue."""

import os
import sys
from contextlib import closing
from pathlib import Path

import pytest
from safetensors.torch import load_file

from rollmesh.core.process import FAILED, OK
from rollmesh.testing.network import HostNetwork
from rollmesh.wire.keys import new_keys
from tests.flow.test_ranks_elsewhere import (
    ENDS_S,
    NUM_STEPS,
    OWN,
    Job,
    check_alike,
    line_of,
    rest_of,
)
from tests.flow.test_ranks_elsewhere import alone as alone  # the fixtures
from tests.flow.test_ranks_elsewhere import model_folder as model_folder
from tests.flow.trained_mesh import model as model
from tests.hosts.host_mesh import ROUTER_PORT, HostMesh, check_whole

TRAIN = ["-m", "rollmesh", "train"]


def job_with_keys(folder: Path, model: Path) -> Job:
    """Four ranks, two of them from elsewhere."""
    new_keys(folder / "keys")
    job = Job(folder, model, num_ranks=4, num_local_ranks=2)
    job.environment["ROLLMESH_KEYS"] = str(folder / "keys" / "publisher.json")
    return job


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_ranks_continue_with_the_same_losses_after_four_lost_one_of_their_two_hosts(
    tmp_path: Path, model_folder: Path, alone: list[dict[str, float]]
) -> None:
    checkpoint = tmp_path / "checkpoint"
    with (
        HostNetwork(["host-a", "host-b"]) as network,
        closing(job_with_keys(tmp_path, model_folder)) as job,
    ):
        one, other = network["host-a"], network["host-b"]
        trainer = job.train(one, steps=(0, 10**6), written=checkpoint)
        address = line_of(trainer)["address"]
        assert address.startswith(f"tcp://{one.address}:")
        ranks = [job.join(rank, address, other) for rank in (2, 3)]
        check_alike([line_of(trainer) for _ in range(NUM_STEPS)], alone)
        saved, exported = (
            load_file(checkpoint / name / "model.safetensors") for name in ("saved", "exported")
        )
        assert saved.keys() == exported.keys()
        assert all(saved[name].equal(exported[name]) for name in saved)
        network.disconnect("host-b")
        gone = rest_of(trainer)[-1]["gone"]
        assert gone.startswith(("rank 2 on host-b (", "rank 3 on host-b ("))
        assert "all ranks have to restart" in gone
        assert one.pids() == []
        for rank in ranks:
            _, errors = rank.communicate(timeout=ENDS_S)
            assert rank.returncode == FAILED
            assert "is silent for" in errors.splitlines()[-1]
        assert other.pids() == []
        fewer = job.write_settings("fewer.json", num_ranks=2, num_local_ranks=0)
        steps = (1, NUM_STEPS - 1)
        _, *after, end = rest_of(job.train(one, steps=steps, restored=checkpoint, settings=fewer))
        assert [each["step"] for each in after] == [*range(1, NUM_STEPS)]
        check_alike(after, alone)
        assert end == {"gone": ""}


MESH_HOSTS = dict.fromkeys(("router", "engine-0", "worker-0", "trainer"), "one")
TRAINS_WITHIN_S = 200.0


def torchrun(number: int, head: str) -> list[str]:
    """The words before `-m` that start the processes of node `number`, one for each node."""
    nodes = ["--nnodes", "2", "--node-rank", str(number), "--nproc-per-node", "1"]
    return ["-m", "torch.distributed.run", *nodes, "--master-addr", head, "--master-port", "29500"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_torchrun_on_two_hosts_trains_a_mesh_and_publishes(tmp_path: Path, model: Path) -> None:
    with HostNetwork(["one", "two"]) as network:
        mesh = HostMesh(tmp_path, model, network, MESH_HOSTS, trainer={"num_steps": 2})
        with closing(mesh):
            mesh.start("router", "engine-0", "worker-0")
            environment = os.environ | {
                "OMP_NUM_THREADS": "1",
                "ROLLMESH_KEYS": str(tmp_path / "host-one" / "publisher.json"),
            }
            for number, name in enumerate(("one", "two")):
                argv = [sys.executable, *torchrun(number, network["one"].address), *TRAIN]
                argv += ["--config", str(tmp_path / "mesh.json")]
                argv += ["--router", f"tcp://{mesh.address('router')}:{ROUTER_PORT}"]
                with (tmp_path / f"node-{name}.out").open("wb") as output:
                    mesh.processes[f"node-{name}"] = network[name].start(
                        [*OWN, name, *argv], env=environment, stdout=output, stderr=output
                    )
            code = mesh.wait("node-one", TRAINS_WITHIN_S)
            assert code == OK, mesh.output("node-one")
            assert mesh.wait("node-two", ENDS_S) == OK, mesh.output("node-two")
        check_whole(mesh.run, 2)
        assert (mesh.run / "weights").is_dir()


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_rank_with_keys_of_another_mesh_is_refused_in_one_line(
    tmp_path: Path, model_folder: Path
) -> None:
    with (
        HostNetwork(["host-a", "host-b"]) as network,
        closing(job_with_keys(tmp_path, model_folder)) as job,
    ):
        address = line_of(job.train(network["host-a"]))["address"]
        new_keys(tmp_path / "others")
        job.environment["ROLLMESH_KEYS"] = str(tmp_path / "others" / "publisher.json")
        rank = job.join(2, address, network["host-b"])
        _, errors = rank.communicate(timeout=ENDS_S)
        assert rank.returncode != 0
        assert "a rank needs the trainer's own key file" in errors.splitlines()[-1]
