"""Requests with a key: which are granted, which join another, which leave nothing."""

from rollmesh.scheduler.service.state import IntentPhase
from rollmesh.wire.scheduling import (
    GENERATION_CLUSTER,
    GpuPriority,
    NotifyReleaseGpus,
    NotifyReleaseThenRequestGpus,
    RequestGpus,
    TakeGpus,
    TicketState,
    WithdrawRequest,
    WorkerPhase,
)
from tests.unit.scheduler.service.stage import TRAIN, Stage

GRANTED, QUEUED, RELEASED = TicketState.GRANTED, TicketState.QUEUED, TicketState.RELEASED
OFFERED, WITHDRAWN = TicketState.OFFERED, TicketState.WITHDRAWN


def test_a_free_cluster_is_granted_at_once_with_its_gpus() -> None:
    stage = Stage()
    stage.pipeline("a", train=(0, 1))
    assert stage.train("a", "k") is GRANTED
    assert stage.moved["k"].gpus == (0, 1)


def test_a_resent_request_is_answered_again_and_done_once() -> None:
    stage = Stage()
    stage.pipeline("a")
    stage.train("a", "k")
    held = dict(stage.scheduler.state.fleet.owners)
    assert stage.train("a", "k") is GRANTED
    assert stage.scheduler.state.fleet.owners == held
    assert stage.scheduler.state.counts["asks"] == 1


def test_a_second_key_for_what_is_held_has_it_at_once() -> None:
    stage = Stage()
    stage.pipeline("a")
    stage.train("a", "k1")
    assert stage.train("a", "k2") is GRANTED
    assert stage.moved["k2"].gpus == (0,)


def test_a_second_key_for_what_is_queued_shares_its_place() -> None:
    stage = Stage()
    stage.pipeline("a", train=(0, 1))
    stage.pipeline("b", train=(1, 2))
    stage.pipeline("c", train=(1, 3))
    stage.train("a", "a1")
    assert stage.train("b", "b1") is stage.train("c", "c1") is stage.train("b", "b2") is QUEUED
    assert len(stage.scheduler.state.fleet.requests) == 2
    del stage.open["b1"]
    stage.run(stage.settings.patience_s + 1)
    assert stage.scheduler.state.tickets["b1"].state is WITHDRAWN
    assert stage.release("a", "a2") is RELEASED
    assert (stage.state("b2"), stage.state("c1")) == (GRANTED, QUEUED)


def test_generation_is_granted_to_all_waiters_when_a_worker_is_awake() -> None:
    stage = Stage()
    stage.pipeline("a")
    assert stage.generate("a", "k1") is stage.generate("a", "k2") is QUEUED
    stage.act()
    assert stage.state("k1") is stage.state("k2") is GRANTED
    assert set(stage.moved["k1"].gpus) == {0, 1, 2, 3}
    assert stage.generate("a", "k3") is GRANTED


def test_a_waiting_request_shows_the_holder() -> None:
    stage = Stage()
    stage.pipeline("a", train=(0, 1))
    stage.pipeline("b", train=(1, 2))
    stage.train("a", "a1")
    stage.train("b", "b1")
    assert stage.moved["b1"].reason == "waits for a/actor_train on 1"


def test_grants_of_a_demand_that_never_closes_are_forgotten_one_by_one() -> None:
    stage = Stage()
    stage.pipeline("a")
    for step in range(5):
        stage.generate("a", f"g{step}", step=step)
        stage.wait_for(f"g{step}", GRANTED)
        stage.run(stage.settings.memory_s)
    assert len(stage.scheduler.state.tickets) <= 3
    assert len(stage.kept.tables["tickets"]) <= 3
    assert stage.of("a").demand is not None


def test_a_queued_request_that_is_not_renewed_leaves_nothing() -> None:
    stage = Stage()
    stage.pipeline("a", train=(0, 1))
    stage.pipeline("b", train=(1, 2))
    stage.train("a", "a1")
    stage.train("b", "b1")
    stage.open.clear()
    stage.run(stage.settings.patience_s + 1)
    state = stage.scheduler.state
    assert state.tickets["b1"].state is WITHDRAWN
    assert not state.fleet.requests
    assert not stage.kept.tables["requests"]
    assert ("b", TRAIN) not in state.queue
    stage.run(stage.settings.memory_s + 1)
    assert set(stage.kept.tables["tickets"]) == {"a1"} == set(state.tickets)


def test_a_trainer_delayed_for_long_waits_again_and_its_grant_does_not_end() -> None:
    """A waiting trainer would take the end of its request for a grant, and train on another's
    GPUs.
    """
    stage = Stage()
    stage.pipeline("a", train=(0, 1))
    stage.pipeline("b", train=(1, 2))
    stage.train("a", "a1")
    stage.train("b", "b1")
    held_up = stage.open.pop("b1")
    stage.run(stage.settings.patience_s + 1)
    assert stage.state("b1") is QUEUED
    assert not stage.scheduler.state.fleet.requests
    assert stage.ask(held_up) is QUEUED
    stage.begin()
    stage.run(stage.settings.settle_s + 1)
    assert stage.release("a", "a2") is RELEASED
    assert stage.state("b1") is GRANTED


