"""Comparison of policies on traces, its bound, and the commands `simulate` and `gantt`."""

import itertools
import json
import math
from pathlib import Path

import msgspec
import pytest

from rollmesh.core.errors import UserError
from rollmesh.scheduler.planning.policies import BASELINE_POLICY
from rollmesh.scheduler.simulator.comparison import (
    Comparison,
    SummaryFigures,
    TraceResult,
    compared_policies,
    gantt,
    partition_trace,
    simulate,
    summarise,
    table_lines,
)
from rollmesh.scheduler.simulator.trace import (
    SHAPES,
    StepPhase,
    Trace,
    TracePipeline,
    WorkloadShape,
    generate_trace,
    read_trace,
)


def _pipeline(name: str, train: tuple[int, ...], tp: int = 1) -> TracePipeline:
    return TracePipeline(
        pipeline_id=name,
        clusters={"actor_train": train},
        generation=(0, 1, 2, 3),
        tp=tp,
        rollouts_s=((1.0,),),
    )


def test_each_part_is_around_the_training_gpus_of_its_pipeline() -> None:
    pipelines = (_pipeline("a", (2, 3)), _pipeline("b", (0, 1)))
    parts = partition_trace(Trace(name="x", nodes=(4,), pipelines=pipelines))
    assert [each.generation for each in parts.pipelines] == [(2, 3), (0, 1)]


def test_parts_are_whole_blocks_of_the_published_traces() -> None:
    for shape, seed in itertools.product(("mixed", "even"), range(5)):
        trace = generate_trace(SHAPES[shape], 8, seed)
        for number, pipeline in enumerate(partition_trace(trace).pipelines):
            assert pipeline.generation == tuple(range(8 * number, 8 * number + 8))


def test_bundles_stay_whole_and_exclude_the_training_gpus_of_others() -> None:
    pipelines = (_pipeline("a", (0,), tp=2), _pipeline("b", (3,), tp=1))
    parts = partition_trace(Trace(name="x", nodes=(4,), pipelines=pipelines))
    assert [each.generation for each in parts.pipelines] == [(0, 1), (2, 3)]


def test_parts_prefer_own_training_gpus_and_exclude_those_of_others() -> None:
    halves = (_pipeline("a", (1,), tp=2), _pipeline("b", (3,), tp=2))
    parts = partition_trace(Trace(name="x", nodes=(4,), pipelines=halves))
    assert [each.generation for each in parts.pipelines] == [(0, 1), (2, 3)]
    near = (_pipeline("a", (0,)), _pipeline("b", (1, 2)))
    parts = partition_trace(Trace(name="x", nodes=(4,), pipelines=near))
    assert [each.generation for each in parts.pipelines] == [(0, 3), (1, 2)]


def test_pipelines_without_a_part_share_the_whole_fleet() -> None:
    pipelines = tuple(_pipeline(f"p{number}", (0,)) for number in range(6))
    parts = partition_trace(Trace(name="x", nodes=(4,), pipelines=pipelines))
    alone = [each.generation for each in parts.pipelines if len(each.generation) == 1]
    assert sorted(alone) == [(0,), (1,), (2,), (3,)]
    assert [each.generation for each in parts.pipelines[4:]] == [(0, 1, 2, 3)] * 2


