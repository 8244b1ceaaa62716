"""Trace files are checked, and generated traces are a function of their seed."""

import hashlib
import statistics
from pathlib import Path

import msgspec
import pytest

from rollmesh.core.errors import UserError
from rollmesh.scheduler.simulator.trace import (
    SHAPES,
    StepPhase,
    Trace,
    TracePipeline,
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


def test_a_spec_says_what_the_trace_says() -> None:
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
def test_what_cannot_run_is_refused_in_one_line(
    tmp_path: Path, changes: dict[str, object], output: str
) -> None:
    with pytest.raises(UserError, match=output) as refused:
        read_trace(_write(tmp_path, msgspec.structs.replace(GOOD, **changes)))
    assert "pipeline a" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_names_that_stand_twice_and_files_that_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="two pipelines are called a"):
        read_trace(_write(tmp_path, GOOD, GOOD))
    with pytest.raises(UserError, match="cannot read"):
        read_trace(tmp_path / "none.json")
    (tmp_path / "trace.json").write_text("{")
    with pytest.raises(UserError, match="is not a trace"):
        read_trace(tmp_path / "trace.json")


def test_the_example_is_a_trace() -> None:
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
