"""Ops under way: promised, sent, done, called off."""

from rollmesh.scheduler.planning.plan import Expand, Grant
from rollmesh.scheduler.planning.state import FIXED, ClusterRequest, Owner
from rollmesh.scheduler.service.state import HistoryRow, IntentKind, IntentPhase
from rollmesh.wire.scheduling import GENERATION_CLUSTER, TicketState, WorkerPhase
from tests.unit.scheduler.service.stage import TRAIN, Stage


def phases(stage: Stage) -> list[tuple[str, IntentKind, int, IntentPhase]]:
    intents = stage.scheduler.state.intents.values()
    return [(each.pipeline_id, each.kind, each.rank, each.phase) for each in intents]


def handing_over() -> Stage:
    """Pipeline a must sleep for b's training, and hangs."""
    stage = Stage(2)
    stage.pipeline("a", train=(), generation=(0, 1))
    stage.pipeline("b", train=(0,), generation=())
    stage.generate("a", "g")
    stage.act()
    stage.coordinators["a"].is_hung = True
    stage.train("b", "t")
    return stage


def test_a_grant_waits_for_the_sleep_that_it_was_planned_with() -> None:
    stage = handing_over()
    assert phases(stage) == [
        ("a", IntentKind.SLEEP, 0, IntentPhase.SENT),
        ("b", IntentKind.GRANT, FIXED, IntentPhase.PLANNED),
    ]
    state = stage.scheduler.state
    assert state.fleet.owners[0] == Owner("b", TRAIN, FIXED)
    assert state.occupants[0] == Owner("a", GENERATION_CLUSTER, 0)
    stage.coordinators["a"].is_hung = False
    stage.act()
    assert phases(stage) == []
    assert state.occupants[0] == Owner("b", TRAIN, FIXED)
    assert stage.state("t") is TicketState.GRANTED


def test_each_intent_ends_in_one_of_two_ways_and_is_counted() -> None:
    stage = handing_over()
    stage.coordinators["a"].is_hung = False
    stage.act()
    num = stage.scheduler.state.counts
    assert (num["intents_committed"], num["intents_failed"], num["evictions"]) == (4, 0, 1)
    assert stage.kept.tables["intents"] == {}


def test_what_pipelines_do_of_their_own_is_no_eviction() -> None:
    stage = Stage(2)
    stage.pipeline("a", train=(), generation=(0, 1))
    stage.generate("a", "g")
    stage.act()
    stage.release("a", "r", GENERATION_CLUSTER)
    stage.act()
    assert stage.state("r") is TicketState.RELEASED
    assert stage.scheduler.state.counts["evictions"] == 0


def test_a_broken_promise_gives_back_the_place_and_its_age() -> None:
    stage = handing_over()
    request = next(i.request for i in stage.scheduler.state.intents.values() if i.request)
    stage.run(3)
    stage.coordinators["a"].move(0, WorkerPhase.LOST)
    stage.beat()
    assert stage.scheduler.state.fleet.requests == {"t": request}
    assert isinstance(request, ClusterRequest)
    assert request.asked_s < stage.now_s - 2
    assert [kind for _, kind, _, _ in phases(stage)] == [IntentKind.SLEEP], "of what is not lost"


def test_the_history_shows_which_engine_was_where_and_when() -> None:
    stage = handing_over()
    stage.run(1)
    stage.coordinators["a"].is_hung = False
    stage.act()
    stage.release("b", "r")
    past = [row for row in stage.rows if isinstance(row, HistoryRow)]
    result = [(row.pipeline_id, row.cluster, row.rank, row.phase) for row in past if row.gpu == 0]
    assert result[:5] == [
        ("a", GENERATION_CLUSTER, 0, "waking"),
        ("a", GENERATION_CLUSTER, 0, "awake"),
        ("a", GENERATION_CLUSTER, 0, "sleeping"),
        ("", "", 0, "free"),
        ("b", TRAIN, FIXED, "held"),
    ]
    times = [row.at_s for row in past]
    assert times == sorted(times)


def test_plans_of_the_planner_are_promised_as_they_are() -> None:
    stage = Stage(2)
    stage.pipeline("a", train=(0,), generation=(0, 1))
    state, intents = stage.scheduler.state, stage.scheduler.intents
    state.fleet.requests["t"] = ClusterRequest(
        key="t", pipeline_id="a", cluster=TRAIN, priority=1, seq=1, asked_s=0.0
    )
    intents.promise(Grant("t"))
    intents.promise(Expand("a", 1))
    assert [each[1:] for each in phases(stage)] == [
        (IntentKind.GRANT, FIXED, IntentPhase.PLANNED),
        (IntentKind.WAKE, 1, IntentPhase.PLANNED),
    ]
    assert intents.is_promise("a", TRAIN)
    intents.call_off("a", "on second thoughts")
    intents.drop_promise("a", TRAIN)
    assert phases(stage) == []
    assert stage.of("a").workers[1].phase is WorkerPhase.ASLEEP


def test_two_that_keep_their_workers_train_in_turn_though_their_demand_stays_open() -> None:
    stage = Stage()
    for name, gpus in (("a", (0, 1)), ("b", (2, 3))):
        stage.pipeline(name, train=gpus, is_preemptible=False)
        stage.generate(name, f"{name}-g")
    stage.run(5)
    for name in ("a", "b"):
        stage.train(name, f"{name}0")
    for step in range(3):
        for name in ("a", "b"):
            stage.wait_for(f"{name}{step}", TicketState.GRANTED)
            stage.release(name, f"{name}-r{step}")
            stage.train(name, f"{name}{step + 1}")
            assert stage.ended[f"{name}{step}"] is TicketState.GRANTED
