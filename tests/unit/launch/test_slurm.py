"""Processes are placed on the nodes of a Slurm job as [slurm] says, and away from lost nodes."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rollmesh.core.config import Config, EngineConfig, ModelConfig, SlurmConfig, WorkerConfig
from rollmesh.core.errors import AddressError, ConfigError
from rollmesh.core.orphans import MARK_VARIABLE
from rollmesh.core.process import OK, USAGE
from rollmesh.launch.hosts.base import ChildOrder
from rollmesh.launch.hosts.slurm import (
    NodeChoice,
    check_gpus,
    home_nodes,
    node_addresses,
    own_address,
    prepare,
    resolved,
    sized,
)
from rollmesh.launch.plan import plan_mesh

SCONTROL = """\
NodeName=gpu-1 Arch=x86_64 CoresPerSocket=1 NodeAddr=10.0.0.1 NodeHostName=gpu-1 OS=Linux 6.1 #1 SMP
NodeName=gpu-2 CoresPerSocket=1 NodeAddr=gpu-2.cluster NodeHostName=gpu-2 Version=22.05.8
NodeName=gpu-3 State=DOWN+CLOUD
"""
PATH = Path("runs/mesh/config.json")


def homes_of(
    num_nodes: int, slurm: SlurmConfig, num_engines: int = 1, num_workers: int = 2
) -> dict[str, str]:
    config = sized(
        Config(
            model=ModelConfig(path="m"),
            engine=EngineConfig(num_embedded=num_engines),
            worker=WorkerConfig(num_workers=num_workers),
            slurm=slurm,
        ),
        num_nodes,
    )
    return home_nodes(config, plan_mesh(config, PATH), [f"n{at}" for at in range(1, num_nodes)])


def order(role: str, num_gpus: int = 0) -> ChildOrder:
    return ChildOrder(role=role, argv=(), mark="m", num_gpus=num_gpus)


def test_router_trainer_and_dashboard_stay_on_the_first_node() -> None:
    homes = homes_of(3, SlurmConfig(), num_engines=2, num_workers=3)
    assert homes == {
        "engine-0": "n1",
        "engine-1": "n2",
        "worker-0": "n1",
        "worker-1": "n2",
        "worker-2": "n1",
    }


def test_counts_per_node_grow_with_the_job() -> None:
    slurm = SlurmConfig(engines_on_first=1, engines_per_node=2, workers_per_node=3)
    homes = [*homes_of(4, slurm).values()]
    assert {node: homes.count(node) for node in homes} == {"n1": 5, "n2": 5, "n3": 5}
    assert "engine-0" not in homes_of(4, slurm)
    assert "engine-6" in homes_of(4, slurm)


def test_servers_of_sglang_grow_with_the_job() -> None:
    engine = EngineConfig(launch="sglang")
    config = Config(engine=engine, slurm=SlurmConfig(engines_per_node=2))
    assert sized(config, 3).engine.num_servers == 4


def test_one_node_runs_everything() -> None:
    assert homes_of(1, SlurmConfig(engines_per_node=2, workers_per_node=3)) == {}
    config = Config(slurm=SlurmConfig(engines_on_first=1, engines_per_node=2, workers_per_node=3))
    assert sized(config, 1).engine.num_embedded == 3
    assert sized(config, 1).worker.num_workers == 3


def test_more_engines_than_gpus_are_refused() -> None:
    engine = EngineConfig(launch="sglang", gpus_each=4)
    slurm = SlurmConfig(nodes=3, engines_per_node=2, gpus_per_node=8)
    check_gpus(Config(engine=engine, slurm=slurm))
    with pytest.raises(ConfigError, match=r"gpus_per_node = 8.* need 12 GPUs"):
        check_gpus(
            Config(engine=engine, slurm=SlurmConfig(nodes=3, engines_per_node=3, gpus_per_node=8))
        )


def test_a_process_of_a_lost_node_starts_on_the_emptiest_other_one_for_a_while() -> None:
    homes = {"worker-0": "n1", "worker-1": "n2", "worker-2": "n3", "worker-3": "n3"}
    choice = NodeChoice(homes, avoid_s=10.0)
    assert choice.choose(order("worker-0"), now_s=0.0) == "n1"
    choice.lose("n1", now_s=1.0)
    assert choice.choose(order("worker-0"), now_s=2.0) == "n2"
    assert choice.choose(order("worker-0"), now_s=11.0) == "n1"


def test_a_process_stays_at_home_if_it_has_gpus_or_no_node_is_left() -> None:
    choice = NodeChoice({"engine-0": "n1", "worker-0": "n2"}, avoid_s=10.0)
    choice.lose("n1", now_s=1.0)
    assert choice.choose(order("engine-0", num_gpus=1), now_s=2.0) == "n1"
    assert choice.choose(order("engine-0"), now_s=2.0) == "n2"
    choice.lose("n2", now_s=3.0)
    assert choice.choose(order("worker-0"), now_s=4.0) == "n2"


def test_addresses_of_nodes_are_those_that_slurm_uses() -> None:
    addresses = {"gpu-1": "10.0.0.1", "gpu-2": "gpu-2.cluster", "gpu-3": "gpu-3"}
    assert node_addresses(SCONTROL) == addresses
    assert resolved("gpu-1", "10.0.0.1") == "10.0.0.1"
    with pytest.raises(AddressError, match="node gpu-9: no address"):
        resolved("gpu-9", "gpu-9.invalid")


def test_the_own_address_is_that_of_the_route_to_the_others() -> None:
    assert own_address([]) == "127.0.0.1"
    assert own_address(["127.0.0.1"]) == "127.0.0.1"


def test_a_node_is_prepared_only_if_it_sees_the_jobs_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mark = f"slurm-{os.getpid()}"
    assert prepare(mark, tmp_path) == OK
    assert prepare(mark, tmp_path / "7.started", within_s=0.0) == USAGE
    assert "run.folder must be on a file system that all nodes share" in capsys.readouterr().err


def test_a_node_is_prepared_by_ending_what_an_earlier_attempt_left(tmp_path: Path) -> None:
    mark = f"slurm-{os.getpid()}"
    argv = [sys.executable, "-c", "import signal; signal.pause()"]
    environment = {**os.environ, MARK_VARIABLE: f"{mark}/launch.1"}
    with subprocess.Popen(argv, env=environment) as left:
        assert prepare(mark, tmp_path) == OK
        assert left.wait(60.0) == -signal.SIGKILL