TINY = WorkloadShape(
    block_gpus=4,
    node_gpus=4,
    train_gpus=(2,),
    tp=(1, 2),
    rollouts_per_step=(24, 48),
    num_steps=(2, 4),
)
RESULT = TraceResult(
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
    comparison = Comparison(generate_trace(TINY, 1, 0))
    result = comparison.result(BASELINE_POLICY, comparison.run(BASELINE_POLICY))
    assert result.slowdowns == (1.0,)
    assert result.jain == 1.0


def test_static_is_a_partition_in_which_no_worker_is_evicted_for_another() -> None:
    comparison = Comparison(generate_trace(TINY, 3, 0))
    spans = comparison.run(BASELINE_POLICY).spans
    assert {each.pipeline_id for each in spans} == {"p0", "p1", "p2"}
    assert all(each.pipeline_id == f"p{each.gpu // 4}" for each in spans)


def test_the_bound_is_the_slowest_alone_or_the_work_whichever_is_more() -> None:
    one = TracePipeline(
        pipeline_id="a",
        clusters={"actor_train": (0,)},
        generation=(0, 1),
        rollouts_s=((10.0, 20.0),),
        phases=(StepPhase("actor_train", 30.0),),
    )
    alone = Comparison(Trace(name="x", nodes=(2,), pipelines=(one,)))
    assert alone.bound() == pytest.approx(3600 / (20.0 + 30.0) / 2)
    names = [f"p{number}" for number in range(4)]
    four = tuple(msgspec.structs.replace(one, pipeline_id=name) for name in names)
    crowd = Comparison(Trace(name="x", nodes=(2,), pipelines=four))
    assert crowd.bound() == pytest.approx(4 * 3600 / (4 * 60.0 / 2) / 2)


@pytest.mark.parametrize("seed", range(3))
def test_no_policy_exceeds_the_bound(seed: int) -> None:
    comparison = Comparison(generate_trace(TINY, 3, seed))
    bound = comparison.bound()
    for policy in compared_policies():
        result = comparison.result(policy, comparison.run(policy))
        assert 0 < result.steps_per_h_gpu <= bound
        assert 0 < result.utilisation < 1


def test_jain_is_one_for_equal_slowdowns_and_less_otherwise() -> None:
    assert RESULT.jain == pytest.approx(16 / (2 * 10))
    alike = msgspec.structs.replace(RESULT, slowdowns=(2.5, 2.5, 2.5))
    assert alike.jain == pytest.approx(1.0)
    starved = msgspec.structs.replace(RESULT, slowdowns=(1.0, math.inf))
    assert starved.jain == 0.0


def test_means_are_over_traces_and_waits_over_all_steps() -> None:
    other = msgspec.structs.replace(
        RESULT, steps_per_h_gpu=4.0, slowdowns=(2.0, 2.0), waits_s=tuple(map(float, range(20, 118)))
    )
    figures = summarise([RESULT, other])
    assert figures.steps_per_h_gpu == 3.0
    assert figures.jain == pytest.approx((0.8 + 1.0) / 2)
    assert figures.jain_worst == pytest.approx(0.8)
    assert (figures.slowdown_mean, figures.slowdown_worst) == (2.0, 3.0)
    assert (figures.wait_p50_s, figures.wait_p99_s) == (67.0, 116.0)
    assert figures.wait_next_p99_s == 0.0


def test_wait_next_excludes_the_first_step_of_a_pipeline() -> None:
    done = Comparison(trace := generate_trace(TINY, 2, 0)).run("fair")
    result = Comparison(trace).result("fair", done)
    assert len(result.waits_s) - len(result.next_waits_s) == 2
    assert sorted(
        [*result.next_waits_s, *(outcome.waits_s[0] for outcome in done.outcomes)]
    ) == sorted(result.waits_s)


def test_every_figure_has_a_row_and_every_policy_a_column() -> None:
    values = dict.fromkeys(SummaryFigures.__struct_fields__, 0.5)
    figures = SummaryFigures(**values)
    other = msgspec.structs.replace(figures, wait_p99_s=20.0)
    rows = list(table_lines({"static": figures, "fair": other}, 0.75))
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert cells[0] == ["", "static", "fair", "bound"]
    assert [row[0] for row in cells[2:]] == list(SummaryFigures.__struct_fields__)
    by_name = {row[0]: row[1:] for row in cells}
    assert by_name["steps_per_h_gpu"] == ["0.500", "0.500", "0.750"]
    assert by_name["utilisation"] == ["50.0%", "50.0%", ""]
    assert by_name["wait_p99_s"] == ["0.5", "20.0", ""]


TINY_TRACE = WorkloadShape(
    block_gpus=4,
    node_gpus=4,
    train_gpus=(2,),
    tp=(1, 2),
    rollouts_per_step=(24, 48),
    num_steps=(1, 2),
)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.json"
    path.write_bytes(msgspec.json.encode(generate_trace(TINY_TRACE, 2, 0)))
    return path


def test_a_trace_is_compared_under_all_policies_and_drawn(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simulate([str(trace), "--out", str(tmp_path / "drawn")]) == 0
    output = capsys.readouterr().out
    for word in ("static", "gap-ratio", "fair", "bound", "steps_per_h_gpu", "jain"):
        assert word in output
    names = {path.name for path in (tmp_path / "drawn").iterdir()}
    assert names == {"gantt.html", "gantt.png", "perfetto.json", "trace.json"}
    assert read_trace(tmp_path / "drawn/trace.json") == msgspec.json.decode(
        trace.read_bytes(), type=Trace
    )


def test_figures_are_printed_as_json_for_the_requested_policies(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simulate([str(trace), "--policy", "fair", "--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    assert list(output["policies"]) == ["fair"]
    assert set(output["policies"]["fair"]["slowdowns"]) == {"p0", "p1"}
    assert output["bound_steps_per_h_gpu"] >= output["policies"]["fair"]["steps_per_h_gpu"]


def test_a_mistake_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--pipelines 0"):
        simulate(["--pipelines", "0"])
    with pytest.raises(UserError, match="does not exist"):
        gantt([str(tmp_path / "none")])
