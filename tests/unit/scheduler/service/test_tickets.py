"""Tickets: requests and releases, repeated, lost and late, and requests that are refused in one
line without effect.
"""

import pytest

from rollmesh.scheduler.planning.plan import ShrinkReason
from rollmesh.scheduler.service.state import IntentPhase
from rollmesh.wire.scheduling import (
    GENERATION_CLUSTER,
    GpuPriority,
    NotifyReleaseGpus,
    NotifyReleaseThenRequestGpus,
    PipelineSpec,
    RegisterPipeline,
    RequestGpus,
    TakeGpus,
    TicketState,
    UnregisterPipeline,
    WithdrawRequest,
    WorkerPhase,
)
from tests.unit.scheduler.service.harness import TRAIN, SchedulerHarness

GRANTED, QUEUED = TicketState.GRANTED, TicketState.QUEUED
REFUSED, RELEASED = TicketState.REFUSED, TicketState.RELEASED
OFFERED, WITHDRAWN = TicketState.OFFERED, TicketState.WITHDRAWN


def test_a_free_cluster_is_granted_at_once_with_its_gpus() -> None:
    harness = SchedulerHarness()
    harness.pipeline("a", train=(0, 1))
    assert harness.train("a", "k") is GRANTED
    assert harness.moved["k"].gpus == (0, 1)


def test_a_resent_request_is_answered_again_and_done_once() -> None:
    harness = SchedulerHarness()
    harness.pipeline("a")
    harness.train("a", "k")
    held = dict(harness.scheduler.state.fleet.owners)
    assert harness.train("a", "k") is GRANTED
    assert harness.scheduler.state.fleet.owners == held
    assert harness.scheduler.state.counts["asks"] == 1


def test_a_second_key_for_a_held_cluster_is_granted_at_once() -> None:
    harness = SchedulerHarness()
    harness.pipeline("a")
    harness.train("a", "k1")
    assert harness.train("a", "k2") is GRANTED
    assert harness.moved["k2"].gpus == (0,)


def test_a_second_key_for_a_queued_cluster_shares_its_place() -> None:
    harness = SchedulerHarness()
    harness.pipeline("a", train=(0, 1))
    harness.pipeline("b", train=(1, 2))
    harness.pipeline("c", train=(1, 3))
    harness.train("a", "a1")
    assert (
        harness.train("b", "b1") is harness.train("c", "c1") is harness.train("b", "b2") is QUEUED
    )
    assert len(harness.scheduler.state.fleet.requests) == 2
    del harness.open["b1"]
    harness.run(harness.settings.patience_s + 1)
    assert harness.scheduler.state.tickets["b1"].state is WITHDRAWN
    assert harness.release("a", "a2") is RELEASED
    assert (harness.state("b2"), harness.state("c1")) == (GRANTED, QUEUED)


def test_generation_is_granted_to_all_waiters_when_a_worker_is_awake() -> None:
    harness = SchedulerHarness()
    harness.pipeline("a")
    assert harness.generate("a", "k1") is harness.generate("a", "k2") is QUEUED
    harness.act()
    assert harness.state("k1") is harness.state("k2") is GRANTED
    assert set(harness.moved["k1"].gpus) == {0, 1, 2, 3}
    assert harness.generate("a", "k3") is GRANTED


def test_a_waiting_request_shows_the_holder() -> None:
    harness = SchedulerHarness()
    harness.pipeline("a", train=(0, 1))
    harness.pipeline("b", train=(1, 2))
    harness.train("a", "a1")
    harness.train("b", "b1")
    assert harness.moved["b1"].reason == "waits for a/actor_train on 1"


def test_grants_of_a_demand_that_never_closes_are_forgotten_one_by_one() -> None:
    harness = SchedulerHarness()
    harness.pipeline("a")
    for step in range(5):
        harness.generate("a", f"g{step}", step=step)
        harness.wait_for(f"g{step}", GRANTED)
        harness.run(harness.settings.memory_s)
    assert len(harness.scheduler.state.tickets) <= 3
    assert len(harness.kept.tables["tickets"]) <= 3
    assert harness.of("a").demand is not None


def test_a_queued_request_that_is_not_renewed_leaves_nothing() -> None:
    harness = SchedulerHarness()
    harness.pipeline("a", train=(0, 1))
    harness.pipeline("b", train=(1, 2))
    harness.train("a", "a1")
    harness.train("b", "b1")
    harness.open.clear()
    harness.run(harness.settings.patience_s + 1)
    state = harness.scheduler.state
    assert state.tickets["b1"].state is WITHDRAWN
    assert not state.fleet.requests
    assert not harness.kept.tables["requests"]
    assert ("b", TRAIN) not in state.queue
    harness.run(harness.settings.memory_s + 1)
    assert set(harness.kept.tables["tickets"]) == {"a1"} == set(state.tickets)


