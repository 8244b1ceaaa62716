"""A trainer whose ranks are on two hosts, with keys; a host vanishes, and fewer ranks continue."""

import os
import sys
from contextlib import closing
from pathlib import Path

import pytest
from safetensors.torch import load_file

from rollmesh.core.process import FAILED, OK
from rollmesh.testing.host_mesh import HostMesh
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
from tests.hosts.accounts import check_whole, settings_of


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


class TorchrunMesh(HostMesh):
    """A mesh whose trainer is started by torchrun on one or two nodes."""

    def start_nodes(self, *names: str, num_ranks: int = 1) -> None:
        """Start torchrun on these hosts, with so many ranks on each."""
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "ROLLMESH_KEYS": str(self.run.parent / "host-one" / "publisher.json"),
        }
        for number, name in enumerate(names):
            nodes = ["--nnodes", str(len(names)), "--node-rank", str(number)]
            nodes += ["--nproc-per-node", str(num_ranks)]
            nodes += ["--master-addr", self.address("trainer"), "--master-port", "29500"]
            argv = [sys.executable, "-m", "torch.distributed.run", *nodes, "-m", "rollmesh"]
            argv += ["train", *self._of_mesh(), "--go-on"]
            with (self.run.parent / f"node-{name}.out").open("wb") as output:
                self.processes[f"node-{name}"] = self.network[name].start(
                    [*OWN, name, *argv], env=environment, stdout=output, stderr=output
                )


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_run_of_torchrun_that_lost_a_node_continues_on_the_other_to_its_end(
    tmp_path: Path, model: Path
) -> None:
    trainer = {"num_steps": 5, "checkpoint_steps": 2, "rank_silence_s": 6.0}
    with HostNetwork(["one", "two"]) as network:
        settings = settings_of(model)
        settings["trainer"] |= trainer
        mesh = TorchrunMesh(tmp_path, network, MESH_HOSTS, settings)
        with closing(mesh):
            mesh.start("router", "engine-0", "worker-0")
            mesh.start_nodes("one", "two")
            mesh.until_steps(2, TRAINS_WITHIN_S)
            network.vanish("two")
            assert mesh.wait("node-one", TRAINS_WITHIN_S) == FAILED
            assert "rollmesh: rank 1 on two (10.77.0.2) is gone: " in mesh.output("node-one")
            assert "trainer/process.py" not in mesh.output("node-one"), "a traceback of ours"
            mesh.start_nodes("one", num_ranks=2)
            assert mesh.wait("node-one", TRAINS_WITHIN_S) == OK, mesh.output("node-one")
        check_whole(mesh.run, 5)


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
