"""Members of the fleet: publishers, leases and adapters, and which of two publishers wins."""

import pytest

from rollmesh.core.types import UNVERSIONED
from rollmesh.engine.fleet import ContinueEngine, FleetSettings
from rollmesh.engine.members import ActivePublisher
from rollmesh.wire.fleet import (
    BeginUpdate,
    EnginePhase,
    EngineRow,
    FinishUpdate,
    JoinEngine,
    PublisherLeft,
    ReadFleet,
)
from rollmesh.wire.machine import Received
from tests.unit.engine.fleet_bench import A, B, Bench, ready


def test_of_two_publishers_the_newer_wins_while_it_is_alive() -> None:
    bench = ready(A, B)
    new, old = b"new", b"old"
    assert bench.ask(BeginUpdate(1, A, 5, 5.0), new).ok
    # During its update the other waits, whatever its version.
    assert bench.ask(BeginUpdate(2, A, 6, 5.0), old).superseded_by == -1
    assert bench.ask(FinishUpdate(3, A, 5, True), new).ok
    # It may have been killed: until its next message, the other is not superseded.
    for _ in range(2):
        bench.tick(0.5)
        waits = bench.ask(BeginUpdate(4, A, 4, 5.0), old)
        assert (waits.ok, waits.superseded_by) == (False, -1)
    bench.tick(0.5)
    bench.ask(ReadFleet(4), new)
    for url in (A, B):
        late = bench.ask(BeginUpdate(4, url, 4, 5.0), old)
        assert (late.ok, late.superseded_by) == (False, 5)
        assert late.error == (
            f"{url}: a publisher that still runs has published version 5; version 4 is too late"
        )
    assert bench.ask(BeginUpdate(5, B, 5, 5.0), new).ok
    assert bench.ask(FinishUpdate(6, B, 5, True), new).ok
    # The one with the newer version takes over, and the roles change.
    assert bench.ask(BeginUpdate(7, A, 6, 5.0), old).ok
    assert bench.ask(FinishUpdate(8, A, 6, True), old).ok
    assert bench.ask(BeginUpdate(9, A, 5, 5.0), new).superseded_by == -1
    bench.tick(0.5)
    bench.ask(ReadFleet(10), old)
    assert bench.ask(BeginUpdate(11, A, 5, 5.0), new).superseded_by == 6


def test_a_publisher_that_is_gone_blocks_no_other() -> None:
    bench = ready(A)
    bench.ask(BeginUpdate(1, A, 30, 5.0), b"of an earlier run")
    bench.ask(FinishUpdate(2, A, 30, True), b"of an earlier run")
    bench.tick(9.0)
    assert not bench.ask(BeginUpdate(3, A, 1, 5.0), b"of this run").ok
    bench.tick(1.0)
    assert bench.ask(BeginUpdate(4, A, 1, 5.0), b"of this run").ok


@pytest.mark.parametrize("least_version", [-1, 0])
def test_the_first_publisher_of_a_fleet_is_never_refused(least_version: int) -> None:
    bench = Bench(settings=FleetSettings(least_version=least_version))
    bench.take(bench.fleet.step(Received(b"", JoinEngine(0, A)), bench.now_s))
    assert bench.ask(BeginUpdate(1, A, 0, 5.0)).ok


def test_the_row_shows_an_adapter_until_the_engine_has_other_weights() -> None:
    bench = ready(A)
    bench.ask(BeginUpdate(1, A, 1, 5.0))
    bench.ask(FinishUpdate(2, A, 1, True, "", "rollmesh-v1"))
    assert bench.row().adapter == "rollmesh-v1"
    bench.tick(1.0)
    bench.answer(A, policy_version=1, adapter="rollmesh-v1")
    assert bench.row() == EngineRow(A, "i1", EnginePhase.READY, 1, adapter="rollmesh-v1")
    bench.tick(1.0)
    bench.answer(A, policy_version=0, incarnation="i2")
    assert (bench.phase(), bench.row().adapter) == (EnginePhase.JOINING, "")
    bench.ask(BeginUpdate(3, A, 2, 5.0))
    bench.ask(FinishUpdate(4, A, 2, True))
    assert (bench.phase(), bench.row().adapter) == (EnginePhase.READY, "")


def test_fleet_of_a_new_router_learns_an_engines_adapter_from_the_engine() -> None:
    bench = Bench(A)
    bench.answer(A, policy_version=7, adapter="rollmesh-v7")
    assert bench.row() == EngineRow(A, "i1", EnginePhase.READY, 7, adapter="rollmesh-v7")


