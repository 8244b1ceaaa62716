"""Processes are placed on the nodes of a Slurm job as [slurm] says, and away from lost nodes."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from rollmesh.core.config import (
    Config,
    EngineConfig,
    LaunchConfig,
    ModelConfig,
    SlurmConfig,
    TrainerConfig,
    WorkerConfig,
)
from rollmesh.core.errors import AddressError, ConfigError
from rollmesh.core.gpus import PLACES_VARIABLE
from rollmesh.core.orphans import MARK_VARIABLE
from rollmesh.core.process import OK, RECYCLED, USAGE
from rollmesh.launch.hosts.base import ChildOrder
from rollmesh.launch.hosts.slurm import (
    Allocation,
    NodeChoice,
    check_gpus,
    gpus_of_job,
    home_nodes,
    node_addresses,
    own_address,
    place_in_job,
    prepare,
    resolved,
    sized,
)
from rollmesh.launch.machine import (
    ChildExited,
    ChildReady,
    Notice,
    StartChild,
    SupervisionMachine,
    TimePassed,
)
from rollmesh.launch.plan import plan_mesh, plan_rank

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


def test_ranks_that_fit_no_node_fill_the_first_ones_and_the_others_serve() -> None:
    slurm = SlurmConfig(gpus_per_node=4, engines_per_node=2)
    config = sized(Config(trainer=TrainerConfig(num_ranks=6), slurm=slurm), 4)
    assert (config.trainer.local_ranks, config.engine.num_embedded) == (4, 4)
    allocation = Allocation("7", {name: f"10.0.0.{name[1]}" for name in ("n1", "n2", "n3", "n4")})
    plans, hosts = place_in_job(config, plan_mesh(config, PATH), allocation, "m")
    homes = home_nodes(config, plans, allocation.others)
    assert [role for role, node in homes.items() if node == "n2"] == ["rank-4", "rank-5"]
    assert {homes[role] for role in homes if role.startswith("engine")} == {"n3", "n4"}
    by_role = {plan.role: plan for plan in plans}
    assert (by_role["trainer"].bind, by_role["trainer"].listens) == ("10.0.0.1:0", False)
    assert by_role["rank-5"].argv[-2:] == ("--local-rank", "1")
    assert "rank-5" in hosts
    assert "trainer" not in hosts


def test_ranks_on_all_nodes_share_them_with_the_engines() -> None:
    config = Config(
        trainer=TrainerConfig(num_ranks=4, num_local_ranks=2, device="cuda"),
        engine=EngineConfig(launch="sglang", num_servers=2, gpus_each=1),
        slurm=SlurmConfig(nodes=2, gpus_per_node=4),
    )
    allocation = Allocation("7", {"n1": "10.0.0.1", "n2": "10.0.0.2"})
    plans, _ = place_in_job(sized(config, 2), plan_mesh(config, PATH), allocation, "m")
    places = [plan.variables.get(PLACES_VARIABLE) for plan in plans if plan.is_engine]
    assert places == ["2", "3"]


def test_more_ranks_than_the_nodes_have_places_for_are_refused() -> None:
    config = Config(trainer=TrainerConfig(num_ranks=6), slurm=SlurmConfig(gpus_per_node=2))
    with pytest.raises(ConfigError, match="num_ranks = 6: with 2 on a node they need 3 nodes"):
        sized(config, 2)


def test_slurm_reports_the_gpus_of_a_node() -> None:
    assert gpus_of_job({"SLURM_GPUS_ON_NODE": "8"}) == 8
    assert gpus_of_job({}) == 0
    config = Config(trainer=TrainerConfig(num_ranks=16))
    assert sized(config, 2, num_gpus=8).trainer.local_ranks == 8


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
    trainer = TrainerConfig(num_ranks=8)
    check_gpus(Config(trainer=trainer, engine=engine, slurm=slurm))
    slurm = msgspec.structs.replace(slurm, engines_on_first=1)
    with pytest.raises(ConfigError, match="node 1 of the job has 8 ranks of the trainer and 1 eng"):
        check_gpus(Config(trainer=trainer, engine=engine, slurm=slurm))
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


def test_a_rank_that_comes_before_the_trainer_restarts_does_not_count_as_dead() -> None:
    config = Config(trainer=TrainerConfig(num_ranks=2, num_local_ranks=1))
    rank = plan_rank(config, 1, num_gpus=0, local_rank=0)
    rank = msgspec.structs.replace(rank, argv=())
    machine = SupervisionMachine([rank], LaunchConfig(max_restarts=2))
    machine.step(TimePassed(), 0.0)
    machine.step(ChildReady("rank-1"), 1.0)
    assert [*map(type, machine.step(ChildExited("rank-1", -9), 2.0))] == [Notice]
    for now_s in range(20, 200, 20):
        assert machine.step(TimePassed(), now_s) == [StartChild("rank-1")]
        machine.step(ChildReady("rank-1"), now_s + 1)
        assert machine.step(ChildExited("rank-1", RECYCLED), now_s + 2) == []
    assert machine.end is None


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
