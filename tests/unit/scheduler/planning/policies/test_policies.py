"""All policies: their registration by name, their plans on random fleets, and the partition of
`static`.
"""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec
import pytest

from rollmesh.cli.main import main
from rollmesh.core.errors import ConfigError
from rollmesh.scheduler.admission.fleet_file import policy_of, read_fleet
from rollmesh.scheduler.planning import policies
from rollmesh.scheduler.planning.plan import Expand, PlanBuilder, Shrink
from rollmesh.scheduler.planning.planner import PolicyResult, plan
from rollmesh.scheduler.planning.policies import make_policy, policy_names, register_policy
from rollmesh.scheduler.planning.policies.fair import Fair, FairSettings
from rollmesh.scheduler.planning.policies.static import Static, partition
from rollmesh.scheduler.planning.state import FleetState, NodePhase, PipelinePhase, StreamProgress
from rollmesh.wire.scheduling import WorkerPhase
from tests.unit.scheduler.planning.fleets import (
    TRAIN,
    add,
    ask,
    carry_out,
    demand,
    fleet,
    settle,
    wake,
)


class LazySettings(msgspec.Struct, frozen=True):
    pause_s: Annotated[float, msgspec.Meta(ge=0.0, le=10.0)] = 1.0


@pytest.fixture
def lazy_policy() -> Iterator[None]:
    class Lazy:
        name = "lazy"
        Settings = LazySettings
        reserve_after_s = 60.0

        def __init__(self, settings: LazySettings | None = None) -> None:
            self.settings = settings or LazySettings()

        def generate(self, builder: PlanBuilder) -> PolicyResult:
            return Static().generate(builder)

    register_policy(Lazy)
    yield
    del policies._policies["lazy"]  # noqa: SLF001 - policies are never unregistered elsewhere


@pytest.mark.usefixtures("lazy_policy")
def test_a_fleet_file_selects_a_registered_policy_with_its_settings(tmp_path: Path) -> None:
    path = tmp_path / "scheduler.toml"
    path.write_text('policy = "lazy"\n[lazy]\npause_s = 3\n')
    policy = policy_of(read_fleet(path), str(path))
    assert policy.name == "lazy"
    assert policy.settings == LazySettings(pause_s=3)  # type: ignore[attr-defined]
    path.write_text("[lazy]\npause_s = 30\n")
    with pytest.raises(ConfigError, match=r"\[lazy\]\.pause_s: 30 "):
        policy_of(read_fleet(path), str(path))
    path.write_text('policy = "lazie"\n')
    with pytest.raises(ConfigError, match="did you mean 'lazy'"):
        read_fleet(path)


@pytest.mark.usefixtures("lazy_policy")
def test_a_table_of_a_policy_without_settings_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "scheduler.toml"
    path.write_text("[static]\npause_s = 3\n")
    with pytest.raises(ConfigError, match="unknown key 'static'"):
        read_fleet(path)


