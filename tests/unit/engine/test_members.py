"""Members of the fleet: publishers, leases and adapters, and which of two publishers wins."""

import pytest

from rollmesh.engine.backend import UNVERSIONED
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


def test_of_two_publishers_the_newer_wins_while_it_runs() -> None:
    bench = ready(A, B)
    new, old = b"new", b"old"
    assert bench.ask(BeginUpdate(1, A, 5, 5.0), new).ok
    # On its way, it is waited for, whatever its version.
    assert bench.ask(BeginUpdate(2, A, 6, 5.0), old).superseded_by == -1
    assert bench.ask(FinishUpdate(3, A, 5, True), new).ok
    # It may have been killed by now: until it is heard, nobody gives way.
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


def test_publisher_that_is_gone_stands_in_nobodys_way() -> None:
    bench = ready(A)
    bench.ask(BeginUpdate(1, A, 30, 5.0), b"of an earlier run")
    bench.ask(FinishUpdate(2, A, 30, True), b"of an earlier run")
    bench.tick(9.0)
    assert not bench.ask(BeginUpdate(3, A, 1, 5.0), b"of this run").ok
    bench.tick(1.0)
    assert bench.ask(BeginUpdate(4, A, 1, 5.0), b"of this run").ok


@pytest.mark.parametrize("least_version", [-1, 0])
def test_first_publisher_of_a_fleet_is_never_too_late(least_version: int) -> None:
    bench = Bench(settings=FleetSettings(least_version=least_version))
    bench.take(bench.fleet.step(Received(b"", JoinEngine(0, A)), bench.now_s))
    assert bench.ask(BeginUpdate(1, A, 0, 5.0)).ok


def test_adapter_stands_in_the_row_until_the_engine_has_other_weights() -> None:
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


def test_next_life_of_a_publisher_takes_over_at_once_and_the_last_has_nothing_more_to_say() -> None:
    bench = ready(A)
    old, new = b"publisher-1", b"publisher-2"
    assert bench.ask(BeginUpdate(1, A, 4, 30.0, "run"), old).ok
    assert bench.ask(BeginUpdate(1, A, 5, 30.0, "run"), new).ok
    assert not bench.ask(BeginUpdate(2, A, 4, 30.0, "run"), old).ok, "said late"
    assert not bench.ask(FinishUpdate(3, A, 4, True), old).ok
    assert bench.phase() is EnginePhase.UPDATING
    assert bench.ask(FinishUpdate(2, A, 5, True), new).ok
    assert (bench.phase(), bench.row().policy_version) == (EnginePhase.READY, 5)


def test_publisher_of_no_name_succeeds_nobody() -> None:
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
    assert bench.phase() is EnginePhase.JOINING  # its weights changed with no publisher's word
    assert bench.ask(BeginUpdate(2, A, 7, 5.0), b"publisher").ok
    assert bench.ask(FinishUpdate(3, A, 7, True), b"publisher").ok
    assert bench.phase() is EnginePhase.READY


def test_what_a_publisher_announced_does_not_outlive_it() -> None:
    bench = Bench(A)
    bench.ask(ReadFleet(1, 7), b"publisher")
    bench.answer(A, policy_version=6)
    bench.take(bench.fleet.step(Received(b"publisher", PublisherLeft()), bench.now_s))
    bench.tick(1.0)
    bench.answer(A, policy_version=6)
    assert bench.phase() is EnginePhase.READY


def test_what_a_killed_publisher_announced_holds_no_engine_back_after_its_grace() -> None:
    bench = Bench(A, settings=FleetSettings(publisher_grace_s=10.0))
    bench.ask(ReadFleet(1, 7), b"publisher")
    bench.answer(A, policy_version=6)
    bench.tick(9.0)
    bench.answer(A, policy_version=6)
    assert bench.phase() is EnginePhase.JOINING
    bench.tick(1.0)
    bench.answer(A, policy_version=6)
    assert bench.phase() is EnginePhase.READY


