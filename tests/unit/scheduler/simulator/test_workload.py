"""The generator of the published results: the same parameters, the same traces."""

import hashlib
import statistics

import msgspec
import pytest

from rollmesh.scheduler.simulator.trace import Trace
from rollmesh.scheduler.simulator.workload import SHAPES, generate

FIXED = {"mixed": "e6633407f88d4075", "even": "d5908009458bdb92", "scarce": "214ddf5265438660"}
"""Of the traces that policies were tuned on; a change of one is a change of the results."""


def _digest(shape: str) -> str:
    traces = [generate(SHAPES[shape], num, seed) for num in (4, 8) for seed in range(20)]
    return hashlib.sha256(msgspec.json.encode(traces)).hexdigest()[:16]


@pytest.mark.parametrize("shape", SHAPES)
def test_traces_are_those_of_the_published_results(shape: str) -> None:
    assert _digest(shape) == FIXED[shape]


def _lengths(trace: Trace) -> list[float]:
    first = trace.pipelines[0]
    return [each for step in range(first.steps) for each in trace.rollouts(first, step)]


def test_rollouts_are_drawn_by_seed_pipeline_and_step_alone() -> None:
    trace = generate(SHAPES["mixed"], 4, 7)
    assert _lengths(trace) == _lengths(generate(SHAPES["mixed"], 4, 7))
    assert _lengths(trace) != _lengths(msgspec.structs.replace(trace, seed=8))
    first, second = trace.pipelines[:2]
    assert trace.rollouts(first, 0)[:9] != trace.rollouts(first, 1)[:9]
    assert trace.rollouts(first, 0)[:9] != trace.rollouts(second, 0)[:9]


def test_tails_are_long_and_end_at_the_cap() -> None:
    lengths = _lengths(generate(SHAPES["even"], 4, 0))
    middle = statistics.median(lengths)
    assert middle == pytest.approx(30.0, rel=0.1)
    assert statistics.quantiles(lengths, n=100)[98] > 4 * middle
    assert max(lengths) <= 240.0


def test_pipelines_train_in_a_block_of_their_own_and_generate_everywhere() -> None:
    trace = generate(SHAPES["mixed"], 8, 3)
    assert trace.num_gpus == 64
    for block, pipeline in enumerate(trace.pipelines):
        assert set(pipeline.generation) == set(range(64))
        assert {gpu // 8 for gpu in pipeline.clusters["actor_train"]} == {block}
