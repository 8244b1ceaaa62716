"""What policies are measured against, and by what figures."""

import math

import msgspec
import pytest

from rollmesh.scheduler.planning.policies import BASELINE_POLICY
from rollmesh.scheduler.simulator.comparison import (
    Comparison,
    Result,
    compared_policies,
    summary,
)
from rollmesh.scheduler.simulator.trace import Phase, Trace, TracePipeline
from rollmesh.scheduler.simulator.workload import Shape, generate

TINY = Shape(
    block_gpus=4,
    node_gpus=4,
    train_gpus=(2,),
    tp=(1, 2),
    rollouts_per_step=(24, 48),
    num_steps=(2, 4),
)
RESULT = Result(
    policy="fair",
    steps_per_h_gpu=2.0,
    utilisation=0.5,
    slowdowns=(1.0, 3.0),
    waits_s=(0.0, 10.0),
    next_waits_s=(0.0,),
    num_evictions=4,
    num_resizes=9,
    switch_share=0.1,
    num_starved=0,
)


def test_a_pipeline_alone_under_static_is_a_dedicated_fleet() -> None:
    comparison = Comparison(generate(TINY, 1, 0))
    result = comparison.result(BASELINE_POLICY, comparison.run(BASELINE_POLICY))
    assert result.slowdowns == (1.0,)
    assert result.jain == 1.0


def test_static_is_a_partition_in_which_nobody_is_evicted_for_another() -> None:
    comparison = Comparison(generate(TINY, 3, 0))
    spans = comparison.run(BASELINE_POLICY).spans
    assert {each.pipeline_id for each in spans} == {"p0", "p1", "p2"}
    assert all(each.pipeline_id == f"p{each.gpu // 4}" for each in spans)


def test_the_bound_is_the_slowest_alone_or_the_work_whichever_is_more() -> None:
    one = TracePipeline(
        pipeline_id="a",
        clusters={"actor_train": (0,)},
        generation=(0, 1),
        rollouts_s=((10.0, 20.0),),
        phases=(Phase("actor_train", 30.0),),
    )
    alone = Comparison(Trace(name="x", nodes=(2,), pipelines=(one,)))
    assert alone.bound() == pytest.approx(3600 / (20.0 + 30.0) / 2)
    names = [f"p{number}" for number in range(4)]
    four = tuple(msgspec.structs.replace(one, pipeline_id=name) for name in names)
    crowd = Comparison(Trace(name="x", nodes=(2,), pipelines=four))
    assert crowd.bound() == pytest.approx(4 * 3600 / (4 * 60.0 / 2) / 2)


@pytest.mark.parametrize("seed", range(3))
def test_no_policy_passes_the_bound(seed: int) -> None:
    comparison = Comparison(generate(TINY, 3, seed))
    bound = comparison.bound()
    for policy in compared_policies():
        result = comparison.result(policy, comparison.run(policy))
        assert 0 < result.steps_per_h_gpu <= bound
        assert 0 < result.utilisation < 1


def test_jain_is_one_where_all_are_slowed_alike_and_less_else() -> None:
    assert RESULT.jain == pytest.approx(16 / (2 * 10))
    alike = msgspec.structs.replace(RESULT, slowdowns=(2.5, 2.5, 2.5))
    assert alike.jain == pytest.approx(1.0)
    starved = msgspec.structs.replace(RESULT, slowdowns=(1.0, math.inf))
    assert starved.jain == 0.0


def test_means_are_of_traces_and_waits_of_all_steps() -> None:
    other = msgspec.structs.replace(
        RESULT, steps_per_h_gpu=4.0, slowdowns=(2.0, 2.0), waits_s=tuple(map(float, range(20, 118)))
    )
    figures = summary([RESULT, other])
    assert figures.steps_per_h_gpu == 3.0
    assert figures.jain == pytest.approx((0.8 + 1.0) / 2)
    assert figures.jain_worst == pytest.approx(0.8)
    assert (figures.slowdown_mean, figures.slowdown_worst) == (2.0, 3.0)
    assert (figures.wait_p50_s, figures.wait_p99_s) == (67.0, 116.0)
    assert figures.wait_next_p99_s == 0.0


def test_the_first_wait_of_a_pipeline_is_no_next_one() -> None:
    done = Comparison(trace := generate(TINY, 2, 0)).run("fair")
    result = Comparison(trace).result("fair", done)
    assert len(result.waits_s) - len(result.next_waits_s) == 2
    assert sorted([*result.next_waits_s, *(life.waits_s[0] for life in done.lives)]) == sorted(
        result.waits_s
    )
