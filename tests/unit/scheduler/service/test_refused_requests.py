"""Requests that can never be granted are refused in one line without effect."""

import pytest

from rollmesh.scheduler.planning.plan import ShrinkReason
from rollmesh.wire.scheduling import (
    GENERATION_CLUSTER,
    GpuPriority,
    NotifyReleaseThenRequestGpus,
    PipelineSpec,
    RegisterPipeline,
    RequestGpus,
    TicketState,
    UnregisterPipeline,
)
from tests.unit.scheduler.service.stage import TRAIN, Stage

GRANTED, RELEASED, REFUSED = TicketState.GRANTED, TicketState.RELEASED, TicketState.REFUSED


@pytest.mark.parametrize(
    ("cluster", "priority", "text"),
    [
        ("critic", GpuPriority.CRITIC_TRAINING, "has no cluster 'critic'; it has actor_train"),
        (TRAIN, GpuPriority.GENERATION, "cannot be requested with priority 6"),
        (GENERATION_CLUSTER, GpuPriority.ACTOR_TRAINING, "cannot be requested with priority 1"),
        (TRAIN, 9, "there is no priority 9"),
        (TRAIN, -1, "cannot be requested with priority -1"),
    ],
)
def test_what_can_never_be_is_refused_in_one_line(cluster: str, priority: int, text: str) -> None:
    stage = Stage()
    stage.pipeline("a")
    assert stage.ask(RequestGpus("k", "a", cluster, priority)) is REFUSED
    assert text in stage.moved["k"].reason
    assert "\n" not in stage.moved["k"].reason


def test_a_pipeline_without_engines_is_refused_generation() -> None:
    stage = Stage()
    stage.pipeline("a", generation=())
    assert stage.generate("a", "k") is REFUSED
    assert "no engines" in stage.moved["k"].reason
    assert stage.release("a", "r", GENERATION_CLUSTER) is RELEASED


@pytest.mark.parametrize("key", ["", *ShrinkReason])
def test_a_key_that_looks_like_a_plans_reason_stops_no_pipeline(key: str) -> None:
    stage = Stage()
    stage.pipeline("a", train=(0, 1))
    stage.generate("a", "g")
    stage.act()
    assert stage.train("a", key) is REFUSED
    assert "key" in stage.moved[key].reason
    stage.train("a", "t")
    stage.wait_for("t", GRANTED, 5)
    assert not stage.scheduler.state.problems


def test_an_unknown_or_unadmitted_pipeline_is_refused() -> None:
    stage = Stage()
    assert stage.train("x", "k1") is REFUSED
    assert "register" in stage.moved["k1"].reason
    spec = PipelineSpec(pipeline_id="b", clusters={}, generation=(0,))
    stage.send(RegisterPipeline("r", spec))
    assert stage.generate("b", "k2") is REFUSED
    assert "admit" in stage.moved["k2"].reason


def test_a_pipeline_without_hooks_is_refused_generation_and_not_training() -> None:
    stage = Stage()
    stage.pipeline("a")
    stage.scheduler.state.pipeline_records["a"].is_wired = False
    assert stage.generate("a", "k1") is REFUSED
    assert "PipelineHooks" in stage.moved["k1"].reason
    assert stage.train("a", "k2") is GRANTED


def test_a_hand_over_whose_second_half_is_refused_releases_nothing() -> None:
    stage = Stage()
    stage.pipeline("a")
    stage.train("a", "a1")
    ask = NotifyReleaseThenRequestGpus("a2", "a", TRAIN, "critic", GpuPriority.CRITIC_TRAINING)
    assert stage.ask(ask) is REFUSED
    assert TRAIN in stage.of("a").holds


def test_of_a_hand_over_the_first_half_counts_though_its_pipeline_is_leaving() -> None:
    stage = Stage()
    stage.pipeline("a")
    stage.train("a", "a1")
    stage.send(UnregisterPipeline("u", "a"))
    priority = GpuPriority.GENERATION
    ask = NotifyReleaseThenRequestGpus("a2", "a", TRAIN, GENERATION_CLUSTER, priority)
    assert stage.ask(ask) is REFUSED
    assert stage.answers["u"].ok, "else it is waited for until it is killed"
    assert not stage.scheduler.state.fleet.owners
