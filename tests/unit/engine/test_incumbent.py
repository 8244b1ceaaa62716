"""Which of two publishers the fleet serves, and when another one is let in."""

from rollmesh.engine.fleet import ContinueEngine
from rollmesh.engine.incumbent import Incumbent
from rollmesh.engine.member import UNVERSIONED
from rollmesh.wire.fleet import BeginUpdate, EnginePhase, FinishUpdate, PublisherLeft, ReadFleet
from rollmesh.wire.machine import Received
from tests.unit.engine.fleet_bench import A, B, Bench, ready

ONE, OTHER = b"one", b"other"


def reigning(policy_version: int = 18) -> Incumbent:
    incumbent = Incumbent(grace_s=10.0, least_version=UNVERSIONED)
    incumbent.verified(ONE, policy_version, 0.0)
    return incumbent


def test_another_publisher_is_let_in_with_newer_weights_alone() -> None:
    incumbent = reigning()
    assert incumbent.is_ahead_of(OTHER, 18, 1.0)
    assert not incumbent.is_ahead_of(OTHER, 19, 1.0)
    assert not incumbent.is_ahead_of(ONE, 1, 1.0)


def test_one_that_is_silent_for_its_grace_keeps_nobody_out() -> None:
    incumbent = reigning()
    incumbent.hear(ONE, 5.0)
    incumbent.hear(OTHER, 14.0)
    assert incumbent.is_ahead_of(OTHER, 1, 14.9)
    assert not incumbent.is_ahead_of(OTHER, 1, 15.0)


def test_one_that_leaves_keeps_nobody_out_from_then_on() -> None:
    incumbent = reigning()
    incumbent.leave(OTHER)
    assert incumbent.is_ahead_of(OTHER, 1, 1.0)
    incumbent.leave(ONE)
    assert not incumbent.is_ahead_of(OTHER, 1, 1.0)


def test_what_was_published_is_told_once_a_publisher_has_done_so() -> None:
    incumbent = Incumbent(grace_s=10.0, least_version=7)
    assert (incumbent.told, incumbent.published) == (UNVERSIONED, 7)
    incumbent.verified(ONE, 8, 0.0)
    assert incumbent.told == 8


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