def test_engine_whose_adapter_is_gone_gets_no_turn_until_it_is_updated() -> None:
    bench = ready(A)
    bench.ask(BeginUpdate(1, A, 1, 5.0))
    bench.ask(FinishUpdate(2, A, 1, True, "", "rollmesh-v1"))
    bench.answer(A, policy_version=1, adapter="")
    assert bench.phase() is EnginePhase.JOINING
    bench.ask(BeginUpdate(3, A, 1, 5.0))
    bench.ask(FinishUpdate(4, A, 1, True, "", "rollmesh-v1"))
    assert bench.phase() is EnginePhase.READY


def test_a_restarted_publisher_takes_over_at_once_and_its_predecessor_is_refused() -> None:
    bench = ready(A)
    old, new = b"publisher-1", b"publisher-2"
    assert bench.ask(BeginUpdate(1, A, 4, 30.0, "run"), old).ok
    assert bench.ask(BeginUpdate(1, A, 5, 30.0, "run"), new).ok
    assert not bench.ask(BeginUpdate(2, A, 4, 30.0, "run"), old).ok, "too late"
    assert not bench.ask(FinishUpdate(3, A, 4, True), old).ok
    assert bench.phase() is EnginePhase.UPDATING
    assert bench.ask(FinishUpdate(2, A, 5, True), new).ok
    assert (bench.phase(), bench.row().policy_version) == (EnginePhase.READY, 5)


def test_a_publisher_without_a_name_takes_over_from_no_other() -> None:
    bench = ready(A)
    assert bench.ask(BeginUpdate(1, A, 4, 30.0), b"one").ok
    assert not bench.ask(BeginUpdate(1, A, 5, 30.0), b"other").ok
    assert not bench.ask(BeginUpdate(2, A, 5, 30.0, "run"), b"other").ok


def test_second_publisher_is_refused_while_the_first_holds_the_lease() -> None:
    bench = ready(A)
    bench.ask(BeginUpdate(2, A, 1, 30.0))
    answer = bench.ask(BeginUpdate(2, A, 2, 30.0), route=b"other")
    assert not answer.ok
    assert "another publisher" in answer.error


def test_engine_that_joins_with_older_weights_than_are_being_published_waits_for_them() -> None:
    bench = Bench(A)
    bench.ask(ReadFleet(1, 7), b"publisher")
    bench.answer(A, policy_version=6)
    assert bench.phase() is EnginePhase.JOINING
    assert bench.row().detail == "serves version 6, the fleet is at 7"
    bench.tick(1.0)
    bench.answer(A, policy_version=7)
    assert bench.phase() is EnginePhase.JOINING  # no publisher reported its new weights
    assert bench.ask(BeginUpdate(2, A, 7, 5.0), b"publisher").ok
    assert bench.ask(FinishUpdate(3, A, 7, True), b"publisher").ok
    assert bench.phase() is EnginePhase.READY


def test_an_announced_version_is_forgotten_when_its_publisher_leaves() -> None:
    bench = Bench(A)
    bench.ask(ReadFleet(1, 7), b"publisher")
    bench.answer(A, policy_version=6)
    bench.take(bench.fleet.step(Received(b"publisher", PublisherLeft()), bench.now_s))
    bench.tick(1.0)
    bench.answer(A, policy_version=6)
    assert bench.phase() is EnginePhase.READY


def test_an_announced_version_is_forgotten_after_the_grace_of_a_killed_publisher() -> None:
    bench = Bench(A, settings=FleetSettings(publisher_grace_s=10.0))
    bench.ask(ReadFleet(1, 7), b"publisher")
    bench.answer(A, policy_version=6)
    bench.tick(9.0)
    bench.answer(A, policy_version=6)
    assert bench.phase() is EnginePhase.JOINING
    bench.tick(1.0)
    bench.answer(A, policy_version=6)
    assert bench.phase() is EnginePhase.READY


def test_an_announcement_beside_an_active_publisher_is_ignored() -> None:
    bench = ready(A)
    assert bench.ask(BeginUpdate(1, A, 5, 5.0), b"new").ok
    assert bench.ask(FinishUpdate(2, A, 5, True), b"new").ok
    bench.ask(ReadFleet(3, 50), b"ended")
    assert bench.ask(BeginUpdate(4, A, 6, 5.0), b"new").ok
    assert bench.ask(FinishUpdate(5, A, 6, True), b"new").ok
    bench.ask(JoinEngine(6, B))
    bench.answer(B, policy_version=6)
    assert bench.phase(B) is EnginePhase.READY


