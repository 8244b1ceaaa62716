"""Placement of pipelines, and errors for device maps that cannot be."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmesh.core.errors import UserError
from rollmesh.scheduler.planning.placement import PlacementRequest, check, place
from rollmesh.scheduler.planning.state import FleetState, GpuNode
from rollmesh.wire.scheduling import PipelineSpec
from tests.unit.scheduler.planning.fleets import add, fleet


def spec_of(request: PlacementRequest, state: FleetState) -> PipelineSpec:
    clusters, generation = place(request, state)
    return PipelineSpec(
        pipeline_id=request.pipeline_id, clusters=clusters, generation=generation, tp=request.tp
    )


def settle_in(state: FleetState, request: PlacementRequest) -> PipelineSpec:
    spec = spec_of(request, state)
    check(spec, state)
    state.add_pipeline(spec)
    return spec


def test_pipelines_train_apart_and_generate_together() -> None:
    state = fleet(4)
    request = PlacementRequest(pipeline_id="p", clusters={"actor_train": 2}, generation=4)
    first = settle_in(state, request)
    second = settle_in(
        state, PlacementRequest(pipeline_id="q", clusters={"actor_train": 2}, generation=4)
    )
    assert first.generation == second.generation == (0, 1, 2, 3)
    assert first.clusters == {"actor_train": (0, 1)}
    assert second.clusters == {"actor_train": (2, 3)}


def test_a_pipeline_is_placed_whole_on_the_emptiest_node_with_room() -> None:
    state = fleet(4, 4, 2)
    add(state, "old", generation=range(4))
    assert spec_of(PlacementRequest(pipeline_id="p", generation=2, tp=2), state).generation == (
        4,
        5,
        6,
        7,
    )
    assert spec_of(PlacementRequest(pipeline_id="p", generation=2), state).generation == (4, 5)


def test_a_node_with_room_for_all_comes_before_emptier_ones_that_have_not() -> None:
    state = fleet(4, 2, 2)
    add(state, "old", generation=range(4))
    assert spec_of(PlacementRequest(pipeline_id="p", generation=4), state).generation == (
        0,
        1,
        2,
        3,
    )


def test_the_clusters_of_a_pipeline_are_placed_apart_where_there_is_room() -> None:
    request = PlacementRequest(
        pipeline_id="p", clusters={"actor_train": 2, "critic": 2}, generation=4
    )
    assert spec_of(request, fleet(4)).clusters == {"actor_train": (0, 1), "critic": (2, 3)}


def test_a_pipeline_that_fits_no_node_is_spread_over_the_emptiest() -> None:
    state = fleet(4, 4, 4)
    add(state, "old", generation=range(4, 8))
    assert spec_of(PlacementRequest(pipeline_id="p", generation=8), state).generation == (
        *range(4),
        *range(8, 12),
    )


def test_a_worker_is_never_placed_on_two_nodes() -> None:
    state = fleet(3, 3)
    spec = spec_of(PlacementRequest(pipeline_id="p", generation=2, tp=2), state)
    assert spec.generation == (0, 1, 3, 4)
    with pytest.raises(UserError, match=r"3 workers of tp = 2 do not fit, 2 do on the 2 nodes"):
        place(PlacementRequest(pipeline_id="p", generation=3, tp=2), state)


def test_only_nodes_with_all_labels_that_are_up_are_used() -> None:
    state = fleet(2)
    state.add_node(GpuNode(name="big", gpus=(2, 3), labels=("h200", "fast")))
    state.add_node(GpuNode(name="gone", gpus=(4, 5), labels=("h200",)))
    state.drain_node("gone")
    assert place(
        PlacementRequest(pipeline_id="p", generation=1, labels=("h200",)), state
    ).generation == (2,)
    with pytest.raises(UserError, match=r"3 workers .* on the 1 nodes labelled h200 that are up"):
        place(PlacementRequest(pipeline_id="p", generation=3, labels=("h200",)), state)


def test_a_cluster_larger_than_generation_has_all_of_its_gpus_and_others() -> None:
    state = fleet(4)
    request = PlacementRequest(
        pipeline_id="p", clusters={"actor_train": 3, "critic": 1}, generation=(2, 3)
    )
    clusters = spec_of(request, state).clusters
    assert clusters["actor_train"] == (0, 2, 3)
    assert clusters["critic"] in {(2,), (3,)}
    with pytest.raises(UserError, match="actor_train: 5 GPUs do not fit, 4 do"):
        place(PlacementRequest(pipeline_id="p", clusters={"actor_train": 5}, generation=2), state)


def test_hand_written_maps_are_kept() -> None:
    state = fleet(4)
    request = PlacementRequest(pipeline_id="p", clusters={"actor_train": (3, 1)}, generation=(2, 0))
    assert place(request, state) == ({"actor_train": (3, 1)}, (2, 0))


@pytest.mark.parametrize(
    ("spec", "line"),
    [
        ({"generation": (0, 9)}, "actor_infer: no node has GPU 9"),
        ({"clusters": {"actor_train": (9,)}}, "actor_train: no node has GPU 9"),
        ({"generation": (0, 0)}, "actor_infer: GPU 0 is listed twice"),
        ({"clusters": {"actor_train": (1, 1)}}, "actor_train: GPU 1 is listed twice"),
        ({"clusters": {"actor_train": ()}}, "actor_train has no GPUs"),
        ({"clusters": {"actor_infer": (1,)}}, "name its GPUs in `generation`"),
        ({}, "no clusters and no generation"),
        ({"generation": (0, 1, 2), "tp": 2}, "3 GPUs is not a multiple of tp = 2"),
        ({"generation": (1, 2), "tp": 2}, r"worker 0 has GPUs \(1, 2\) on two nodes"),
        ({"generation": (0, 1), "weight": 0.0}, "weight: 0 is not a valid weight"),
        ({"generation": (0, 1), "weight": float("nan")}, "weight: nan is not a valid weight"),
        ({"generation": (0, 1), "weight": float("inf")}, "weight: inf is not a valid weight"),
        ({"generation": (0, 1), "max_gpus": -1}, "max_gpus: -1 is below 0"),
        ({"generation": (0, 1), "tp": 2, "max_gpus": 1}, "max_gpus: 1 is less than one worker"),
        ({"generation": (0, 1), "min_gpus": 3}, "min_gpus: 3 exceeds the 2 GPUs it may have"),
    ],
)
def test_a_wrong_device_map_is_refused_in_one_line(spec: dict[str, object], line: str) -> None:
    spec = {"clusters": {}, "generation": (), **spec}
    with pytest.raises(UserError, match=line) as caught:
        check(PipelineSpec(pipeline_id="p", **spec), fleet(2, 2))  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("pipeline p: ")


def test_placing_a_registered_pipeline_again_gives_the_same_gpus() -> None:
    state = fleet(4)
    request = PlacementRequest(pipeline_id="p", clusters={"actor_train": 2}, generation=2)
    assert settle_in(state, request) == spec_of(request, state)


SIZES = st.lists(st.integers(1, 8), min_size=1, max_size=4)
WISHES = st.lists(
    st.tuples(st.integers(0, 6), st.sampled_from([1, 2, 4]), st.integers(0, 10), st.integers(0, 4)),
    min_size=1,
    max_size=6,
)


@given(sizes=SIZES, wishes=WISHES)
def test_every_placement_passes_the_check_and_only_impossible_ones_are_refused(
    sizes: list[int], wishes: list[tuple[int, int, int, int]]
) -> None:
    state = fleet(*sizes)
    for number, (num_workers, tp, *clusters) in enumerate(wishes):
        named = {f"cluster{i}": num for i, num in enumerate(clusters) if num}
        request = PlacementRequest(
            pipeline_id=f"p{number}", clusters=named, generation=num_workers, tp=tp
        )
        fits = num_workers <= sum(size // tp for size in sizes)
        fits = fits and max(clusters) <= sum(sizes)
        if not fits:
            with pytest.raises(UserError):
                place(request, state)
        elif num_workers or named:
            spec = settle_in(state, request)
            assert len(spec.generation) == num_workers * tp
            assert {name: len(gpus) for name, gpus in spec.clusters.items()} == named
            assert spec == spec_of(request, state)
