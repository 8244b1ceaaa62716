"""The scheduler is killed at any step, before or after its rows are kept: nothing is lost (W13)."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmesh.scheduler.planning.state import PipelinePhase
from rollmesh.scheduler.service.scheduler import FleetScheduler
from rollmesh.scheduler.service.state import JournalTables
from rollmesh.wire.scheduling import GENERATION_CLUSTER, ReportProgress, TicketState, WorkerPhase
from tests.unit.scheduler.service.programs import Program, run_all
from tests.unit.scheduler.service.stage import Stage


def two_pipelines(kind: type[FleetScheduler] = FleetScheduler) -> Stage:
    """Both generate on all of four GPUs, and train on two each."""
    stage = Stage(4, kind=kind)
    stage.pipeline("a", train=(0, 1))
    stage.pipeline("b", train=(2, 3))
    return stage


def story(stage: Stage) -> dict[str, TicketState]:
    """Both do two rollouts; return how each request has ended."""
    run_all(stage, [Program("a", 2), Program("b", 2, generates_s=3.0)])
    stage.run(5)
    state = stage.scheduler.state
    assert state.fleet.owners == state.occupants == {}
    assert state.intents == {}
    assert not state.problems
    return stage.ended


def test_the_rows_tell_all_that_the_machine_knows_after_each_step() -> None:
    stage = two_pipelines()
    stage.checks_rows_each = 1
    story(stage)
    stage.generate("a", "g", target=0, step=9)
    stage.send(ReportProgress("a", "train", 1, 100, 10))
    stage.send(ReportProgress("a", "eval/x", 1, 100, 10))
    stage.coordinators["a"].error = "an engine does not answer"
    stage.train("b", "t")
    stage.run(10)
    stage.coordinators["a"].error = ""
    stage.release("a", "r", GENERATION_CLUSTER)
    stage.run(10)
    assert stage.state("r") is TicketState.RELEASED


@pytest.mark.parametrize("when", ["before its rows are kept", "before it sends"])
def test_it_may_be_killed_at_every_step(when: str) -> None:
    stage = two_pipelines()
    first = stage.num_steps
    ends = story(stage)
    last = stage.num_steps
    for step in range(first, last):
        killed = two_pipelines()
        struck = frozenset({step, step + 3, step + 50} if step % 3 == 0 else {step})
        if when == "before it sends":
            killed.cut_steps = struck
        else:
            killed.lost_steps = struck
        assert story(killed) == ends, f"killed at step {step} of {last}"


fates = st.tuples(
    st.sampled_from(["hang", "error", "silent", "none"]),
    st.sampled_from("abc"),
    st.integers(1, 40),
    st.integers(1, 30),
)


@settings(max_examples=30, deadline=None)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 3), st.integers(1, 4)), min_size=3, max_size=3),
    faults=st.lists(fates, max_size=3),
    lost=st.frozensets(st.integers(20, 600), max_size=5),
    cut=st.frozensets(st.integers(20, 600), max_size=5),
)
def test_random_histories_come_to_the_same_end(
    shapes: list[tuple[int, int]],
    faults: list[tuple[str, str, int, int]],
    lost: frozenset[int],
    cut: frozenset[int],
) -> None:
    stage = Stage(4)
    for name, train in (("a", (0, 1)), ("b", (1, 2, 3)), ("c", (3,))):
        stage.pipeline(name, train=train)
    stage.lost_steps, stage.cut_steps, stage.checks_rows_each = lost, cut, 7
    programs = [
        Program(name, 2, float(generates_s), float(trains_s))
        for name, (generates_s, trains_s) in zip("abc", shapes, strict=True)
    ]
    for each in programs:
        each.poll(stage)
    for fault, name, after_s, for_s in faults:
        _advance(stage, programs, after_s)
        _strike(stage, fault, name, is_on=True)
        _advance(stage, programs, for_s)
        _strike(stage, fault, name, is_on=False)
    run_all(stage, programs)
    stage.run(5)
    state = stage.scheduler.state
    assert state.fleet.owners == state.occupants == {}
    assert state.intents == {}
    assert not state.fleet.requests
    assert not state.problems
    assert {each.phase for each in state.fleet.pipelines.values()} == {PipelinePhase.ADMITTED}
    assert set(stage.ended.values()) == {TicketState.GRANTED, TicketState.RELEASED}


def _advance(stage: Stage, programs: list[Program], seconds: int) -> None:
    for _ in range(seconds * 4):
        for each in programs:
            each.poll(stage)
        stage.run(0.25)


def _strike(stage: Stage, fault: str, name: str, is_on: bool) -> None:
    coordinator = stage.coordinators[name]
    if fault == "hang":
        coordinator.is_hung = is_on
    elif fault == "silent":
        coordinator.is_silent = is_on
    elif fault == "error":
        coordinator.error = "an engine does not answer" if is_on else ""


class Amnesiac(FleetScheduler):
    """The fault: a restart begins without the kept rows."""

    def __init__(self, *arguments: object, **named: object) -> None:
        kept = [each for each in arguments if not isinstance(each, JournalTables)]
        if len(kept) < len(arguments):
            kept.insert(2, None)
        super().__init__(*kept, **named)  # type: ignore[arg-type]  # what it was given


def test_without_its_journal_a_restart_loses_all() -> None:
    stage = two_pipelines(Amnesiac)
    stage.train("a", "t")
    stage.begin()
    stage.run(5)
    assert stage.train("a", "t2") is TicketState.REFUSED
    kept = two_pipelines()
    kept.train("a", "t")
    kept.begin()
    kept.run(5)
    assert kept.train("a", "t2") is TicketState.GRANTED


def test_nothing_is_planned_before_all_coordinators_are_heard_or_time_is_up() -> None:
    stage = two_pipelines()
    stage.coordinators["b"].is_silent = True
    stage.train("a", "t")
    stage.begin()
    stage.beat()
    stage.generate("a", "g")
    assert stage.of("a").workers[2].phase is WorkerPhase.ASLEEP
    stage.run(stage.settings.settle_s + 0.5)
    assert stage.of("a").workers[2].phase is WorkerPhase.AWAKE


def test_a_wake_that_completed_while_the_scheduler_was_down_counts() -> None:
    stage = two_pipelines()
    stage.coordinators["b"].is_silent = True
    coordinator = stage.coordinators["a"]
    stage.generate("a", "g")
    coordinator.pending_resizes.clear()
    for rank in range(4):
        coordinator.move(rank, WorkerPhase.AWAKE)
    stage.begin()
    num_received = coordinator.num_received
    stage.beat()
    assert stage.state("g") is TicketState.GRANTED
    assert coordinator.num_received == num_received


def test_an_unconfirmed_wake_is_resent_with_its_epoch() -> None:
    stage = two_pipelines()
    coordinator = stage.coordinators["a"]
    stage.cut_steps = frozenset({stage.num_steps + 1})
    stage.generate("a", "g")
    assert not coordinator.num_received
    stage.run(3)
    assert stage.state("g") is TicketState.GRANTED
    assert {truth.epoch for truth in coordinator.truths} == {1}


def test_workers_that_are_to_sleep_are_no_answer_though_no_plan_can_be_made_yet() -> None:
    stage = two_pipelines()
    stage.coordinators["b"].is_silent = True
    coordinator = stage.coordinators["a"]
    stage.generate("a", "g1")
    stage.release("a", "r", GENERATION_CLUSTER)
    stage.generate("a", "g2", step=1)
    coordinator.pending_resizes.clear()
    for rank in range(4):
        coordinator.move(rank, WorkerPhase.AWAKE)
    stage.begin()
    stage.beat()
    assert stage.of("a").workers[0].phase is WorkerPhase.AWAKE
    assert stage.state("r") is stage.state("g2") is TicketState.QUEUED
    stage.run(stage.settings.settle_s + 3)
    assert stage.state("r") is TicketState.RELEASED
    assert stage.state("g2") is TicketState.GRANTED