ONE, OTHER = b"one", b"other"


def active_publisher(policy_version: int = 18) -> ActivePublisher:
    active = ActivePublisher(grace_s=10.0, least_version=UNVERSIONED)
    active.verified(ONE, policy_version, 0.0)
    return active


def test_another_publisher_needs_newer_weights() -> None:
    active = active_publisher()
    assert active.is_ahead_of(OTHER, 18, 1.0)
    assert not active.is_ahead_of(OTHER, 19, 1.0)
    assert not active.is_ahead_of(ONE, 1, 1.0)


def test_a_publisher_that_is_silent_for_its_grace_blocks_no_other() -> None:
    active = active_publisher()
    active.seen(ONE, 5.0)
    active.seen(OTHER, 14.0)
    assert active.is_ahead_of(OTHER, 1, 14.9)
    assert not active.is_ahead_of(OTHER, 1, 15.0)


def test_a_publisher_that_left_blocks_no_other() -> None:
    active = active_publisher()
    active.leave(OTHER)
    assert active.is_ahead_of(OTHER, 1, 1.0)
    active.leave(ONE)
    assert not active.is_ahead_of(OTHER, 1, 1.0)


def test_the_verified_version_is_known_after_the_first_publication() -> None:
    active = ActivePublisher(grace_s=10.0, least_version=7)
    assert (active.verified_version, active.published) == (UNVERSIONED, 7)
    active.verified(ONE, 8, 0.0)
    assert active.verified_version == 8


def test_the_next_run_publishes_at_once_if_the_last_left_in_order() -> None:
    bench = ready(A)
    bench.ask(BeginUpdate(1, A, 18, 5.0), ONE)
    bench.ask(FinishUpdate(2, A, 18, True), ONE)
    bench.take(bench.fleet.step(Received(ONE, PublisherLeft()), bench.now_s))
    assert bench.ask(BeginUpdate(1, A, 1, 5.0), OTHER).ok
    assert bench.ask(FinishUpdate(2, A, 1, True), OTHER).ok
    assert (bench.phase(), bench.row().policy_version) == (EnginePhase.READY, 1)
    assert bench.fleet.table().published == 1


def test_the_next_run_waits_for_no_lease_of_a_run_that_left() -> None:
    bench = ready(A, B)
    bench.ask(BeginUpdate(1, A, 18, 30.0, "run"), ONE)
    bench.ask(BeginUpdate(1, B, 18, 30.0, "other run"), OTHER)
    left = bench.take(bench.fleet.step(Received(ONE, PublisherLeft()), bench.now_s))
    assert [a.url for a in left if isinstance(a, ContinueEngine)] == [A], (
        "it may have been left paused"
    )
    assert bench.phase(B) is EnginePhase.UPDATING, "this lease is another publisher's"
    assert bench.ask(BeginUpdate(2, A, 1, 5.0, "other run"), OTHER).ok


def test_an_engine_whose_publisher_left_during_an_update_serves_its_old_weights() -> None:
    bench = ready(A)
    bench.ask(BeginUpdate(1, A, 18, 30.0), ONE)
    bench.take(bench.fleet.step(Received(ONE, PublisherLeft()), bench.now_s))
    bench.answer(A, policy_version=0)
    assert (bench.phase(), bench.row().policy_version) == (EnginePhase.READY, 0)
    assert not bench.ask(FinishUpdate(2, A, 18, True), ONE).ok, "too late"


def test_a_restarted_router_accepts_the_versions_of_engines_until_a_publisher_reports() -> None:
    bench = Bench(A, B)  # a new router: version 4 was published through the previous one
    bench.answer(A, policy_version=0, incarnation="restarted")
    assert (bench.phase(A), bench.row(A).policy_version) == (EnginePhase.READY, 0)
    assert bench.fleet.table().published == UNVERSIONED, "readers see that no publisher reported"
    bench.ask(ReadFleet(1, 4), ONE)
    bench.answer(B, policy_version=0, incarnation="restarted")
    assert bench.phase(B) is EnginePhase.JOINING
    for url in (A, B):
        assert bench.ask(BeginUpdate(2, url, 4, 5.0), ONE).ok
        assert bench.ask(FinishUpdate(3, url, 4, True), ONE).ok
        assert (bench.phase(url), bench.row(url).policy_version) == (EnginePhase.READY, 4)
