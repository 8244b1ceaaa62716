"""The plan names the right processes with the right arguments."""

from pathlib import Path

import pytest

from rollmesh.core.config import (
    Config,
    DashboardConfig,
    EngineConfig,
    ModelConfig,
    RouterConfig,
    RunConfig,
    TrainerConfig,
    WorkerConfig,
)
from rollmesh.core.share import Share
from rollmesh.launch.plan import (
    ChildPlan,
    OnDeath,
    StartWeights,
    fill,
    for_cluster,
    on_network,
    plan_mesh,
    plan_router,
    roles_in,
    start_weights,
    with_local_ranks,
    with_router_on,
)

CONFIG = Config(model=ModelConfig(path="some/model"), worker=WorkerConfig(num_workers=3))
PATH = Path("runs/mesh/config.json")
SHARE = Share("tcp://h:7070", "math")
EARLIER = StartWeights(Path("some/model"))


def by_role(plans: list[ChildPlan]) -> dict[str, ChildPlan]:
    return {plan.role: plan for plan in plans}


def test_a_plan_has_engines_a_router_workers_a_trainer_and_a_page() -> None:
    plans = by_role(plan_mesh(CONFIG, PATH))
    workers = ["worker-0", "worker-1", "worker-2"]
    assert list(plans) == ["engine-0", "router", *workers, "trainer", "dashboard"]
    assert plans["worker-1"].needs == ("router",)
    assert plans["worker-1"].argv[-2:] == ("--worker-id", "worker-1")
    assert plans["trainer"].on_death is OnDeath.FINISH


def test_the_router_starts_before_the_engine_with_its_address() -> None:
    router = by_role(plan_mesh(CONFIG, PATH))["router"]
    assert router.needs == ()
    assert fill(router.argv, {"engine-0": "http://h:1"})[-2:] == ("--engine", "http://h:1")


def test_the_next_router_listens_where_the_last_one_did() -> None:
    router = by_role(plan_mesh(CONFIG, PATH))["router"]
    assert router.on_death is OnDeath.RESTART
    assert fill(router.again, {"router": "tcp://h:1"}) == ("--known-as", "tcp://h:1")


def test_an_engine_that_dies_does_not_end_the_run() -> None:
    assert by_role(plan_mesh(CONFIG, PATH))["engine-0"].on_death is OnDeath.RESTART


def test_a_users_engines_replace_the_embedded_one() -> None:
    config = Config(engine=EngineConfig(urls=("http://a:1", "http://b:2")))
    plans = by_role(plan_mesh(config, PATH))
    assert not any(role.startswith("engine") for role in plans)
    words = plans["router"].argv
    assert words[-4:] == ("--engine", "http://a:1", "--engine", "http://b:2")


SGLANG = Config(
    model=CONFIG.model, engine=EngineConfig(launch="sglang", num_servers=2, gpus_each=4)
)


def test_sglang_servers_are_watched_on_reserved_ports() -> None:
    plans = by_role(plan_mesh(SGLANG, PATH, resumed=StartWeights(Path("w/v000007"), 7)))
    engine = plans["engine-1"]
    words = " ".join(engine.argv)
    assert "engine sglang --config runs/mesh/config.json --model-dir w/v000007" in words
    assert words.endswith("--weight-version 7 --role engine-1")
    assert engine.again[-2:] == ("--newest-of", "runs/mesh/weights")
    assert (engine.listens, engine.num_gpus) == (False, 4)
    assert engine.ready_timeout_s > SGLANG.engine.load_timeout_s
    assert plans["router"].argv[-4:] == ("--engine", "{engine-0}", "--engine", "{engine-1}")


def test_a_trainer_waits_for_the_load_of_sglang_servers() -> None:
    assert by_role(plan_mesh(SGLANG, PATH))["trainer"].gate == ("engine-0", "engine-1")
    assert by_role(plan_mesh(CONFIG, PATH))["trainer"].gate == ()


def test_roles_that_need_the_model_wait_until_it_is_made() -> None:
    plans = by_role(plan_mesh(CONFIG, PATH, make_model=("make-model", "some/model")))
    waiting = [role for role, plan in plans.items() if "warm-start" in plan.gate]
    assert waiting == ["engine-0", "worker-0", "worker-1", "worker-2", "trainer"]
    assert not plans["warm-start"].reports


def test_the_page_may_be_disabled() -> None:
    config = Config(dashboard=DashboardConfig(enabled=False))
    assert "dashboard" not in by_role(plan_mesh(config, PATH))


def test_on_a_shared_fleet_a_coordinator_comes_before_the_trainer() -> None:
    plans = by_role(plan_mesh(CONFIG, PATH, share=SHARE))
    coordinator, trainer = plans["coordinator"], plans["trainer"]
    assert coordinator.on_death is OnDeath.RESTART
    assert (coordinator.needs, trainer.gate) == (("router",), ("coordinator",))
    words = " ".join(coordinator.argv)
    assert "coordinator --config runs/mesh/config.json" in words
    for text in (words, " ".join(trainer.argv)):
        assert " --scheduler tcp://h:7070 --pipeline math" in text
    assert coordinator.argv[-2:] == ("--weights", "runs/mesh/weights")
    assert all("--asleep" in plans[role].argv for role in ("engine-0", "router"))


