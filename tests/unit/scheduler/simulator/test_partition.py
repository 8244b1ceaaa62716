"""Fleets of equal size for each pipeline: the baseline without a scheduler."""

import itertools

from rollmesh.scheduler.simulator.partition import partition
from rollmesh.scheduler.simulator.trace import Trace, TracePipeline
from rollmesh.scheduler.simulator.workload import SHAPES, generate


def _pipeline(name: str, train: tuple[int, ...], tp: int = 1) -> TracePipeline:
    return TracePipeline(
        pipeline_id=name,
        clusters={"actor_train": train},
        generation=(0, 1, 2, 3),
        tp=tp,
        rollouts_s=((1.0,),),
    )


def test_each_has_its_share_around_where_it_trains() -> None:
    pipelines = (_pipeline("a", (2, 3)), _pipeline("b", (0, 1)))
    parts = partition(Trace(name="x", nodes=(4,), pipelines=pipelines))
    assert [each.generation for each in parts.pipelines] == [(2, 3), (0, 1)]


def test_parts_are_whole_blocks_of_the_published_traces() -> None:
    for shape, seed in itertools.product(("mixed", "even"), range(5)):
        trace = generate(SHAPES[shape], 8, seed)
        for number, pipeline in enumerate(partition(trace).pipelines):
            assert pipeline.generation == tuple(range(8 * number, 8 * number + 8))


def test_bundles_stay_whole_and_what_another_trains_on_is_left_to_it() -> None:
    pipelines = (_pipeline("a", (0,), tp=2), _pipeline("b", (3,), tp=1))
    parts = partition(Trace(name="x", nodes=(4,), pipelines=pipelines))
    assert [each.generation for each in parts.pipelines] == [(0, 1), (2, 3)]


def test_where_it_trains_comes_first_and_where_another_does_never() -> None:
    halves = (_pipeline("a", (1,), tp=2), _pipeline("b", (3,), tp=2))
    parts = partition(Trace(name="x", nodes=(4,), pipelines=halves))
    assert [each.generation for each in parts.pipelines] == [(0, 1), (2, 3)]
    near = (_pipeline("a", (0,)), _pipeline("b", (1, 2)))
    parts = partition(Trace(name="x", nodes=(4,), pipelines=near))
    assert [each.generation for each in parts.pipelines] == [(0, 3), (1, 2)]


def test_more_pipelines_than_gpus_share_after_all() -> None:
    pipelines = tuple(_pipeline(f"p{number}", (0,)) for number in range(6))
    parts = partition(Trace(name="x", nodes=(4,), pipelines=pipelines))
    alone = [each.generation for each in parts.pipelines if len(each.generation) == 1]
    assert sorted(alone) == [(0,), (1,), (2,), (3,)]
    assert [each.generation for each in parts.pipelines[4:]] == [(0, 1, 2, 3)] * 2
