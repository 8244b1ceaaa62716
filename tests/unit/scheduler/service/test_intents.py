"""Intents: their ends, their history, and the turns of resizes, so that a hung engine delays no
other pipeline for longer than its turn.
"""

import msgspec
import pytest

from rollmesh.scheduler.planning.plan import Expand, Grant
from rollmesh.scheduler.planning.state import FIXED, ClusterRequest, Owner, PipelinePhase
from rollmesh.scheduler.service.state import HistoryRow, IntentKind, IntentPhase
from rollmesh.wire.scheduling import GENERATION_CLUSTER, TicketState, WorkerPhase
from tests.unit.scheduler.service.harness import SETTINGS, TRAIN, SchedulerHarness


def intents_of(harness: SchedulerHarness) -> list[tuple[str, IntentKind, int, IntentPhase]]:
    intents = harness.scheduler.state.intents.values()
    return [(each.pipeline_id, each.kind, each.rank, each.phase) for each in intents]


def handing_over() -> SchedulerHarness:
    """Pipeline a must sleep for b's training, and hangs."""
    harness = SchedulerHarness(2)
    harness.pipeline("a", train=(), generation=(0, 1))
    harness.pipeline("b", train=(0,), generation=())
    harness.generate("a", "g")
    harness.act()
    harness.coordinators["a"].is_hung = True
    harness.train("b", "t")
    return harness


def test_a_grant_waits_for_the_sleep_that_it_was_planned_with() -> None:
    harness = handing_over()
    assert intents_of(harness) == [
        ("a", IntentKind.SLEEP, 0, IntentPhase.SENT),
        ("b", IntentKind.GRANT, FIXED, IntentPhase.PLANNED),
    ]
    state = harness.scheduler.state
    assert state.fleet.owners[0] == Owner("b", TRAIN, FIXED)
    assert state.occupants[0] == Owner("a", GENERATION_CLUSTER, 0)
    harness.coordinators["a"].is_hung = False
    harness.act()
    assert intents_of(harness) == []
    assert state.occupants[0] == Owner("b", TRAIN, FIXED)
    assert harness.state("t") is TicketState.GRANTED


def test_each_ended_intent_is_counted_as_committed_or_failed() -> None:
    harness = handing_over()
    harness.coordinators["a"].is_hung = False
    harness.act()
    num = harness.scheduler.state.counts
    assert (num["intents_committed"], num["intents_failed"], num["evictions"]) == (4, 0, 1)
    assert harness.kept.tables["intents"] == {}


def test_a_release_by_the_pipeline_itself_is_no_eviction() -> None:
    harness = SchedulerHarness(2)
    harness.pipeline("a", train=(), generation=(0, 1))
    harness.generate("a", "g")
    harness.act()
    harness.release("a", "r", GENERATION_CLUSTER)
    harness.act()
    assert harness.state("r") is TicketState.RELEASED
    assert harness.scheduler.state.counts["evictions"] == 0


def test_a_broken_promise_restores_the_place_and_age_of_its_request() -> None:
    harness = handing_over()
    request = next(i.request for i in harness.scheduler.state.intents.values() if i.request)
    harness.run(3)
    harness.coordinators["a"].move(0, WorkerPhase.LOST)
    harness.beat()
    assert harness.scheduler.state.fleet.requests == {"t": request}
    assert isinstance(request, ClusterRequest)
    assert request.asked_s < harness.now_s - 2
    assert [kind for _, kind, _, _ in intents_of(harness)] == [IntentKind.SLEEP], (
        "for the worker that is not lost"
    )


def test_the_history_shows_which_engine_was_where_and_when() -> None:
    harness = handing_over()
    harness.run(1)
    harness.coordinators["a"].is_hung = False
    harness.act()
    harness.release("b", "r")
    rows = [row for row in harness.rows if isinstance(row, HistoryRow)]
    uses = [(row.pipeline_id, row.cluster, row.rank, row.phase) for row in rows if row.gpu == 0]
    assert uses[:5] == [
        ("a", GENERATION_CLUSTER, 0, "waking"),
        ("a", GENERATION_CLUSTER, 0, "awake"),
        ("a", GENERATION_CLUSTER, 0, "sleeping"),
        ("", "", 0, "free"),
        ("b", TRAIN, FIXED, "held"),
    ]
    times = [row.at_s for row in rows]
    assert times == sorted(times)