def test_a_coordinator_and_the_router_know_the_engines_in_one_order() -> None:
    config = Config(model=CONFIG.model, engine=EngineConfig(num_embedded=3))
    plans = by_role(plan_mesh(config, PATH, share=SHARE))
    engines = ["--engine", "{engine-0}", "--engine", "{engine-1}", "--engine", "{engine-2}"]
    assert [*plans["router"].argv[-6:]] == engines
    assert [*plans["coordinator"].argv[-8:-2]] == engines


def test_a_run_that_shares_nothing_has_no_coordinator() -> None:
    plans = by_role(plan_mesh(CONFIG, PATH))
    assert "coordinator" not in plans
    assert "--scheduler" not in plans["trainer"].argv
    assert not any("--asleep" in plan.argv for plan in plans.values())


def test_every_need_names_a_role() -> None:
    plans = by_role(plan_mesh(CONFIG, PATH, make_model=("make-model",), share=SHARE))
    assert {role for plan in plans.values() for role in (*plan.needs, *plan.gate)} <= plans.keys()


def test_only_whole_arguments_are_replaced() -> None:
    assert fill(("a{b}", "{b}"), {"b": "tcp://x"}) == ("a{b}", "tcp://x")


def test_an_unknown_address_is_a_bug() -> None:
    with pytest.raises(KeyError):
        fill(("{unknown}",), {})


def test_engines_of_a_resumed_run_start_with_its_newest_weights() -> None:
    plans = by_role(
        plan_mesh(CONFIG, PATH, resumed=StartWeights(Path("runs/mesh/weights/v000007"), 7))
    )
    engine = plans["engine-0"]
    words = " ".join(engine.argv)
    assert "--model-dir runs/mesh/weights/v000007 --weight-version 7" in words
    assert engine.again[:4] == ("--model-dir", "some/model", "--weight-version", "0")


def test_a_restarted_engine_starts_with_the_newest_weights_of_the_run() -> None:
    again = by_role(plan_mesh(CONFIG, PATH))["engine-0"].again
    assert again[-2:] == ("--newest-of", "runs/mesh/weights")


def test_a_resumed_run_does_not_sample_from_unpublished_weights() -> None:
    new, again = (by_role(plan_mesh(CONFIG, PATH, resumed=each)) for each in (None, EARLIER))
    assert "--least-version" not in new["router"].argv
    assert " --least-version 1 " in " ".join(again["router"].argv)
    assert again["trainer"].argv == new["trainer"].argv  # the trainer finds its checkpoint itself


FILES = ("config.json", "tokenizer.json", "model.safetensors")


@pytest.fixture
def unpublished(tmp_path: Path) -> Config:
    return Config(
        run=RunConfig(name="demo", folder=str(tmp_path)), model=ModelConfig(path="the/model")
    )


def write(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).write_text("")
    return folder


def test_a_run_that_published_nothing_starts_with_its_model(unpublished: Config) -> None:
    assert start_weights(unpublished) == StartWeights(Path("the/model"), 0)


def test_the_newest_folder_with_a_complete_model_is_used(unpublished: Config) -> None:
    weights = unpublished.run_folder() / "weights"
    write(weights / "v000009", *FILES)
    newest = write(weights / "v000010", *FILES)
    write(weights / "v000011", "adapter_config.json", "adapter_model.safetensors")
    write(weights / "v000012.part", *FILES)
    write(weights / "v000013", "config.json", "tokenizer.json")
    assert start_weights(unpublished) == StartWeights(newest, 10)


def test_ranks_that_fit_no_node_have_places_of_their_own() -> None:
    config = Config(trainer=TrainerConfig(num_ranks=4))
    config = with_local_ranks(config, largest_gpus=2)
    plans = {plan.role: plan for plan in for_cluster(config, [trainer_plan()], num_gpus=8)}
    assert list(plans) == ["trainer", "rank-1", "rank-2", "rank-3"]
    assert [plan.num_gpus for plan in plans.values()] == [1, 1, 1, 1]
    assert roles_in(plans["rank-1"].argv) == ["trainer"]
    assert plans["rank-1"].key_name == "trainer"


@pytest.mark.parametrize(("largest_gpus", "num_gpus"), [(0, 0), (4, 4)])
def test_ranks_that_fit_a_node_are_the_trainers_own(largest_gpus: int, num_gpus: int) -> None:
    config = Config(trainer=TrainerConfig(num_ranks=4))
    config = with_local_ranks(config, largest_gpus)
    [plan] = for_cluster(config, [trainer_plan()], num_gpus)
    assert (plan.num_gpus, plan.bind) == (num_gpus, "")


@pytest.mark.parametrize(
    ("bind", "words"),
    [("tcp://127.0.0.1:0", ["--bind", "tcp://10.0.0.1:0"]), ("tcp://10.1.0.1:5555", [])],
)
def test_a_router_listens_for_other_nodes_and_the_settings_keep_no_address(
    bind: str, words: list[str]
) -> None:
    config = on_network(Config(router=RouterConfig(bind=bind)))
    assert config.router.bind == bind
    [plan] = with_router_on("10.0.0.1", config, [plan_router(config, ())])
    assert [*plan.argv[len(plan_router(config, ()).argv) :]] == words


def trainer_plan() -> ChildPlan:
    return ChildPlan(role="trainer", argv=("train",), on_death=OnDeath.FINISH)