def test_a_trainer_delayed_for_long_waits_again_and_its_grant_does_not_end() -> None:
    """A trainer takes the end of its request for a grant, and would train on another's GPUs."""
    harness = SchedulerHarness()
    harness.pipeline("a", train=(0, 1))
    harness.pipeline("b", train=(1, 2))
    harness.train("a", "a1")
    harness.train("b", "b1")
    delayed = harness.open.pop("b1")
    harness.run(harness.settings.patience_s + 1)
    assert harness.state("b1") is QUEUED
    assert not harness.scheduler.state.fleet.requests
    assert harness.ask(delayed) is QUEUED
    harness.begin()
    harness.run(harness.settings.settle_s + 1)
    assert harness.release("a", "a2") is RELEASED
    assert harness.state("b1") is GRANTED


def test_a_request_that_is_withdrawn_after_it_expired_is_not_renewed() -> None:
    harness = SchedulerHarness()
    harness.pipeline("a", train=(0, 1))
    harness.pipeline("b", train=(1, 2))
    harness.train("a", "a1")
    harness.train("b", "b1")
    delayed = harness.open.pop("b1")
    harness.run(harness.settings.patience_s + 1)
    harness.send(WithdrawRequest("b1"))
    assert harness.ask(delayed) is WITHDRAWN


def test_a_withdrawal_takes_nothing_from_a_request_that_joined_it() -> None:
    harness = SchedulerHarness()
    harness.pipeline("a")
    harness.train("a", "k1")
    harness.train("a", "k2")
    harness.send(WithdrawRequest("k1"))
    assert harness.state("k1") is RELEASED
    assert harness.state("k2") is GRANTED
    assert TRAIN in harness.of("a").holds
    harness.send(WithdrawRequest("k2"))
    assert not harness.of("a").holds


def test_a_promise_without_a_waiter_is_withdrawn() -> None:
    harness = SchedulerHarness()
    harness.pipeline("a", train=(0,), generation=(0,)).is_hung = True
    harness.generate("a", "g")
    harness.coordinators["a"].is_hung = False
    harness.act()
    harness.coordinators["a"].is_hung = True
    harness.train("a", "t")
    assert harness.of("a").holds
    del harness.open["t"]
    harness.run(harness.settings.patience_s + 1)
    assert harness.scheduler.state.tickets["t"].state is WITHDRAWN
    assert not harness.of("a").holds
    assert {each.phase for each in harness.scheduler.state.intents.values()} <= {IntentPhase.SENT}
    harness.coordinators["a"].is_hung = False
    harness.run(3)
    assert harness.awake("a") == [0]  # its demand was never withdrawn


def test_a_withdrawal_after_the_grant_releases_the_gpus() -> None:
    harness = SchedulerHarness()
    harness.pipeline("a")
    harness.train("a", "k")
    harness.send(WithdrawRequest("k"))
    assert harness.state("k") is RELEASED
    assert not harness.scheduler.state.fleet.owners


def test_a_withdrawal_that_overtakes_its_request_counts() -> None:
    harness = SchedulerHarness()
    harness.pipeline("a")
    harness.send(WithdrawRequest("k"))
    assert harness.train("a", "k") is WITHDRAWN
    assert not harness.scheduler.state.fleet.owners


def test_a_late_copy_of_a_release_releases_nothing() -> None:
    harness = SchedulerHarness()
    harness.pipeline("a")
    harness.train("a", "k1")
    harness.release("a", "k2")
    harness.train("a", "k3")
    assert harness.release("a", "k2") is RELEASED
    assert harness.scheduler.state.fleet.owners[0].cluster == TRAIN


def test_unheld_gpus_are_released_at_once() -> None:
    harness = SchedulerHarness()
    harness.pipeline("a")
    assert harness.release("a", "k1") is RELEASED
    assert harness.release("a", "k2", GENERATION_CLUSTER) is RELEASED


def test_generation_is_released_when_its_workers_are_asleep() -> None:
    harness = SchedulerHarness()
    harness.pipeline("a")
    harness.generate("a", "g")
    harness.act()
    assert harness.release("a", "r", GENERATION_CLUSTER) is QUEUED
    assert harness.of("a").demand is None
    harness.act()
    assert harness.state("r") is RELEASED
    assert not harness.awake("a")


def test_a_request_during_a_release_is_served_after_it() -> None:
    harness = SchedulerHarness()
    harness.pipeline("a")
    harness.generate("a", "g1")
    harness.act()
    harness.release("a", "r", GENERATION_CLUSTER)
    assert harness.generate("a", "g2", step=1) is QUEUED
    harness.act()
    assert (harness.state("r"), harness.state("g2")) == (RELEASED, QUEUED)
    harness.act()
    assert harness.state("g2") is GRANTED