def test_what_is_withdrawn_after_it_was_expiren_is_not_taken_up() -> None:
    stage = Stage()
    stage.pipeline("a", train=(0, 1))
    stage.pipeline("b", train=(1, 2))
    stage.train("a", "a1")
    stage.train("b", "b1")
    held_up = stage.open.pop("b1")
    stage.run(stage.settings.patience_s + 1)
    stage.send(WithdrawRequest("b1"))
    assert stage.ask(held_up) is WITHDRAWN


def test_a_withdrawal_takes_nothing_from_another_request_that_has_joined_it() -> None:
    stage = Stage()
    stage.pipeline("a")
    stage.train("a", "k1")
    stage.train("a", "k2")
    stage.send(WithdrawRequest("k1"))
    assert stage.state("k1") is RELEASED
    assert stage.state("k2") is GRANTED
    assert TRAIN in stage.of("a").holds
    stage.send(WithdrawRequest("k2"))
    assert not stage.of("a").holds


def test_a_promise_without_a_waiter_is_withdrawn() -> None:
    stage = Stage()
    stage.pipeline("a", train=(0,), generation=(0,)).is_hung = True
    stage.generate("a", "g")
    stage.coordinators["a"].is_hung = False
    stage.act()
    stage.coordinators["a"].is_hung = True
    stage.train("a", "t")
    assert stage.of("a").holds
    del stage.open["t"]
    stage.run(stage.settings.patience_s + 1)
    assert stage.scheduler.state.tickets["t"].state is WITHDRAWN
    assert not stage.of("a").holds
    assert {each.phase for each in stage.scheduler.state.intents.values()} <= {IntentPhase.SENT}
    stage.coordinators["a"].is_hung = False
    stage.run(3)
    assert stage.awake("a") == [0]  # its demand was never withdrawn


def test_a_withdrawal_that_comes_after_the_grant_gives_it_back() -> None:
    stage = Stage()
    stage.pipeline("a")
    stage.train("a", "k")
    stage.send(WithdrawRequest("k"))
    assert stage.state("k") is RELEASED
    assert not stage.scheduler.state.fleet.owners


def test_a_withdrawal_that_overtakes_its_ask_counts() -> None:
    stage = Stage()
    stage.pipeline("a")
    stage.send(WithdrawRequest("k"))
    assert stage.train("a", "k") is WITHDRAWN
    assert not stage.scheduler.state.fleet.owners


def test_a_late_copy_of_a_release_releases_nothing() -> None:
    stage = Stage()
    stage.pipeline("a")
    stage.train("a", "k1")
    stage.release("a", "k2")
    stage.train("a", "k3")
    assert stage.release("a", "k2") is RELEASED
    assert stage.scheduler.state.fleet.owners[0].cluster == TRAIN


def test_unheld_gpus_are_released_at_once() -> None:
    stage = Stage()
    stage.pipeline("a")
    assert stage.release("a", "k1") is RELEASED
    assert stage.release("a", "k2", GENERATION_CLUSTER) is RELEASED


def test_generation_is_released_when_its_workers_are_asleep() -> None:
    stage = Stage()
    stage.pipeline("a")
    stage.generate("a", "g")
    stage.act()
    assert stage.release("a", "r", GENERATION_CLUSTER) is QUEUED
    assert stage.of("a").demand is None
    stage.act()
    assert stage.state("r") is RELEASED
    assert not stage.awake("a")


def test_what_is_asked_while_a_release_is_under_way_is_served_after_it() -> None:
    stage = Stage()
    stage.pipeline("a")
    stage.generate("a", "g1")
    stage.act()
    stage.release("a", "r", GENERATION_CLUSTER)
    assert stage.generate("a", "g2", step=1) is QUEUED
    stage.act()
    assert (stage.state("r"), stage.state("g2")) == (RELEASED, QUEUED)
    stage.act()
    assert stage.state("g2") is GRANTED


def test_workers_that_are_about_to_go_to_sleep_again_are_no_answer() -> None:
    stage = Stage()
    stage.pipeline("a")
    stage.generate("a", "g1")
    stage.release("a", "r", GENERATION_CLUSTER)  # while they wake
    stage.generate("a", "g2", step=1)
    stage.act()
    assert stage.awake("a")
    assert (stage.state("r"), stage.state("g2")) == (QUEUED, QUEUED)
    stage.act()
    assert (stage.state("r"), stage.state("g2")) == (RELEASED, QUEUED)
    stage.act()
    assert stage.state("g2") is GRANTED


def test_a_release_calls_off_what_was_not_begun() -> None:
    stage = Stage(2)
    stage.pipeline("a", train=(), generation=(0, 1))
    coordinator = stage.pipeline("b", train=(), generation=(0, 1))
    stage.generate("a", "g1")
    stage.act()
    stage.coordinators["a"].is_hung = True
    stage.generate("b", "g2")
    stage.run(8)
    assert WorkerPhase.WAKING in {worker.phase for worker in stage.of("b").workers}
    assert stage.release("b", "r", GENERATION_CLUSTER) is RELEASED
    stage.coordinators["a"].is_hung = False
    stage.run(3)
    assert not coordinator.num_received