def test_planned_operations_are_promised_unchanged() -> None:
    harness = SchedulerHarness(2)
    harness.pipeline("a", train=(0,), generation=(0, 1))
    state, intents = harness.scheduler.state, harness.scheduler.intents
    state.fleet.requests["t"] = ClusterRequest(
        key="t", pipeline_id="a", cluster=TRAIN, priority=1, seq=1, asked_s=0.0
    )
    intents.promise(Grant("t"))
    intents.promise(Expand("a", 1))
    assert [each[1:] for each in intents_of(harness)] == [
        (IntentKind.GRANT, FIXED, IntentPhase.PLANNED),
        (IntentKind.WAKE, 1, IntentPhase.PLANNED),
    ]
    assert intents.is_promise("a", TRAIN)
    intents.call_off("a", "the pipeline leaves")
    intents.drop_promise("a", TRAIN)
    assert intents_of(harness) == []
    assert harness.of("a").workers[1].phase is WorkerPhase.ASLEEP


def test_two_pipelines_that_keep_their_workers_train_in_turn_while_demand_stays_open() -> None:
    harness = SchedulerHarness()
    for name, gpus in (("a", (0, 1)), ("b", (2, 3))):
        harness.pipeline(name, train=gpus, is_preemptible=False)
        harness.generate(name, f"{name}-g")
    harness.run(5)
    for name in ("a", "b"):
        harness.train(name, f"{name}0")
    for step in range(3):
        for name in ("a", "b"):
            harness.wait_for(f"{name}{step}", TicketState.GRANTED)
            harness.release(name, f"{name}-r{step}")
            harness.train(name, f"{name}{step + 1}")
            assert harness.ended[f"{name}{step}"] is TicketState.GRANTED


SWITCH_S = 2.0
"""The turn of an engine that does not hang, including its messages."""
WITHOUT_TURNS = msgspec.structs.replace(SETTINGS, turn_s=SETTINGS.resize_deadline_s)
"""The fault: the next resize waits until the one before has ended."""


def phases_of(harness: SchedulerHarness, pipeline_id: str) -> list[IntentPhase]:
    intents = harness.scheduler.state.intents.values()
    return [each.phase for each in intents if each.pipeline_id == pipeline_id]


def shared() -> SchedulerHarness:
    """`well` is awake on two of three GPUs, and `ill` will hang."""
    harness = SchedulerHarness(3)
    harness.pipeline("ill", train=(), generation=(0, 1, 2))
    harness.pipeline("well", train=(), generation=(1, 2))
    harness.generate("well", "first")
    harness.act()
    harness.coordinators["ill"].is_hung = True
    return harness


def hanging(harness: SchedulerHarness) -> SchedulerHarness:
    """Engine 0 of `ill` hangs while it should go to sleep for one that trains; 1 and 2 serve."""
    harness.pipeline("ill", train=(), generation=(0, 1, 2))
    harness.pipeline("first", train=(0,), generation=())
    harness.pipeline("second", train=(1,), generation=())
    harness.generate("ill", "g")
    harness.run(2)
    assert harness.awake("ill") == [0, 1, 2]
    harness.coordinators["ill"].hung = {0}
    harness.train("first", "t1")
    harness.run(1)
    assert phases_of(harness, "ill") == [IntentPhase.SENT]
    return harness


def test_a_busy_engine_is_promised_nothing_more() -> None:
    harness = shared()
    harness.generate("ill", "g")
    harness.release("well", "r", GENERATION_CLUSTER)
    harness.beat()
    assert phases_of(harness, "ill") == [IntentPhase.SENT]
    harness.coordinators["ill"].is_hung = False
    harness.wait_for("g", TicketState.GRANTED)
    harness.run(5)
    assert harness.awake("ill") == [0, 1, 2], "it is no longer busy"


def test_a_hung_engine_delays_requests_for_others_for_its_turn_only() -> None:
    harness = hanging(SchedulerHarness(3))
    harness.train("second", "t2")
    harness.wait_for("t2", TicketState.GRANTED, SETTINGS.turn_s + SWITCH_S)
    assert harness.state("t1") is TicketState.QUEUED
    assert harness.of("ill").phase is PipelinePhase.ADMITTED
    assert harness.awake("ill") == [0, 2]


def test_without_turns_a_hung_engine_delays_requests_until_the_deadline() -> None:
    harness = hanging(SchedulerHarness(3, settings=WITHOUT_TURNS))
    harness.train("second", "t2")
    harness.run(SETTINGS.turn_s + SWITCH_S)
    assert harness.state("t2") is TicketState.QUEUED