@pytest.mark.usefixtures("lazy_policy")
def test_the_simulator_compares_a_registered_policy(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scheduler", "simulate", "--policy", "lazy"]) == 0
    assert "lazy" in capsys.readouterr().out


@pytest.mark.usefixtures("lazy_policy")
def test_init_lists_a_registered_policy(tmp_path: Path) -> None:
    path = tmp_path / "scheduler.toml"
    assert main(["scheduler", "init", str(path)]) == 0
    assert "# one of: fair, gap-ratio, lazy, static" in path.read_text()


@pytest.mark.usefixtures("lazy_policy")
def test_every_registered_policy_is_made_by_its_name() -> None:
    assert [make_policy(name).name for name in policy_names()] == [*policy_names()]


NUM_HISTORIES, NUM_CYCLES = 12, 25
NODES = (8, 4, 8)


class History:
    """A fleet with random events."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.state = fleet(*NODES)
        for number in range(self.chance.randint(2, 7)):
            self._add(f"p{number}")

    def advance(self) -> None:
        """Let time pass and apply random events."""
        self.state.now_s += self.chance.choice((0.5, 5.0, 40.0))
        self._settle_some()
        for name in self.chance.sample(sorted(self.state.pipelines), 2):
            self._change(name)
        if self.chance.random() < 0.1:
            node = self.chance.choice(sorted(self.state.nodes))
            self.state.nodes[node].phase = self.chance.choice((NodePhase.UP, NodePhase.DRAINING))

    def _add(self, name: str) -> None:
        tp = self.chance.choice((1, 1, 2, 4))
        bundles = self.chance.sample(range(sum(NODES) // tp), self.chance.randint(1, 20 // tp))
        first = self.chance.randrange(sum(NODES) - 4)
        add(
            self.state,
            name,
            [gpu for each in sorted(bundles) for gpu in range(each * tp, each * tp + tp)],
            tp,
            range(first, first + self.chance.randint(1, 4)),
            weight=self.chance.choice((0.1, 1.0, 4.0)),
            min_gpus=self.chance.choice((0, 0, 4)),
            max_gpus=self.chance.choice((0, 0, 4, 8)),
            is_preemptible=self.chance.random() < 0.8,
            rollouts_per_worker=self.chance.choice((0, 1, 4)),
        )

    def _change(self, name: str) -> None:
        pipeline, what = self.state.pipelines[name], self.chance.randrange(6)
        if what == 0:
            demand(self.state, name, self.chance.choice((0, 1, 8, 100)))
        elif what == 1:
            pipeline.demand = None
        elif what == 2:
            completed = self.chance.randrange(9)
            pipeline.progress = {"train": StreamProgress(batch=0, target=8, completed=completed)}
        elif what == 3 and TRAIN in pipeline.holds:
            pipeline.releasing[TRAIN] = "key"
        elif what == 4 and TRAIN not in pipeline.holds and not pipeline.releasing:
            if all(each.pipeline_id != name for each in self.state.requests.values()):
                ask(self.state, name)
        else:
            phases = (PipelinePhase.ADMITTED, PipelinePhase.ADMITTED, PipelinePhase.QUARANTINED)
            pipeline.phase = self.chance.choice(phases)

    def _settle_some(self) -> None:
        rest = {WorkerPhase.WAKING: WorkerPhase.AWAKE, WorkerPhase.SLEEPING: WorkerPhase.ASLEEP}
        for name, pipeline in self.state.pipelines.items():
            for worker in pipeline.workers:
                worker.kv_tokens = self.chance.randrange(5)
                if worker.phase in rest and self.chance.random() < 0.7:
                    self.state.move_worker(name, worker.rank, rest[worker.phase])


@pytest.mark.parametrize("name", policy_names())
def test_every_plan_of_any_history_is_valid(name: str) -> None:
    num_moves = 0
    for seed in range(NUM_HISTORIES):
        history = History(seed)
        for _ in range(NUM_CYCLES):
            policy = make_policy(name)
            made = plan(history.state, policy)
            assert made == plan(history.state, policy), "deterministic"
            assert made.again_s > history.state.now_s
            carry_out(history.state, policy)
            num_moves += len(made.ops)
            history.advance()
    assert num_moves > NUM_HISTORIES * NUM_CYCLES / 4, "plans must not all be empty"


def in_the_way() -> FleetState:
    """b can use only GPU 0, where a is; a could also be on 1, where c is; 2 is open."""
    state = fleet(3)
    add(state, "a", [0, 1])
    add(state, "b", [0])
    add(state, "c", [1, 2])
    for name in "ac":
        demand(state, name, 1)
        wake(state, name, 0)
    state.now_s = 100.0
    demand(state, "b", 1)
    return state


def test_two_pipelines_move_for_one_with_a_single_bundle() -> None:
    ops = plan(in_the_way(), Fair(FairSettings(hold_s=10.0))).ops
    assert {op for op in ops if isinstance(op, Expand)} == {
        Expand("b", 0),
        Expand("a", 1),
        Expand("c", 1),
    }
    assert {(op.pipeline_id, op.for_) for op in ops if isinstance(op, Shrink)} == {
        ("a", "b/0"),
        ("c", "a/1"),
    }


def test_a_failed_trade_leaves_no_operation() -> None:
    state = in_the_way()
    add(state, "d", [2])
    demand(state, "d", 1)
    wake(state, "d", 0)
    assert plan(state, Fair(FairSettings(quantum_s=1e6, hold_s=10.0))).ops == ()


def test_static_gives_each_pipeline_its_training_gpus_and_no_gpu_two_owners() -> None:
    state = fleet(4)
    add(state, "a", range(4), train=[2, 3])
    add(state, "b", range(4), train=[0, 1])
    assert partition(state) == {"a": {2, 3}, "b": {0, 1}}


def test_static_deals_the_other_gpus_in_turn() -> None:
    state = fleet(8)
    add(state, "a", range(8), tp=2)
    add(state, "b", range(8))
    add(state, "c", range(4))
    assert partition(state) == {"a": {0, 2}, "b": {2, 6, 7}, "c": {3}}


def test_static_wakes_only_the_own_part_of_a_pipeline_with_demand() -> None:
    state = fleet(4)
    for name in ("a", "b"):
        add(state, name, range(4))
    demand(state, "a", 1000)
    made = carry_out(state, Static())
    settle(state)
    assert len(made.ops) == 2
    state.now_s = 1000.0
    assert plan(state, Static()).ops == ()
    demand(state, "b", 1)
    assert len(plan(state, Static()).ops) == 1, "it can fill no more than one"


def test_static_gives_a_later_pipeline_its_part_of_the_earlier_owners() -> None:
    state = fleet(4)
    add(state, "a", range(4))
    demand(state, "a", 1000)
    carry_out(state, Static())
    settle(state)
    add(state, "b", range(4))
    demand(state, "b", 1000)
    carry_out(state, Static())
    settle(state)
    awake = {name: partition(state)[name] for name in ("a", "b")}
    assert awake == {"a": {0, 2}, "b": {1, 3}}
    assert {gpu: owner.pipeline_id for gpu, owner in state.owners.items()} == {
        0: "a", 1: "b", 2: "a", 3: "b",
    }  # fmt: skip
