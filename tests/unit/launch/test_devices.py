"""SGLang servers and the trainer see GPUs of their own, by settings or by a scheduler's grant."""

import msgspec
import pytest

from rollmesh.core.config import Config, EngineConfig, TrainerConfig
from rollmesh.core.errors import ConfigError
from rollmesh.core.gpus import PLACES_VARIABLE, devices_at, visible_gpus
from rollmesh.launch.devices import GrantedGpus, assign_devices, with_devices, with_places
from rollmesh.launch.pipeline import NodeStatus, granted_gpus
from rollmesh.launch.plan import ChildPlan, OnDeath
from rollmesh.wire.scheduling import PipelineSpec

FOUR = ("0", "1", "2", "3")


def config_of(
    num_servers: int = 2, gpus_each: int = 1, device: str = "auto", num_ranks: int = 1
) -> Config:
    engine = EngineConfig(launch="sglang", num_servers=num_servers, gpus_each=gpus_each)
    return Config(engine=engine, trainer=TrainerConfig(device=device, num_ranks=num_ranks))


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        (config_of(), {"trainer": ("0",), "engine-0": ("1",), "engine-1": ("2",)}),
        (config_of(1, 2, num_ranks=2), {"trainer": ("0", "1"), "engine-0": ("2", "3")}),
        (config_of(2, 2, "cpu"), {"engine-0": ("0", "1"), "engine-1": ("2", "3")}),
        (config_of(2, 1, "cuda:1"), {"engine-0": ("0",), "engine-1": ("2",)}),
        (config_of(2, 0), {"trainer": ("0",), "engine-0": (), "engine-1": ()}),
    ],
)
def test_the_trainer_has_the_first_gpus_and_servers_the_next(
    config: Config, wanted: dict[str, tuple[str, ...]]
) -> None:
    assert assign_devices(config, FOUR) == wanted


def test_names_of_gpus_are_those_that_launch_sees() -> None:
    devices = assign_devices(config_of(1, 1), ("GPU-a", "GPU-b"))
    assert devices == {"trainer": ("GPU-a",), "engine-0": ("GPU-b",)}


def test_an_evaluation_has_no_trainer() -> None:
    assert assign_devices(config_of(2, 2), FOUR, trains=False).keys() == {"engine-0", "engine-1"}


@pytest.mark.parametrize(
    ("config", "gpus", "line"),
    [
        (config_of(2, 2), FOUR, "num_servers = 2.*gpus_each = 2: 5 GPUs with the 1 of the trainer"),
        (config_of(1, 1), (), "1 GPUs, and this machine has 0"),
        (config_of(3, 2, "cpu"), FOUR, "6 GPUs, and this machine has 4"),
    ],
)
def test_too_few_gpus_are_refused(config: Config, gpus: tuple[str, ...], line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        assign_devices(config, gpus)


def test_embedded_engines_use_no_gpus() -> None:
    assert assign_devices(Config(), FOUR) == {}


GRANTED = GrantedGpus(engines=((2,), (0,)), trainer=(1, 3))


def test_granted_gpus_become_devices() -> None:
    wanted = {"engine-0": ("2",), "engine-1": ("0",), "trainer": ("1", "3")}
    assert assign_devices(config_of(), FOUR, GRANTED) == wanted


def test_slots_that_are_no_gpus_bind_nothing() -> None:
    assert assign_devices(Config(), (), GRANTED) == {}


def test_a_trainer_with_embedded_engines_gets_its_granted_gpus() -> None:
    config = Config(trainer=TrainerConfig(device="cuda"))
    assert assign_devices(config, FOUR, GRANTED) == {"trainer": ("1", "3")}


@pytest.mark.parametrize(
    ("config", "gpus", "line"),
    [
        (config_of(2, 2), FOUR, "engine.gpus_each = 2: the pipeline's engines have 1 GPUs"),
        (config_of(device="cuda:1"), FOUR, 'trainer.device = "cuda:1": on a shared fleet'),
        (config_of(), ("0", "1"), "engine-0: the scheduler grants GPU 2 of its node"),
    ],
)
def test_grants_that_do_not_fit_are_refused(
    config: Config, gpus: tuple[str, ...], line: str
) -> None:
    with pytest.raises(ConfigError, match=line):
        assign_devices(config, gpus, GRANTED)


def test_a_process_sees_its_devices_only() -> None:
    plans = [ChildPlan(role=each, argv=(), on_death=OnDeath.RESTART) for each in ("a", "b", "c")]
    a, b, c = with_devices(plans, {"a": ("0", "1"), "b": ()})
    assert a.variables == {"CUDA_VISIBLE_DEVICES": "0,1"}
    assert b.variables == {"CUDA_VISIBLE_DEVICES": ""}
    assert c.variables == {}


def test_servers_on_one_node_of_a_job_have_gpus_of_their_own() -> None:
    roles = ["router", "engine-0", "engine-1", "engine-2"]
    plans = [ChildPlan(role=each, argv=(), on_death=OnDeath.RESTART) for each in roles]
    homes = {"engine-1": "n2", "engine-2": "n2"}
    placed = with_places(config_of(3, 2), plans, homes, 8)
    wanted = [None, "1,2", "0,1", "2,3"]
    assert [plan.variables.get(PLACES_VARIABLE) for plan in placed] == wanted


def test_a_server_finds_its_gpus_among_those_that_its_node_shows() -> None:
    assert devices_at("2,0", ("4", "5", "6", "7")) == "6,4"
    assert devices_at("", FOUR) == ""
    with pytest.raises(ConfigError, match="GPU 4 of its node, counted from 0, which shows 4"):
        devices_at("3,4", FOUR)


@pytest.mark.parametrize(
    ("environment", "listed", "wanted"),
    [
        ({}, "GPU 0: H100 (UUID: GPU-x)\nGPU 1: H100 (UUID: GPU-y)\n", ("0", "1")),
        ({}, "", ()),
        ({"CUDA_VISIBLE_DEVICES": "3, GPU-a,-1,2"}, "GPU 0: H100\n", ("3", "GPU-a")),
        ({"CUDA_VISIBLE_DEVICES": ""}, "GPU 0: H100\n", ()),
    ],
)
def test_visible_gpus_are_those_of_cuda(
    environment: dict[str, str], listed: str, wanted: tuple[str, ...]
) -> None:
    assert visible_gpus(environment, lambda: listed) == wanted


def test_granted_gpus_of_two_machines_are_refused() -> None:
    granted = msgspec.structs.replace(GRANTED, nodes=("a", "b"))
    with pytest.raises(ConfigError, match="GPUs are on a and b, and one launch"):
        assign_devices(config_of(), FOUR, granted)
    assert assign_devices(Config(), (), granted) == {}


def test_a_node_has_its_gpus_by_their_place_in_it() -> None:
    spec = PipelineSpec(
        pipeline_id="math", clusters={"actor_train": (4, 5)}, generation=(7, 6, 5, 4), tp=2
    )
    nodes = [NodeStatus("a", (0, 1, 2, 3)), NodeStatus("b", (4, 5, 6, 7))]
    wanted = GrantedGpus(engines=((3, 2), (1, 0)), trainer=(0, 1), nodes=("b",))
    assert granted_gpus(spec, nodes) == wanted
