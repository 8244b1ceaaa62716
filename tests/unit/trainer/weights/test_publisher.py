"""The publisher machine: every step and failure of an update, two publishers, random schedules."""

import random

import pytest

from rollmesh.trainer.weights.publisher import (
    Publisher,
    PublisherSettings,
    PublishRequested,
    Superseded,
    UpdatePhase,
)
from rollmesh.wire.fleet import (
    AddEngine,
    BeginUpdate,
    DropEngine,
    EnginePhase,
    FinishUpdate,
    FleetAnswered,
    JoinEngine,
    ReadFleet,
    RemoveEngine,
)
from rollmesh.wire.machine import Received, Send, Ticked
from tests.unit.trainer.weights.publisher_world import (
    A,
    B,
    Mesh,
    ModelEngine,
    draining,
    new_fleet,
    probe_of,
    target,
)

C = "http://c"


def test_publication_takes_each_engine_through_the_steps_in_order() -> None:
    mesh = Mesh(A, B)
    mesh.run(1.0)
    mesh.publish(target(1))
    mesh.run(1.0)
    [report] = mesh.reports
    assert report.policy_version == 1
    assert set(report.updated) == {A, B}
    assert report.failed == ()
    assert [phase.value for url, phase in mesh.was_called if url == A] == [
        "draining",
        "pausing",
        "flushing",
        "loading",
        "resuming",
        "scoring",
    ]
    assert (mesh.phase(), mesh.policy_version()) == (EnginePhase.READY, 1)
    assert not mesh.engines[A].is_paused
    assert mesh.publisher.phases() == {}


def test_engine_unknown_to_a_new_router_is_updated_again() -> None:
    mesh = Mesh(A)
    mesh.run(1.0)
    mesh.publish(target(1))
    mesh.run(1.0)
    mesh.fleet = new_fleet()
    mesh.run(2.0)  # the fleet table is read, and A is not in it
    mesh.was_called.clear()
    mesh.to_fleet.append(JoinEngine(0, A))
    mesh.run(3.0)
    assert (A, UpdatePhase.LOADING) in mesh.was_called
    assert mesh.phase() is EnginePhase.READY


@pytest.mark.parametrize("left_at", [1, 30])
def test_an_engine_that_another_run_left_at_an_equal_or_higher_number_is_updated(
    left_at: int,
) -> None:
    mesh = Mesh(A)
    mesh.engines[A].label = mesh.engines[A].weights = left_at
    mesh.run(1.0)
    mesh.publish(PublishRequested(1, "v1", probe_of(1)))
    mesh.run(2.0)
    assert mesh.reports[0].updated == (A,)
    assert UpdatePhase.LOADING in [phase for _, phase in mesh.was_called]
    assert mesh.engines[A].label == 1


def test_serving_engines_are_those_of_the_last_table() -> None:
    mesh = Mesh(A, B)
    mesh.run(1.0)
    assert mesh.publisher.serving() == ()
    mesh.publish(target(1))
    mesh.run(3.0)
    assert mesh.publisher.serving() == (A, B)
    mesh.engines[B].is_up = False
    mesh.run(8.0)
    assert mesh.publisher.serving() == (A,)


def test_an_engine_that_was_updated_is_left_alone() -> None:
    mesh = Mesh(A)
    mesh.run(1.0)
    mesh.publish(target(1))
    mesh.run(2.0)
    mesh.was_called.clear()
    mesh.run(5.0)
    assert mesh.was_called == []


def test_empty_fleet_ends_a_publication_at_once_and_later_engines_are_updated() -> None:
    mesh = Mesh()
    mesh.publish(target(1))
    mesh.run(1.0)
    assert mesh.reports[0].updated == ()
    mesh.engines[A] = ModelEngine()
    mesh.to_fleet.append(JoinEngine(0, A))
    mesh.run(3.0)
    assert (mesh.phase(), mesh.policy_version()) == (EnginePhase.READY, 1)


@pytest.mark.parametrize(
    "step", ["draining", "pausing", "flushing", "loading", "resuming", "scoring"]
)
def test_engine_that_fails_a_step_is_fenced_resumed_and_tried_again(step: str) -> None:
    mesh = Mesh(A, B)
    mesh.run(1.0)
    mesh.engines[A].broken = UpdatePhase(step)
    mesh.publish(target(1))
    mesh.run(1.0)
    [report] = mesh.reports
    assert report.updated == (B,)
    assert [text.startswith(f"{A}: {step}: broken") for text in report.failed] == [True]
    assert mesh.phase() is not EnginePhase.READY
    assert not mesh.engines[A].is_paused
    mesh.engines[A].broken = None
    mesh.run(5.0)
    assert (mesh.phase(), mesh.policy_version()) == (EnginePhase.READY, 1)