def test_workers_that_must_sleep_again_grant_nothing() -> None:
    harness = SchedulerHarness()
    harness.pipeline("a")
    harness.generate("a", "g1")
    harness.release("a", "r", GENERATION_CLUSTER)  # while the workers wake
    harness.generate("a", "g2", step=1)
    harness.act()
    assert harness.awake("a")
    assert (harness.state("r"), harness.state("g2")) == (QUEUED, QUEUED)
    harness.act()
    assert (harness.state("r"), harness.state("g2")) == (RELEASED, QUEUED)
    harness.act()
    assert harness.state("g2") is GRANTED


def test_a_release_cancels_wakes_that_have_not_begun() -> None:
    harness = SchedulerHarness(2)
    harness.pipeline("a", train=(), generation=(0, 1))
    coordinator = harness.pipeline("b", train=(), generation=(0, 1))
    harness.generate("a", "g1")
    harness.act()
    harness.coordinators["a"].is_hung = True
    harness.generate("b", "g2")
    harness.run(8)
    assert WorkerPhase.WAKING in {worker.phase for worker in harness.of("b").workers}
    assert harness.release("b", "r", GENERATION_CLUSTER) is RELEASED
    harness.coordinators["a"].is_hung = False
    harness.run(3)
    assert not coordinator.num_received


def test_release_then_request_leaves_no_gap_for_others() -> None:
    harness = SchedulerHarness()
    harness.pipeline("a", train=(0, 1), generation=())
    harness.pipeline("b", train=(0, 1), generation=())
    harness.train("a", "a1")
    harness.train("b", "b1")
    ask = NotifyReleaseThenRequestGpus("a2", "a", TRAIN, TRAIN, GpuPriority.INITIALIZATION)
    assert harness.ask(ask) is GRANTED
    assert harness.state("b1") is QUEUED
    assert harness.release("a", "a3") is RELEASED
    assert harness.state("b1") is GRANTED


def test_a_release_is_carried_out_without_a_waiter() -> None:
    harness = SchedulerHarness()
    harness.pipeline("a")
    harness.generate("a", "g")
    harness.act()
    harness.coordinators["a"].is_hung = True
    harness.ask(NotifyReleaseGpus("r", "a", GENERATION_CLUSTER))
    harness.open.clear()
    harness.run(harness.settings.patience_s + 1)
    harness.coordinators["a"].is_hung = False
    harness.run(2)
    assert harness.state("r") is RELEASED
    assert {worker.phase for worker in harness.of("a").workers} == {WorkerPhase.ASLEEP}


def queue_of_two(num_gpus: int = 4) -> SchedulerHarness:
    """`a` trains, `b` waits for one of its GPUs."""
    harness = SchedulerHarness(num_gpus)
    harness.pipeline("a", train=(0, 1))
    harness.pipeline("b", train=(1, 2))
    harness.train("a", "a1")
    harness.train("b", "b1")
    return harness


def test_gpus_offered_to_a_dead_trainer_are_free_after_its_patience() -> None:
    harness = queue_of_two()
    harness.open.clear()
    harness.release("a", "a2")
    assert harness.state("b1") is OFFERED
    assert harness.train("a", "a3") is QUEUED
    harness.run(harness.settings.patience_s + 1)
    assert harness.state("a3") is GRANTED
    assert not harness.of("b").holds
    assert harness.state("b1") is OFFERED, "a silent client gets no answer"


def test_a_trainer_delayed_past_its_offer_waits_again_and_an_old_reply_takes_nothing() -> None:
    harness = queue_of_two()
    delayed = harness.open.pop("b1")
    harness.release("a", "a2")
    first = harness.moved["b1"].offer
    harness.train("a", "a3")
    harness.run(harness.settings.patience_s + 1)
    harness.send(TakeGpus("b1", first))
    assert harness.state("b1") is OFFERED
    harness.open["b1"] = delayed
    harness.send(delayed)
    assert harness.state("b1") is QUEUED
    del harness.open["b1"]
    harness.release("a", "a4")
    assert harness.state("b1") is OFFERED
    harness.send(TakeGpus("b1", first))
    assert harness.state("b1") is OFFERED
    harness.send(TakeGpus("b1", harness.moved["b1"].offer))
    assert harness.state("b1") is GRANTED


def test_a_taken_offer_never_expires() -> None:
    harness = queue_of_two()
    harness.open.clear()
    harness.run(harness.settings.memory_s + harness.settings.patience_s)
    harness.begin()
    harness.run(harness.settings.patience_s + 1)
    assert TRAIN in harness.of("a").holds


