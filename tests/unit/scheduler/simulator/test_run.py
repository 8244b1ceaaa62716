"""Traces as files and as generated workloads, and their simulation to the second."""

import hashlib
import itertools
import statistics
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from rollmesh.core.errors import UserError
from rollmesh.scheduler.planning.plan import PlanBuilder
from rollmesh.scheduler.planning.planner import PolicyResult, SchedulingPolicy
from rollmesh.scheduler.planning.policies import make_policy, policy_names
from rollmesh.scheduler.simulator.charts import GpuUse, Span
from rollmesh.scheduler.simulator.fleet import EventQueue
from rollmesh.scheduler.simulator.run import RolloutQueue, SimulatedRun, simulate_trace
from rollmesh.scheduler.simulator.trace import (
    SHAPES,
    StepPhase,
    SwitchCosts,
    Trace,
    TracePipeline,
    WorkloadShape,
    generate_trace,
    read_trace,
)

EXAMPLE = Path(__file__).parents[4] / "benchmarks/traces/two.json"
GOOD = TracePipeline(
    pipeline_id="a",
    clusters={"actor_train": (0,)},
    generation=(0, 1),
    rollouts_s=((1.0, 2.0), (3.0,)),
    phases=(StepPhase("actor_train", 5.0),),
)


def _write(folder: Path, *pipelines: TracePipeline) -> Path:
    path = folder / "trace.json"
    path.write_bytes(msgspec.json.encode(Trace(name="x", nodes=(2,), pipelines=pipelines)))
    return path


def test_a_trace_is_read_as_it_was_written(tmp_path: Path) -> None:
    trace = read_trace(_write(tmp_path, GOOD))
    assert trace.pipelines == (GOOD,)
    assert (trace.num_gpus, GOOD.steps) == (2, 2)
    assert trace.rollouts(GOOD, 1) == (3.0,)


def test_a_pipeline_spec_equals_its_trace() -> None:
    spec = msgspec.structs.replace(GOOD, tp=2, weight=2.5, min_gpus=2).spec()
    assert (spec.pipeline_id, spec.tp, spec.weight, spec.min_gpus) == ("a", 2, 2.5, 2)
    assert spec.clusters == {"actor_train": (0,)}


@pytest.mark.parametrize(
    ("changes", "output"),
    [
        ({"generation": (0, 2)}, "GPU 2"),
        ({"tp": 3}, "tp = 3"),
        ({"rollouts_s": ()}, "`lengths`"),
        ({"rollouts_per_worker": 0}, "`rollouts_per_worker`"),
        ({"phases": (StepPhase("critic", 1.0),)}, "cluster critic"),
    ],
)
def test_a_trace_that_cannot_run_is_refused_in_one_line(
    tmp_path: Path, changes: dict[str, object], output: str
) -> None:
    with pytest.raises(UserError, match=output) as refused:
        read_trace(_write(tmp_path, msgspec.structs.replace(GOOD, **changes)))
    assert "pipeline a" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_duplicate_names_and_invalid_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="two pipelines are called a"):
        read_trace(_write(tmp_path, GOOD, GOOD))
    with pytest.raises(UserError, match="cannot read"):
        read_trace(tmp_path / "none.json")
    (tmp_path / "trace.json").write_text("{")
    with pytest.raises(UserError, match="is not a trace"):
        read_trace(tmp_path / "trace.json")


def test_the_example_is_a_valid_trace() -> None:
    assert [each.steps for each in read_trace(EXAMPLE).pipelines] == [6, 4]


FIXED = {"mixed": "e6633407f88d4075", "even": "d5908009458bdb92", "scarce": "214ddf5265438660"}
"""Hashes of the traces that policies were tuned on; a change of one changes the results."""


def _digest(shape: str) -> str:
    traces = [generate_trace(SHAPES[shape], num, seed) for num in (4, 8) for seed in range(20)]
    return hashlib.sha256(msgspec.json.encode(traces)).hexdigest()[:16]


@pytest.mark.parametrize("shape", SHAPES)
def test_traces_are_those_of_the_published_results(shape: str) -> None:
    assert _digest(shape) == FIXED[shape]