def test_engine_is_paused_when_its_unresumable_requests_have_ended() -> None:
    mesh = Mesh(A, B)
    mesh.run(1.0)
    mesh.engines[A].num_requests = 2
    mesh.publish(target(1))
    mesh.run(2.0)
    assert mesh.publisher.phases() == {A: UpdatePhase.DRAINING}
    assert (A, UpdatePhase.PAUSING) not in mesh.was_called
    assert (mesh.phase(A), mesh.phase(B)) == (EnginePhase.UPDATING, EnginePhase.READY)
    mesh.engines[A].num_requests = 0
    mesh.run(0.5)
    assert (mesh.phase(), mesh.policy_version()) == (EnginePhase.READY, 1)
    assert mesh.reports[0].gap_s > 2.0


def test_drain_is_over_after_two_leases_and_none_of_them_lapses() -> None:
    mesh = draining(target(1))
    for _ in range(39):
        mesh.run(0.5)
        assert mesh.publisher.phases() == {A: UpdatePhase.DRAINING}
        assert mesh.phase() is EnginePhase.UPDATING
    mesh.run(1.0)
    assert (mesh.phase(), mesh.policy_version()) == (EnginePhase.READY, 1)
    assert mesh.reports[0].failed == ()


def test_long_drain_ends_in_the_newest_weights_alone() -> None:
    mesh = draining(target(1))
    mesh.run(2.0)
    mesh.publish(target(2))
    mesh.run(2.0)
    mesh.engines[A].num_requests = 0
    mesh.run(1.0)
    assert (mesh.engines[A].weights, mesh.policy_version()) == (2, 2)
    assert [phase for _, phase in mesh.was_called].count(UpdatePhase.LOADING) == 1


@pytest.mark.parametrize("num_requests", [0, 1])
def test_engine_whose_lease_is_not_renewed_is_given_back_before_it_ends(num_requests: int) -> None:
    mesh = draining(target(1))
    mesh.run(2.9)
    mesh.is_deaf = True
    mesh.run(1.0)
    mesh.engines[A].num_requests = num_requests
    mesh.run(4.5)
    assert UpdatePhase.PAUSING not in [phase for _, phase in mesh.was_called]
    assert mesh.was_called[-1] == (A, UpdatePhase.UNDOING)
    mesh.engines[A].num_requests, mesh.is_deaf = 0, False
    mesh.run(5.0)
    assert (mesh.phase(), mesh.policy_version()) == (EnginePhase.READY, 1)


def test_renewed_lease_counts_from_its_first_request() -> None:
    mesh = draining(target(1))
    mesh.run(2.0)
    mesh.is_deaf = True
    while not (asks := [each for each in mesh.to_fleet if isinstance(each, BeginUpdate)]):
        mesh.run(0.05)
    [first] = asks  # the request arrives, its answer is slow, and the repeated request is lost
    answers = mesh.fleet.step(Received(b"publisher-0", first), mesh.now_s)
    mesh.run(4.0)
    assert (A, UpdatePhase.UNDOING) not in mesh.was_called
    mesh.to_publisher += [each.message for each in answers if isinstance(each, Send)]
    while mesh.phase() is EnginePhase.UPDATING:
        mesh.run(0.05)
    assert mesh.was_called[-1] == (A, UpdatePhase.UNDOING)


def test_renewal_that_is_answered_as_the_engine_is_given_back_changes_nothing() -> None:
    mesh = draining(target(1))
    mesh.run(2.9)
    mesh.is_deaf = True
    mesh.run(1.0)
    while mesh.publisher.phases()[A] is UpdatePhase.DRAINING:
        mesh.now_s += 0.05
        mesh.publish(Ticked())
    mesh.calls.clear()  # the undoing call hangs
    mesh.is_deaf = False
    mesh.run(0.2)
    assert mesh.publisher.phases() == {A: UpdatePhase.UNDOING}