def test_a_hung_engine_is_finally_lost_and_only_its_gpus_are_fenced() -> None:
    harness = hanging(SchedulerHarness(3))
    harness.train("second", "t2")
    harness.run(SETTINGS.resize_deadline_s + SETTINGS.slack_s)
    assert harness.of("ill").phase is PipelinePhase.QUARANTINED
    assert harness.of("ill").workers[0].phase is WorkerPhase.LOST
    assert harness.state("t1") is TicketState.QUEUED
    harness.run(5)
    assert harness.awake("ill") == [0]
    harness.coordinators["ill"].hung = set()
    harness.wait_for("t1", TicketState.GRANTED)


def test_a_slow_engine_may_wake_after_its_turn_without_a_fault() -> None:
    harness = shared()
    ill = harness.coordinators["ill"]
    ill.is_hung, ill.hung = False, {0}
    harness.generate("ill", "g")
    harness.release("well", "r", GENERATION_CLUSTER)
    harness.run(SETTINGS.turn_s + SWITCH_S)
    assert harness.awake("ill") == [1, 2], "its GPUs are not kept from it meanwhile"
    assert phases_of(harness, "ill") == [IntentPhase.SENT]
    ill.hung = set()
    harness.run(2)
    assert harness.awake("ill") == [0, 1, 2]
    assert harness.scheduler.state.counts["pipeline.quarantined"] == 0


@pytest.mark.parametrize(("wakes", "deadline_s"), [(False, 12.0), (True, 20.0)])
def test_sleeps_and_wakes_have_their_own_deadlines(wakes: bool, deadline_s: float) -> None:
    harness = SchedulerHarness(1, settings=msgspec.structs.replace(SETTINGS, sleep_deadline_s=12.0))
    coordinator = harness.pipeline("a", train=(), generation=(0,))
    if not wakes:
        harness.generate("a", "g")
        harness.run(2)
    coordinator.hung = {0}
    if wakes:
        harness.generate("a", "g")
    else:
        harness.release("a", "r", GENERATION_CLUSTER)
    [resize] = coordinator.pending_resizes
    assert resize.deadline_s == deadline_s
    harness.run(deadline_s + SETTINGS.slack_s - 1.0)
    assert harness.scheduler.state.counts["pipeline.quarantined"] == 0
    harness.run(2.0)
    assert harness.scheduler.state.counts["pipeline.quarantined"] == 1


def test_resizes_in_progress_are_resent_to_coordinators_that_missed_them() -> None:
    harness = hanging(SchedulerHarness(3))
    harness.train("second", "t2")
    ill = harness.coordinators["ill"]
    ill.hung = {0, 1}
    harness.run(SETTINGS.turn_s + 1.0)
    changes = {each.resize_id: each.changes for each in ill.pending_resizes}
    assert len(changes) == 2
    ill.pending_resizes.clear()
    for rank in (0, 1):  # both resizes were lost
        ill.truths[rank] = msgspec.structs.replace(ill.truths[rank], epoch=0)
    harness.run(1.5)
    assert {each.resize_id: each.changes for each in ill.pending_resizes} == changes
    ill.hung = set()
    harness.wait_for("t1", TicketState.GRANTED)
    harness.wait_for("t2", TicketState.GRANTED)
    assert harness.scheduler.state.counts["pipeline.quarantined"] == 0


def test_after_a_fault_only_workers_of_the_unanswered_resize_are_in_doubt() -> None:
    harness = hanging(SchedulerHarness(3))
    harness.train("second", "t2")
    ill = harness.coordinators["ill"]
    ill.hung = {0, 1}
    harness.run(SETTINGS.turn_s + 1.0)
    assert phases_of(harness, "ill") == [IntentPhase.SENT, IntentPhase.SENT]
    ill.hung, ill.error = {0}, "http://e:1 does not answer"
    harness.act()
    assert harness.of("ill").phase is PipelinePhase.QUARANTINED
    assert harness.scheduler.state.pipeline_records["ill"].unsure == [0]


def test_a_hung_engine_of_a_quarantined_pipeline_blocks_only_its_own_gpus() -> None:
    harness = hanging(SchedulerHarness(3))
    ill = harness.coordinators["ill"]
    ill.move(2, WorkerPhase.LOST)
    harness.beat()
    ill.hung = {0, 1}  # also for later resizes: 0 and 1 must sleep
    harness.run(2)
    ill.move(2, WorkerPhase.ASLEEP)
    harness.pipeline("third", train=(2,), generation=())
    harness.train("third", "t3")
    harness.wait_for("t3", TicketState.GRANTED, 5)
    assert harness.of("ill").phase is PipelinePhase.QUARANTINED