def _lengths(trace: Trace) -> list[float]:
    first = trace.pipelines[0]
    return [each for step in range(first.steps) for each in trace.rollouts(first, step)]


def test_rollouts_are_drawn_by_seed_pipeline_and_step_alone() -> None:
    trace = generate_trace(SHAPES["mixed"], 4, 7)
    assert _lengths(trace) == _lengths(generate_trace(SHAPES["mixed"], 4, 7))
    assert _lengths(trace) != _lengths(msgspec.structs.replace(trace, seed=8))
    first, second = trace.pipelines[:2]
    assert trace.rollouts(first, 0)[:9] != trace.rollouts(first, 1)[:9]
    assert trace.rollouts(first, 0)[:9] != trace.rollouts(second, 0)[:9]


def test_tails_are_long_and_end_at_the_cap() -> None:
    lengths = _lengths(generate_trace(SHAPES["even"], 4, 0))
    middle = statistics.median(lengths)
    assert middle == pytest.approx(30.0, rel=0.1)
    assert statistics.quantiles(lengths, n=100)[98] > 4 * middle
    assert max(lengths) <= 240.0


def test_pipelines_train_in_a_block_of_their_own_and_generate_everywhere() -> None:
    trace = generate_trace(SHAPES["mixed"], 8, 3)
    assert trace.num_gpus == 64
    for block, pipeline in enumerate(trace.pipelines):
        assert set(pipeline.generation) == set(range(64))
        assert {gpu // 8 for gpu in pipeline.clusters["actor_train"]} == {block}


class _Step:
    def __init__(self, per_worker: int) -> None:
        self.events = EventQueue()
        self.ends_s: list[float] = []
        costs = SwitchCosts(reprefill_s=3.0, kv_tokens_per_s=10.0)
        self.rollouts = RolloutQueue(self.events, costs, per_worker, self._ended)

    def _ended(self) -> None:
        self.ends_s.append(self.events.now_s)

    def run(self, until_s: float = 1e9) -> None:
        self.events.run(until_s)


def test_the_least_loaded_worker_gets_the_next_rollout() -> None:
    step = _Step(per_worker=2)
    step.rollouts.woke(0)
    step.rollouts.woke(1)
    step.rollouts.start((10.0, 20.0))
    step.run(5.0)
    step.events.at(5.0, lambda: None)
    step.run(5.0)
    assert (step.rollouts.kv_tokens(0), step.rollouts.kv_tokens(1)) == (50, 50)


def test_rollouts_wait_for_a_free_slot_and_for_the_first_worker() -> None:
    step = _Step(per_worker=1)
    step.rollouts.start((10.0, 20.0, 30.0))
    step.run(100.0)
    assert step.ends_s == []
    step.rollouts.woke(0)
    step.run()
    assert step.ends_s == [10.0, 30.0, 60.0]


def test_rollouts_of_a_worker_that_sleeps_resume_first_and_end_once() -> None:
    step = _Step(per_worker=1)
    step.rollouts.woke(0)
    step.rollouts.start((10.0, 50.0))
    step.events.at(4.0, lambda: step.rollouts.woke(1))
    step.events.at(6.0, lambda: step.ends_s.append(-step.rollouts.sleeps(0)))
    step.run()
    # evicted at 6 with 4 s left and 3 s to pay; engine 1 has the other from 4 to 54
    assert step.ends_s == [-1, 54.0, 54.0 + 4.0 + 3.0]
    assert step.rollouts.served_s == 10.0 + 50.0 + 3.0


def test_evicted_rollouts_precede_new_ones() -> None:
    step = _Step(per_worker=1)
    step.rollouts.woke(0)
    step.rollouts.start((10.0, 50.0))
    step.events.at(6.0, lambda: step.ends_s.append(-step.rollouts.sleeps(0)))
    step.events.at(7.0, lambda: step.rollouts.woke(0))
    step.run()
    assert step.ends_s == [-1, 14.0, 64.0]


def test_an_ended_rollout_is_not_lost() -> None:
    step = _Step(per_worker=2)
    step.events.at(2.0, lambda: step.rollouts.woke(0))
    step.events.at(2.0, lambda: step.rollouts.start((4.0, 50.0, 50.0)))
    step.events.at(10.0, lambda: step.ends_s.append(step.rollouts.kv_tokens(0)))
    step.run(10.0)
    assert step.ends_s == [6.0, (8.0 + 4.0) * 10]


def test_an_idle_worker_loses_nothing_when_it_sleeps() -> None:
    step = _Step(per_worker=4)
    step.rollouts.woke(0)
    assert step.rollouts.kv_tokens(0) == 0
    assert step.rollouts.sleeps(0) == 0


TINY = WorkloadShape(
    block_gpus=4,
    node_gpus=4,
    train_gpus=(2,),
    tp=(1, 2),
    rollouts_per_step=(24, 48),
    arrival_s=(0.0, 300.0),
    num_steps=(2, 4),
)


class TakesWhatIsOpen:
    """Wake every worker that may wake; no engine gives way to another."""

    name = "open"
    reserve_after_s = 600.0

    def generate(self, builder: PlanBuilder) -> PolicyResult:
        for pipeline_id, pipeline in builder.state.pipelines.items():
            for worker in pipeline.workers if pipeline.demand else ():
                is_open = all(builder.is_open(gpu) for gpu in worker.gpus)
                if is_open and builder.can_expand(pipeline_id, worker):
                    builder.expand(pipeline_id, worker)
        return PolicyResult()


def _alone() -> TracePipeline:
    return TracePipeline(
        pipeline_id="a",
        clusters={"actor_train": (0,)},
        generation=(0, 1),
        rollouts_s=((10.0, 20.0, 30.0), (8.0,)),
        phases=(StepPhase("actor_train", 40.0),),
    )


def _trace(*pipelines: TracePipeline, num_gpus: int = 2) -> Trace:
    costs = SwitchCosts(sleep_s=5.0, wake_s=15.0, reprefill_s=3.0)
    return Trace(name="x", nodes=(num_gpus,), pipelines=pipelines, costs=costs)


def test_two_steps_of_one_pipeline_are_exact_to_the_second() -> None:
    # 0-15 both wake; 15-25 and 25-55 on engine 0, 15-35 on engine 1; 55-60 engine 0 goes to sleep;
    # 60-100 trains; 100-108 on engine 1, which is awake; from 100 to 115 engine 0 wakes, for
    # nothing, and is waited for; 115-120 it goes to sleep; 120-160 trains.
    done = simulate_trace(_trace(_alone()), TakesWhatIsOpen())
    assert done.ended_s == 160.0
    assert done.outcomes[0].waits_s == (15.0, 0.0)
    assert done.outcomes[0].num_steps == 2
    on_first = [(each.use, each.start_s, each.end_s) for each in done.spans if each.gpu == 0]
    assert on_first == [
        (GpuUse.WAKE, 0.0, 15.0),
        (GpuUse.SERVE, 15.0, 55.0),
        (GpuUse.SLEEP, 55.0, 60.0),
        (GpuUse.FIXED, 60.0, 100.0),
        (GpuUse.WAKE, 100.0, 115.0),
        (GpuUse.SLEEP, 115.0, 120.0),
        (GpuUse.FIXED, 120.0, 160.0),
    ]
    # engine 1 goes to sleep at the end
    assert (done.num_resizes, done.num_evictions) == (5 + 1, 0)
    assert done.switch_gpu_s == 3 * 15.0 + 3 * 5.0


def test_an_evicted_rollout_resumes_elsewhere_and_recomputes_its_kv() -> None:
    rolls = msgspec.structs.replace(_alone(), rollouts_s=((100.0,),), phases=())
    trains = TracePipeline(
        pipeline_id="b",
        clusters={"actor_train": (0,)},
        generation=(2,),
        rollouts_s=((1.0,),),
        phases=(StepPhase("actor_train", 10.0),),
    )
    trace = _trace(rolls, trains, num_gpus=3)
    done = simulate_trace(trace, TakesWhatIsOpen())
    ends = {outcome.pipeline_id: outcome.ended_s for outcome in done.outcomes}
    assert ends == {"a": 16.0 + 99.0 + 3.0, "b": 16.0 + 5.0 + 10.0}
    assert done.num_evictions == 1
    work_gpu_s = sum(trace.work_gpu_s(each, 1) for each in trace.pipelines)
    assert done.served_gpu_s == work_gpu_s + 3.0


def _runs() -> Iterator[tuple[Trace, str, SimulatedRun]]:
    for seed, policy in itertools.product(range(3), policy_names()):
        trace = generate_trace(TINY, 3, seed)
        yield trace, policy, simulate_trace(trace, make_policy(policy))


@pytest.fixture(scope="module")
def runs() -> list[tuple[Trace, str, SimulatedRun]]:
    return list(_runs())


def test_every_pipeline_does_all_its_steps_under_every_policy(
    runs: list[tuple[Trace, str, SimulatedRun]],
) -> None:
    for trace, _, done in runs:
        assert [outcome.num_steps for outcome in done.outcomes] == [
            each.steps for each in trace.pipelines
        ]
        assert all(len(outcome.waits_s) == outcome.num_steps for outcome in done.outcomes)


def test_work_is_neither_lost_nor_added(runs: list[tuple[Trace, str, SimulatedRun]]) -> None:
    for trace, _, done in runs:
        work_gpu_s = sum(trace.work_gpu_s(each, each.steps) for each in trace.pipelines)
        again_gpu_s = done.served_gpu_s - work_gpu_s
        most = done.num_evictions * trace.costs.reprefill_s * max(p.tp for p in trace.pipelines)
        assert -1e-6 <= again_gpu_s <= most + 1e-6
        assert (again_gpu_s > 1.0) == (done.num_evictions > 0)
        fixed_s = sum(each.end_s - each.start_s for each in done.spans if each.use is GpuUse.FIXED)
        assert fixed_s == pytest.approx(sum(p.fixed_gpu_s * p.steps for p in trace.pipelines))


def test_no_gpu_has_two_users_at_once(runs: list[tuple[Trace, str, SimulatedRun]]) -> None:
    for _, _, done in runs:
        for _, group in itertools.groupby(done.spans, key=lambda span: span.gpu):
            for one, then in itertools.pairwise(group):
                assert one.end_s <= then.start_s


def test_a_switch_takes_the_time_that_the_trace_gives(
    runs: list[tuple[Trace, str, SimulatedRun]],
) -> None:
    def of(use: GpuUse, done: SimulatedRun) -> list[Span]:
        return [each for each in done.spans if each.use is use]

    for trace, _, done in runs:
        for use, seconds in (
            (GpuUse.WAKE, trace.costs.wake_s),
            (GpuUse.SLEEP, trace.costs.sleep_s),
        ):
            ended = [each for each in of(use, done) if each.end_s < done.ended_s]
            assert ended
            assert all(each.end_s - each.start_s == pytest.approx(seconds) for each in ended)


def test_a_run_is_a_function_of_trace_and_policy() -> None:
    trace = generate_trace(TINY, 3, 1)
    policies: list[SchedulingPolicy] = [make_policy("fair"), make_policy("fair")]
    one, other = (simulate_trace(trace, policy) for policy in policies)
    assert one == other
    assert one != simulate_trace(msgspec.structs.replace(trace, seed=2), make_policy("fair"))


def test_a_pipeline_that_never_gets_an_engine_is_reported_as_starved() -> None:
    first = msgspec.structs.replace(_alone(), phases=())
    second = msgspec.structs.replace(first, pipeline_id="b", arrival_s=1.0)

    class Hoards(TakesWhatIsOpen):
        """The first pipeline keeps everything, because the others are forgotten."""

        def generate(self, builder: PlanBuilder) -> PolicyResult:
            if "b" in builder.state.pipelines:
                return PolicyResult()
            return super().generate(builder)

    done = simulate_trace(_trace(first, second), Hoards())
    assert [outcome.ended_s is None for outcome in done.outcomes] == [False, True]
    assert done.outcomes[1].waits_s[-1] > 0