def test_publisher_that_is_overtaken_as_it_drains_gives_its_engine_back() -> None:
    mesh = draining(target(3))
    mesh.run(1.0)
    asks = (JoinEngine(0, B), BeginUpdate(1, B, 5, 10.0), FinishUpdate(2, B, 5, True))
    for ask in (*asks, RemoveEngine(3, B)):
        mesh.fleet.step(Received(b"another", ask), mesh.now_s)
    for at in range(10):  # the turn keeps running
        mesh.run(0.5)
        mesh.fleet.step(Received(b"another", ReadFleet(at)), mesh.now_s)
    assert mesh.superseded == [Superseded(3, 5)]
    assert mesh.was_called[-1] == (A, UpdatePhase.UNDOING)
    begun = mesh.fleet.step(Received(b"another", BeginUpdate(4, A, 5, 10.0)), mesh.now_s)
    answers = [each.message for each in begun if isinstance(each, Send)]
    assert [answer.ok for answer in answers if isinstance(answer, FleetAnswered)] == [True]


def test_probe_detects_an_update_that_changed_nothing() -> None:
    mesh = Mesh(A)
    mesh.run(1.0)
    mesh.engines[A].is_idle = True
    mesh.publish(target(1))
    mesh.run(1.0)
    assert "differ from the trainer's" in mesh.reports[0].failed[0]
    assert mesh.phase() is not EnginePhase.READY


def tolerant(*urls: str) -> Mesh:
    """Engines at version 1, and a publisher whose tolerance hides a step."""
    mesh = Mesh(*urls)
    mesh.publisher = Publisher(PublisherSettings(lease_s=10.0, name="run", probe_tolerance=5.0))
    mesh.run(1.0)
    mesh.publish(target(1))
    mesh.run(1.0)
    assert mesh.reports[0].failed == ()
    return mesh


def test_small_ignored_step_is_detected_against_the_last_proof() -> None:
    mesh = tolerant(A, B)
    mesh.engines[A].is_idle = True
    mesh.publish(target(2))
    mesh.run(1.0)
    assert "since version 1" in mesh.reports[1].failed[0]
    assert mesh.reports[1].updated == (B,)
    mesh.run(5.0)
    assert mesh.phase() is not EnginePhase.READY
    assert mesh.doubted == []


def test_last_engine_that_only_seems_to_ignore_updates_is_used_and_reported_once() -> None:
    mesh = tolerant(A)
    mesh.engines[A].is_idle = True
    for policy_version in (2, 3):
        mesh.publish(target(policy_version))
        mesh.run(1.0)
        assert mesh.reports[-1].updated == mesh.reports[-1].doubted == (A,)
    assert [each.url for each in mesh.doubted] == [A]
    assert (mesh.phase(), mesh.policy_version()) == (EnginePhase.READY, 3)
    mesh.engines[A].is_idle = False
    mesh.publish(target(4))
    mesh.run(1.0)
    assert mesh.reports[-1].doubted == ()


def test_engine_that_seems_to_ignore_updates_is_used_once_no_other_serves() -> None:
    mesh = tolerant(A, B)
    mesh.engines[A].is_idle = True
    mesh.engines[B].broken = UpdatePhase.LOADING
    mesh.publish(target(2))
    mesh.run(5.0)
    assert (mesh.phase(A), mesh.policy_version(A)) == (EnginePhase.READY, 2)
    assert mesh.phase(B) is not EnginePhase.READY


def test_proof_is_not_held_against_a_process_that_was_started_again() -> None:
    mesh = tolerant(A, B)
    mesh.engines[A].is_idle = True
    mesh.publish(target(2))
    mesh.run(1.0)
    assert mesh.reports[1].updated == (B,)
    mesh.engines[A].restart()
    mesh.engines[A].weights = 1
    mesh.run(5.0)
    assert (mesh.phase(), mesh.policy_version()) == (EnginePhase.READY, 2)


def test_version_that_an_engine_names_decides_where_its_scores_cannot() -> None:
    mesh = Mesh(A)
    mesh.run(1.0)
    mesh.engines[A].named = 7
    mesh.publish(target(1))
    mesh.run(1.0)
    assert mesh.reports[0].failed == (f"{A}: scoring: it says that it serves version 7",)


def test_engine_that_accepts_after_the_publication_has_failed_is_reported() -> None:
    mesh = Mesh(A)
    mesh.run(1.0)
    mesh.engines[A].broken = UpdatePhase.LOADING
    mesh.publish(target(1))
    mesh.run(3.0)
    assert (mesh.reports[0].updated, mesh.accepted) == ((), [])
    mesh.engines[A].broken = None
    mesh.run(5.0)
    assert mesh.accepted == [1]