def test_release_then_request_leaves_no_gap_for_others() -> None:
    stage = Stage()
    stage.pipeline("a", train=(0, 1), generation=())
    stage.pipeline("b", train=(0, 1), generation=())
    stage.train("a", "a1")
    stage.train("b", "b1")
    ask = NotifyReleaseThenRequestGpus("a2", "a", TRAIN, TRAIN, GpuPriority.INITIALIZATION)
    assert stage.ask(ask) is GRANTED
    assert stage.state("b1") is QUEUED
    assert stage.release("a", "a3") is RELEASED
    assert stage.state("b1") is GRANTED


def test_a_release_is_carried_out_without_a_waiter() -> None:
    stage = Stage()
    stage.pipeline("a")
    stage.generate("a", "g")
    stage.act()
    stage.coordinators["a"].is_hung = True
    stage.ask(NotifyReleaseGpus("r", "a", GENERATION_CLUSTER))
    stage.open.clear()
    stage.run(stage.settings.patience_s + 1)
    stage.coordinators["a"].is_hung = False
    stage.run(2)
    assert stage.state("r") is RELEASED
    assert {worker.phase for worker in stage.of("a").workers} == {WorkerPhase.ASLEEP}


def queue_of_two(num_gpus: int = 4) -> Stage:
    """`a` trains, `b` waits for one of its GPUs."""
    stage = Stage(num_gpus)
    stage.pipeline("a", train=(0, 1))
    stage.pipeline("b", train=(1, 2))
    stage.train("a", "a1")
    stage.train("b", "b1")
    return stage


def test_gpus_offered_to_a_dead_trainer_are_free_after_its_patience() -> None:
    stage = queue_of_two()
    stage.open.clear()
    stage.release("a", "a2")
    assert stage.state("b1") is OFFERED
    assert stage.train("a", "a3") is QUEUED
    stage.run(stage.settings.patience_s + 1)
    assert stage.state("a3") is GRANTED
    assert not stage.of("b").holds
    assert stage.state("b1") is OFFERED, "a silent client gets no answer"


def test_a_trainer_delayed_past_its_offer_waits_again_and_an_old_reply_takes_nothing() -> None:
    stage = queue_of_two()
    held_up = stage.open.pop("b1")
    stage.release("a", "a2")
    first = stage.moved["b1"].offer
    stage.train("a", "a3")
    stage.run(stage.settings.patience_s + 1)
    stage.send(TakeGpus("b1", first))
    assert stage.state("b1") is OFFERED
    stage.open["b1"] = held_up
    stage.send(held_up)
    assert stage.state("b1") is QUEUED
    del stage.open["b1"]
    stage.release("a", "a4")
    assert stage.state("b1") is OFFERED
    stage.send(TakeGpus("b1", first))
    assert stage.state("b1") is OFFERED
    stage.send(TakeGpus("b1", stage.moved["b1"].offer))
    assert stage.state("b1") is GRANTED


def test_what_was_taken_never_lapses() -> None:
    stage = queue_of_two()
    stage.open.clear()
    stage.run(stage.settings.memory_s + stage.settings.patience_s)
    stage.begin()
    stage.run(stage.settings.patience_s + 1)
    assert TRAIN in stage.of("a").holds


def test_an_offer_outlives_the_scheduler_and_not_its_requester() -> None:
    stage = queue_of_two()
    del stage.open["b1"]
    stage.release("a", "a2")
    offer = stage.moved["b1"].offer
    stage.begin()
    stage.run(stage.settings.patience_s - 1)
    assert TRAIN in stage.of("b").holds
    stage.run(2)
    assert not stage.of("b").holds
    again = queue_of_two()
    held_up = again.open.pop("b1")
    again.release("a", "a2")
    again.begin()
    again.send(held_up)
    assert again.moved["b1"].offer == offer
    again.send(TakeGpus("b1", offer))
    assert again.state("b1") is GRANTED


def test_what_is_withdrawn_while_it_is_offered_is_given_back() -> None:
    stage = queue_of_two()
    del stage.open["b1"]
    stage.release("a", "a2")
    stage.send(WithdrawRequest("b1"))
    assert stage.state("b1") is WITHDRAWN
    assert not stage.scheduler.state.fleet.owners
    stage.send(TakeGpus("b1", stage.moved["b1"].offer))
    assert stage.state("b1") is WITHDRAWN
    stage.send(TakeGpus("nobody", 1))
    assert "nobody" not in stage.moved


def test_a_lapsed_offer_takes_nothing_from_a_request_that_took_it() -> None:
    stage = Stage()
    stage.pipeline("a")
    stage.train("a", "k1")
    second = RequestGpus("k2", "a", TRAIN, GpuPriority.ACTOR_TRAINING)
    stage.send(second)
    assert stage.state("k2") is OFFERED
    stage.run(stage.settings.patience_s + 1)
    assert stage.scheduler.state.tickets["k2"].state is WITHDRAWN
    assert TRAIN in stage.of("a").holds