def test_an_offer_survives_the_scheduler_and_not_its_requester() -> None:
    harness = queue_of_two()
    del harness.open["b1"]
    harness.release("a", "a2")
    offer = harness.moved["b1"].offer
    harness.begin()
    harness.run(harness.settings.patience_s - 1)
    assert TRAIN in harness.of("b").holds
    harness.run(2)
    assert not harness.of("b").holds
    again = queue_of_two()
    delayed = again.open.pop("b1")
    again.release("a", "a2")
    again.begin()
    again.send(delayed)
    assert again.moved["b1"].offer == offer
    again.send(TakeGpus("b1", offer))
    assert again.state("b1") is GRANTED


def test_an_offered_request_that_is_withdrawn_returns_its_gpus() -> None:
    harness = queue_of_two()
    del harness.open["b1"]
    harness.release("a", "a2")
    harness.send(WithdrawRequest("b1"))
    assert harness.state("b1") is WITHDRAWN
    assert not harness.scheduler.state.fleet.owners
    harness.send(TakeGpus("b1", harness.moved["b1"].offer))
    assert harness.state("b1") is WITHDRAWN
    harness.send(TakeGpus("unknown", 1))
    assert "unknown" not in harness.moved


def test_an_expired_offer_takes_nothing_from_the_request_that_holds_its_gpus() -> None:
    harness = SchedulerHarness()
    harness.pipeline("a")
    harness.train("a", "k1")
    second = RequestGpus("k2", "a", TRAIN, GpuPriority.ACTOR_TRAINING)
    harness.send(second)
    assert harness.state("k2") is OFFERED
    harness.run(harness.settings.patience_s + 1)
    assert harness.scheduler.state.tickets["k2"].state is WITHDRAWN
    assert TRAIN in harness.of("a").holds


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
def test_an_impossible_request_is_refused_in_one_line(
    cluster: str, priority: int, text: str
) -> None:
    harness = SchedulerHarness()
    harness.pipeline("a")
    assert harness.ask(RequestGpus("k", "a", cluster, priority)) is REFUSED
    assert text in harness.moved["k"].reason
    assert "\n" not in harness.moved["k"].reason


def test_a_pipeline_without_engines_is_refused_generation() -> None:
    harness = SchedulerHarness()
    harness.pipeline("a", generation=())
    assert harness.generate("a", "k") is REFUSED
    assert "no engines" in harness.moved["k"].reason
    assert harness.release("a", "r", GENERATION_CLUSTER) is RELEASED


@pytest.mark.parametrize("key", ["", *ShrinkReason])
def test_a_key_that_looks_like_a_plans_reason_stops_no_pipeline(key: str) -> None:
    harness = SchedulerHarness()
    harness.pipeline("a", train=(0, 1))
    harness.generate("a", "g")
    harness.act()
    assert harness.train("a", key) is REFUSED
    assert "key" in harness.moved[key].reason
    harness.train("a", "t")
    harness.wait_for("t", GRANTED, 5)
    assert not harness.scheduler.state.problems


def test_an_unknown_or_unadmitted_pipeline_is_refused() -> None:
    harness = SchedulerHarness()
    assert harness.train("x", "k1") is REFUSED
    assert "register" in harness.moved["k1"].reason
    spec = PipelineSpec(pipeline_id="b", clusters={}, generation=(0,))
    harness.send(RegisterPipeline("r", spec))
    assert harness.generate("b", "k2") is REFUSED
    assert "admit" in harness.moved["k2"].reason


def test_a_pipeline_without_hooks_is_refused_generation_and_not_training() -> None:
    harness = SchedulerHarness()
    harness.pipeline("a")
    harness.scheduler.state.pipeline_records["a"].is_wired = False
    assert harness.generate("a", "k1") is REFUSED
    assert "PipelineHooks" in harness.moved["k1"].reason
    assert harness.train("a", "k2") is GRANTED


def test_a_release_then_request_whose_request_is_refused_releases_nothing() -> None:
    harness = SchedulerHarness()
    harness.pipeline("a")
    harness.train("a", "a1")
    ask = NotifyReleaseThenRequestGpus("a2", "a", TRAIN, "critic", GpuPriority.CRITIC_TRAINING)
    assert harness.ask(ask) is REFUSED
    assert TRAIN in harness.of("a").holds


def test_a_release_then_request_of_a_leaving_pipeline_still_releases() -> None:
    harness = SchedulerHarness()
    harness.pipeline("a")
    harness.train("a", "a1")
    harness.send(UnregisterPipeline("u", "a"))
    priority = GpuPriority.GENERATION
    ask = NotifyReleaseThenRequestGpus("a2", "a", TRAIN, GENERATION_CLUSTER, priority)
    assert harness.ask(ask) is REFUSED
    assert harness.answers["u"].ok, "otherwise it would leave only when it is killed"
    assert not harness.scheduler.state.fleet.owners