def test_dead_engine_does_not_delay_the_others() -> None:
    mesh = Mesh(A, B)
    mesh.engines[A].is_up = False
    mesh.run(1.0)
    mesh.publish(target(1))
    mesh.run(2.0)
    assert mesh.reports[0].updated == (B,)
    assert mesh.reports[0].failed


def test_engine_that_restarts_later_is_updated_again() -> None:
    mesh = Mesh(A)
    mesh.run(1.0)
    mesh.publish(target(1))
    mesh.run(1.0)
    mesh.engines[A].restart()
    mesh.run(5.0)
    assert (mesh.phase(), mesh.policy_version()) == (EnginePhase.READY, 1)
    assert mesh.engines[A].weights == 1


def test_call_that_hangs_is_given_up_before_the_lease_ends() -> None:
    mesh = Mesh(A, lease_s=4.0)
    mesh.run(1.0)
    mesh.publish(target(1))
    mesh.deliver()
    mesh.deliver()
    mesh.calls.clear()
    mesh.run(5.0)
    assert "took too long" in mesh.reports[0].failed[0]
    assert not mesh.engines[A].is_paused


@pytest.mark.parametrize("num_calls", range(6))
def test_publisher_killed_at_any_step_wedges_no_engine(num_calls: int) -> None:
    mesh = Mesh(A, lease_s=3.0)
    mesh.run(1.0)
    mesh.publish(target(1))
    while len(mesh.was_called) <= num_calls:
        mesh.deliver()
    mesh.kill()
    mesh.run(5.0)
    assert not mesh.engines[A].is_paused
    assert mesh.phase() in (EnginePhase.READY, EnginePhase.JOINING)
    assert mesh.phase() is EnginePhase.JOINING or mesh.engines[A].weights == mesh.policy_version()
    mesh.publish(target(2))
    mesh.run(2.0)
    assert (mesh.phase(), mesh.policy_version()) == (EnginePhase.READY, 2)


@pytest.mark.parametrize("num_calls", range(6))
def test_restarted_publisher_does_not_wait_for_its_old_lease(num_calls: int) -> None:
    mesh = Mesh(A, lease_s=30.0)
    mesh.run(1.0)
    mesh.publish(target(1))
    while len(mesh.was_called) <= num_calls:
        mesh.deliver()
    mesh.kill()
    mesh.publish(target(2))
    mesh.run(1.0)
    assert (mesh.phase(), mesh.engines[A].weights) == (EnginePhase.READY, 2)
    assert [report.updated for report in mesh.reports] == [(A,)]


def test_newer_target_replaces_the_current_one() -> None:
    mesh = Mesh(A)
    mesh.run(1.0)
    mesh.publish(target(1))
    mesh.deliver()
    mesh.publish(target(2))
    mesh.publish(target(1))
    mesh.run(5.0)
    assert [report.policy_version for report in mesh.reports] == [1, 2]
    assert mesh.reports[1].updated == (A,)
    assert mesh.engines[A].weights == 2


def test_superseded_publisher_reports_it_once_and_ends() -> None:
    mesh = Mesh(A)
    mesh.run(1.0)
    mesh.engines[A].label = 5
    for ask in (BeginUpdate(0, A, 5, 10.0), FinishUpdate(1, A, 5, True)):
        mesh.fleet.step(Received(b"another", ask), mesh.now_s)
    mesh.publish(target(3))
    for at in range(20):
        mesh.fleet.step(Received(b"another", ReadFleet(at)), mesh.now_s)
        mesh.run(0.5)
    assert mesh.superseded == [Superseded(3, 5)]
    [report] = mesh.reports
    assert "published version 5" in report.failed[0]
    assert mesh.was_called == []
    assert (mesh.phase(), mesh.policy_version()) == (EnginePhase.READY, 5)


def test_router_receives_the_adapter_of_a_target() -> None:
    mesh = Mesh(A)
    mesh.run(1.0)
    mesh.publish(PublishRequested(1, "v1", probe_of(1), "rollmesh-v1"))
    mesh.run(1.0)
    assert mesh.row().adapter == "rollmesh-v1"
    mesh.publish(target(2))
    mesh.run(1.0)
    assert (mesh.row().adapter, mesh.policy_version()) == ("", 2)


def test_router_that_lost_its_table_is_asked_again() -> None:
    mesh = Mesh(A)
    mesh.run(1.0)
    mesh.publish(target(1))
    mesh.deliver()
    mesh.fleet = new_fleet()
    mesh.to_fleet.append(JoinEngine(0, A))
    mesh.run(15.0)
    assert (mesh.phase(), mesh.policy_version()) == (EnginePhase.READY, 1)
    assert mesh.reports