def test_older_publisher_that_announces_beside_a_newer_one_holds_nothing_up() -> None:
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


def reigning(policy_version: int = 18) -> ActivePublisher:
    incumbent = ActivePublisher(grace_s=10.0, least_version=UNVERSIONED)
    incumbent.verified(ONE, policy_version, 0.0)
    return incumbent


def test_another_publisher_is_let_in_with_newer_weights_alone() -> None:
    incumbent = reigning()
    assert incumbent.is_ahead_of(OTHER, 18, 1.0)
    assert not incumbent.is_ahead_of(OTHER, 19, 1.0)
    assert not incumbent.is_ahead_of(ONE, 1, 1.0)


def test_one_that_is_silent_for_its_grace_keeps_nobody_out() -> None:
    incumbent = reigning()
    incumbent.seen(ONE, 5.0)
    incumbent.seen(OTHER, 14.0)
    assert incumbent.is_ahead_of(OTHER, 1, 14.9)
    assert not incumbent.is_ahead_of(OTHER, 1, 15.0)


def test_one_that_leaves_keeps_nobody_out_from_then_on() -> None:
    incumbent = reigning()
    incumbent.leave(OTHER)
    assert incumbent.is_ahead_of(OTHER, 1, 1.0)
    incumbent.leave(ONE)
    assert not incumbent.is_ahead_of(OTHER, 1, 1.0)


def test_what_was_published_is_told_once_a_publisher_has_done_so() -> None:
    incumbent = ActivePublisher(grace_s=10.0, least_version=7)
    assert (incumbent.verified_version, incumbent.published) == (UNVERSIONED, 7)
    incumbent.verified(ONE, 8, 0.0)
    assert incumbent.verified_version == 8


def test_run_that_follows_one_that_has_left_in_order_publishes_at_once() -> None:
    bench = ready(A)
    bench.ask(BeginUpdate(1, A, 18, 5.0), ONE)
    bench.ask(FinishUpdate(2, A, 18, True), ONE)
    bench.take(bench.fleet.step(Received(ONE, PublisherLeft()), bench.now_s))
    assert bench.ask(BeginUpdate(1, A, 1, 5.0), OTHER).ok
    assert bench.ask(FinishUpdate(2, A, 1, True), OTHER).ok
    assert (bench.phase(), bench.row().policy_version) == (EnginePhase.READY, 1)
    assert bench.fleet.table().published == 1


def test_run_that_follows_one_that_left_in_mid_update_waits_for_no_lease() -> None:
    bench = ready(A, B)
    bench.ask(BeginUpdate(1, A, 18, 30.0, "run"), ONE)
    bench.ask(BeginUpdate(1, B, 18, 30.0, "other run"), OTHER)
    left = bench.take(bench.fleet.step(Received(ONE, PublisherLeft()), bench.now_s))
    assert [a.url for a in left if isinstance(a, ContinueEngine)] == [A], "maybe left paused"
    assert bench.phase(B) is EnginePhase.UPDATING, "another's"
    assert bench.ask(BeginUpdate(2, A, 1, 5.0, "other run"), OTHER).ok


def test_engine_whose_publisher_left_in_mid_update_serves_what_it_had() -> None:
    bench = ready(A)
    bench.ask(BeginUpdate(1, A, 18, 30.0), ONE)
    bench.take(bench.fleet.step(Received(ONE, PublisherLeft()), bench.now_s))
    bench.answer(A, policy_version=0)
    assert (bench.phase(), bench.row().policy_version) == (EnginePhase.READY, 0)
    assert not bench.ask(FinishUpdate(2, A, 18, True), ONE).ok, "said late"


def test_restarted_router_takes_restarted_engines_at_their_word_until_a_publisher_reports() -> None:
    bench = Bench(A, B)  # a new router: version 4 was published through the one before
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