@pytest.mark.parametrize("seed", range(60))
def test_random_losses_and_crashes_end_with_every_engine_at_the_newest_version(seed: int) -> None:
    rng = random.Random(seed)
    mesh = Mesh(A, B, lease_s=3.0)
    mesh.deliver()
    policy_version = 0
    for _ in range(12):
        engine = mesh.engines[rng.choice([A, B])]
        act = rng.randrange(5)
        if act == 0:
            engine.restart()
            engine.is_up = not engine.is_up
        elif act == 1:
            engine.broken = rng.choice([None, *UpdatePhase])
        elif act == 2:
            engine.is_idle = not engine.is_idle
        else:
            policy_version += 1
            mesh.publish(target(policy_version))
        mesh.run(rng.choice([0.1, 1.0, 4.0]), rng)
    policy_version += 1
    mesh.publish(target(policy_version))
    for engine in mesh.engines.values():
        engine.is_up, engine.broken, engine.is_idle = True, None, False
    mesh.run(20.0)
    assert [report.policy_version for report in mesh.reports] == list(range(1, policy_version + 1))
    for url, engine in mesh.engines.items():
        assert (mesh.phase(url), mesh.policy_version(url)) == (EnginePhase.READY, policy_version)
        assert engine.weights == policy_version
        assert not engine.is_paused


@pytest.mark.parametrize(
    "step", ["draining", "pausing", "flushing", "loading", "resuming", "scoring"]
)
def test_a_publisher_without_descriptors_fences_no_engine(step: str) -> None:
    mesh = Mesh(A)
    mesh.run(1.0)
    mesh.engines[A].out_of_reach = UpdatePhase(step)
    mesh.publish(target(1))
    for _ in range(300):  # three leases
        mesh.run(0.1)
        assert mesh.phase() in (EnginePhase.READY, EnginePhase.UPDATING)
    [report] = mesh.reports
    assert [text.startswith(f"{A}: {step}: no descriptor") for text in report.failed] == [True]
    mesh.engines[A].out_of_reach = None
    mesh.run(15.0)
    assert (mesh.phase(), mesh.policy_version()) == (EnginePhase.READY, 1)
    assert not mesh.engines[A].is_paused


def test_an_engine_that_the_operator_adds_is_updated_before_it_serves() -> None:
    mesh = Mesh(A)
    mesh.run(1.0)
    mesh.publish(target(1))
    mesh.run(2.0)
    mesh.engines[C] = ModelEngine()
    mesh.engines[C].label = mesh.engines[C].weights = 1  # of another run
    mesh.tend_fleet(Received(b"operator", AddEngine(1, C)))
    while mesh.phase(C) is not EnginePhase.READY:
        mesh.run(0.05)
    assert (C, UpdatePhase.LOADING) in mesh.was_called
    assert (C, UpdatePhase.SCORING) in mesh.was_called
    assert mesh.policy_version(C) == 1


@pytest.mark.parametrize("drains", [True, False])
def test_an_engine_that_the_operator_removes_gets_no_more_updates(drains: bool) -> None:
    mesh = Mesh(A, B)
    mesh.run(1.0)
    mesh.publish(target(1))
    mesh.run(2.0)
    mesh.tend_fleet(Received(b"operator", DropEngine(1, A, drains)))
    mesh.was_called.clear()
    mesh.publish(target(2))
    mesh.run(3.0)
    assert {url for url, _ in mesh.was_called} == {B}
    assert mesh.reports[-1].updated == (B,)
    assert mesh.reports[-1].failed == ()


@pytest.mark.parametrize("drains", [True, False])
@pytest.mark.parametrize("after_s", [0.05, 0.1, 0.2, 0.3, 0.5])
def test_an_engine_that_is_removed_during_its_update_is_no_failure(
    drains: bool, after_s: float
) -> None:
    mesh = Mesh(A, B)
    mesh.run(1.0)
    mesh.publish(target(1))
    mesh.run(after_s)
    mesh.tend_fleet(Received(b"operator", DropEngine(1, A, drains)))
    mesh.run(8.0)
    mesh.publish(target(2))
    mesh.run(3.0)
    assert not mesh.engines[A].is_paused
    assert (mesh.phase(B), mesh.policy_version(B)) == (EnginePhase.READY, 2)
    assert mesh.reports[-1].failed == ()
    assert A not in mesh.publisher.phases()
