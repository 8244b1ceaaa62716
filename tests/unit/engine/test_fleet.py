"""The fleet machine: phases, leases, trust in weights, and random schedules of everything."""

import random

import pytest

from rollmesh.core.config import EngineConfig
from rollmesh.core.types import UNVERSIONED
from rollmesh.engine.fleet import (
    ContinueEngine,
    FleetSettings,
    ProbeEngine,
)
from rollmesh.engine.table_sync import BURST
from rollmesh.wire.fleet import (
    AskTable,
    BeginUpdate,
    EngineFaulted,
    EnginePhase,
    EngineRow,
    EnginesChanged,
    FenceEngine,
    FinishUpdate,
    FleetAsk,
    JoinEngine,
    LoadsChanged,
    PublisherLeft,
    ReadFleet,
    RemoveEngine,
    SleepEngine,
    WakeEngine,
)
from rollmesh.wire.machine import Received, Send
from tests.unit.engine.fleet_bench import PUBLISHER, A, B, Bench, ready

PROBE_TIMEOUT_S = EngineConfig().probe_timeout_s


def test_engine_is_ready_after_its_first_good_probe() -> None:
    bench = Bench(A)
    assert bench.phase() is EnginePhase.JOINING
    bench.answer(A, policy_version=0)
    assert bench.row() == EngineRow(A, "i1", EnginePhase.READY, 0)


def test_engine_without_a_version_waits_for_a_publisher() -> None:
    bench = Bench(A)
    bench.answer(A, policy_version=-1)
    assert bench.phase() is EnginePhase.JOINING
    assert "no version" in bench.row().detail
    assert bench.ask(BeginUpdate(2, A, 0, 30.0)).ok
    assert bench.ask(FinishUpdate(3, A, 0, True)).ok
    assert bench.row().phase is EnginePhase.READY
    assert bench.row().policy_version == 0


def test_update_moves_ready_engine_to_the_new_version_and_back_to_ready() -> None:
    bench = ready(A)
    assert bench.ask(BeginUpdate(2, A, 1, 30.0)).ok
    assert bench.phase() is EnginePhase.UPDATING
    answer = bench.ask(FinishUpdate(3, A, 1, True))
    assert answer.ok
    assert answer.engines[0].policy_version == 1
    assert bench.phase() is EnginePhase.READY


def test_repeated_asks_get_the_same_answer() -> None:
    bench = ready(A)
    for _ in range(2):
        assert bench.ask(BeginUpdate(2, A, 1, 30.0)).ok
    for _ in range(2):
        assert bench.ask(FinishUpdate(3, A, 1, True)).ok
    assert bench.phase() is EnginePhase.READY


def test_lapsed_lease_continues_the_engine_and_keeps_its_old_version() -> None:
    bench = ready(A)
    bench.tick(1.0)
    bench.ask(BeginUpdate(2, A, 1, 5.0))
    assert not [a for a in bench.tick(4.9) if isinstance(a, ContinueEngine)]
    assert [a.url for a in bench.tick(0.1) if isinstance(a, ContinueEngine)] == [A]
    bench.answer(A, policy_version=0)
    assert bench.row().phase is EnginePhase.READY
    assert bench.row().policy_version == 0
    late = bench.ask(FinishUpdate(3, A, 1, True))
    assert not late.ok
    assert "lapsed" in late.error


def test_weights_that_a_vanished_publisher_did_not_verify_are_not_used() -> None:
    bench = ready(A)
    bench.ask(BeginUpdate(2, A, 1, 5.0))
    bench.tick(5.0)
    bench.answer(A, policy_version=1)
    assert bench.phase() is EnginePhase.JOINING
    assert "verified" in bench.row().detail
    bench.ask(BeginUpdate(4, A, 2, 5.0), route=b"next publisher")
    assert bench.ask(FinishUpdate(5, A, 2, True), route=b"next publisher").ok
    assert bench.phase() is EnginePhase.READY


def test_failed_update_fences_the_engine_until_another_succeeds() -> None:
    bench = ready(A)
    bench.ask(BeginUpdate(2, A, 1, 5.0))
    assert bench.ask(FinishUpdate(3, A, 1, False, "shape differs")).ok
    assert bench.phase() is EnginePhase.FENCED
    assert "shape differs" in bench.row().detail
    assert [a.url for a in bench.tick(1.0) if isinstance(a, ContinueEngine)] == [A]
    bench.answer(A, policy_version=0)
    assert bench.phase() is EnginePhase.JOINING
    bench.ask(BeginUpdate(4, A, 1, 5.0))
    bench.ask(FinishUpdate(5, A, 1, True))
    assert bench.phase() is EnginePhase.READY


def test_an_engine_that_samples_wrongly_is_fenced_until_it_is_updated() -> None:
    bench = ready(A, B)
    for _ in range(2):  # a repeated ask gets the same answer
        assert bench.ask(FenceEngine(2, A, 0, "off by 0.5")).ok
        assert (bench.phase(), bench.row().detail) == (EnginePhase.FENCED, "off by 0.5")
    bench.tick(1.0)
    bench.answer(A, policy_version=0)
    assert bench.phase() is EnginePhase.JOINING
    assert bench.ask(BeginUpdate(3, A, 0, 5.0)).ok
    assert bench.ask(FinishUpdate(4, A, 0, True)).ok
    assert bench.phase() is EnginePhase.READY


def test_the_last_ready_engine_is_not_fenced_for_wrong_samples() -> None:
    bench = ready(A, B)
    assert bench.ask(FenceEngine(2, A, 0, "off by 0.5")).ok
    answer = bench.ask(FenceEngine(3, B, 0, "off by 0.5"))
    assert answer.error == f"{B} is the last engine that is ready"
    assert bench.phase(B) is EnginePhase.READY


@pytest.mark.parametrize("is_repeated", [False, True])
def test_fence_beside_a_ready_engine_is_granted_in_the_step_that_finds_its_probe_overdue(
    is_repeated: bool,
) -> None:
    """A router that was suspended reads the ask before it fences the other engine."""
    ask = FenceEngine(2, A, 0, "off by 0.5")
    bench = ready(A, B)
    bench.tick(1.0)
    bench.answer(A)
    bench.answer(B, ok=False)
    bench.tick(0.25)
    assert B in bench.pending
    if is_repeated:
        assert bench.ask(ask).ok
    bench.now_s += 5.0
    assert bench.phase(B) is EnginePhase.READY
    assert bench.ask(ask).ok
    assert bench.phase(B) is EnginePhase.FENCED
    assert "unanswered" in bench.row(B).detail
    bench.tick(1.0)
    bench.answer(B)
    assert bench.phase(B) is EnginePhase.READY


def test_an_engine_is_not_fenced_for_weights_that_it_no_longer_has() -> None:
    bench = ready(A, B)
    bench.ask(BeginUpdate(2, A, 1, 5.0))
    assert (
        bench.ask(FenceEngine(3, A, 0, "off by 0.5")).error
        == f"{A} is updating with policy version 0"
    )
    bench.ask(FinishUpdate(4, A, 1, True))
    assert (
        bench.ask(FenceEngine(5, A, 0, "off by 0.5")).error == f"{A} is ready with policy version 1"
    )
    assert bench.phase() is EnginePhase.READY


def test_restarted_engine_joins_again_and_waits_when_the_fleet_is_newer() -> None:
    bench = ready(A, B, policy_version=3)
    bench.tick(1.0)
    bench.answer(A, policy_version=0, incarnation="i2")
    assert bench.phase(A) is EnginePhase.JOINING
    assert "the fleet is at 3" in bench.row(A).detail
    assert bench.phase(B) is EnginePhase.READY


def test_a_restarted_sole_engine_serves_its_initial_version_if_none_was_published() -> None:
    bench = ready(A, policy_version=3)
    bench.tick(1.0)
    bench.answer(A, policy_version=0, incarnation="i2")
    assert bench.row() == EngineRow(A, "i2", EnginePhase.READY, 0)


def test_a_restarted_sole_engine_waits_for_the_published_version() -> None:
    bench = ready(A)
    bench.ask(BeginUpdate(2, A, 3, 5.0))
    bench.ask(FinishUpdate(3, A, 3, True))
    bench.tick(1.0)
    bench.answer(A, policy_version=0, incarnation="i2")
    assert bench.phase(A) is EnginePhase.JOINING
    assert "the fleet is at 3" in bench.row(A).detail
    bench.ask(BeginUpdate(4, A, 3, 5.0))
    bench.ask(FinishUpdate(5, A, 3, True))
    assert bench.phase(A) is EnginePhase.READY


def test_a_ready_engine_with_older_weights_serves_until_its_own_update() -> None:
    bench = ready(A, B)
    bench.ask(BeginUpdate(2, A, 1, 5.0))
    bench.ask(FinishUpdate(3, A, 1, True))
    bench.tick(1.0)
    bench.answer(B, policy_version=0)
    assert bench.phase(B) is EnginePhase.READY


def test_workers_faults_fence_an_engine_and_a_cool_down_brings_it_back() -> None:
    bench = ready(A)
    fault = EngineFaulted(A, "i1", "connection reset")
    for _ in range(3):
        assert bench.phase() is EnginePhase.READY
        bench.take(bench.fleet.step(Received(b"worker", fault), bench.now_s))
    assert bench.phase() is EnginePhase.FENCED
    bench.tick(1.0)
    bench.answer(A)
    assert bench.phase() is EnginePhase.READY


def test_faults_of_an_earlier_incarnation_do_not_count() -> None:
    bench = ready(A)
    fault = EngineFaulted(A, "i0", "connection reset")
    for _ in range(9):
        bench.take(bench.fleet.step(Received(b"worker", fault), bench.now_s))
    assert bench.phase() is EnginePhase.READY


def test_failed_probes_fence_a_ready_engine() -> None:
    bench = ready(A)
    bench.tick(1.0)
    for _ in range(2):
        assert bench.phase() is EnginePhase.READY
        bench.answer(A, ok=False)
        bench.tick(0.25)
    assert bench.phase() is EnginePhase.FENCED
    assert "connection refused" in bench.row().detail


def test_a_hung_engine_is_fenced_within_six_seconds() -> None:
    """Agents wait this long for an engine that accepts requests and never answers."""
    bench = ready(A)
    asked_s: float | None = None
    while bench.phase() is EnginePhase.READY:
        bench.tick(0.1)
        if A in bench.pending and asked_s is None:
            asked_s = bench.now_s
        if asked_s is not None and bench.now_s >= asked_s + PROBE_TIMEOUT_S:
            bench.answer(A, ok=False)
            asked_s = None
    assert PROBE_TIMEOUT_S < bench.now_s < 6.0


def test_probe_that_is_never_answered_counts_as_failed() -> None:
    bench = ready(A)
    bench.tick(1.0)
    for _ in range(2):
        assert bench.phase() is EnginePhase.READY
        bench.tick(5.0)
        bench.tick(0.25)
    assert bench.phase() is EnginePhase.FENCED


def test_probe_sent_before_an_update_cannot_judge_it() -> None:
    bench = ready(A)
    bench.tick(1.0)
    bench.ask(BeginUpdate(2, A, 1, 5.0))
    bench.answer(A, policy_version=0)
    assert bench.phase() is EnginePhase.UPDATING
    bench.ask(FinishUpdate(3, A, 1, True))
    assert bench.row().policy_version == 1


def test_removed_engine_is_shown_as_gone_then_forgotten() -> None:
    bench = ready(A)
    assert bench.ask(RemoveEngine(2, A)).ok
    assert bench.phase() is EnginePhase.GONE
    assert not bench.ask(BeginUpdate(3, A, 1, 5.0)).ok
    bench.tick(10.0)
    assert bench.fleet.table().engines == ()


def test_unknown_engine_is_refused_by_name() -> None:
    answer = Bench().ask(BeginUpdate(1, A, 1, 5.0))
    assert not answer.ok
    assert A in answer.error


def test_changes_are_sent_at_once_and_loads_each_second() -> None:
    bench = ready(A)
    bench.tick(0.5)  # ends the burst of joining
    num_sent = len(bench.sent)
    bench.tick(0.25)
    assert len(bench.sent) == num_sent
    bench.tick(0.25)
    assert [type(each) for each in bench.sent[num_sent:]] == [LoadsChanged]
    bench.ask(BeginUpdate(2, A, 1, 30.0))
    [change] = bench.sent[num_sent + 1 :]
    assert isinstance(change, EnginesChanged)
    assert [row.phase for row in change.engines] == [EnginePhase.UPDATING]


def test_a_long_burst_of_changes_is_few_messages() -> None:
    urls = [f"http://a:{number}" for number in range(1, BURST + 5)]
    bench = ready(*urls)
    bench.tick(0.5)
    bench.tick(0.1)
    num_sent = len(bench.sent)
    for number, url in enumerate(urls):
        bench.now_s += 0.001
        bench.ask(BeginUpdate(number, url, 1, 30.0))
    assert bench.fleet.due_s == pytest.approx(bench.now_s - 0.011 + 0.02)
    bench.tick(0.02)
    sent = [each for each in bench.sent[num_sent:] if isinstance(each, EnginesChanged)]
    assert [len(each.engines) for each in sent] == [1] * BURST + [4]
    assert [each.since for each in sent[1:]] == [each.epoch for each in sent[:-1]]
    assert bench.fleet.due_s == float("inf")


def test_a_worker_that_asks_gets_the_whole_table() -> None:
    bench = ready(A, B)
    [answer] = [
        action
        for action in bench.fleet.step(Received(b"w", AskTable()), bench.now_s)
        if isinstance(action, Send)
    ]
    assert answer == Send(b"w", bench.fleet.table())


class RealEngine:
    """State of a simulated engine: up, paused, and its version."""

    def __init__(self) -> None:
        self.incarnation, self.policy_version = "i0", 0
        self.is_up, self.is_paused = True, False


def random_ask(rng: random.Random, url: str, policy_version: int) -> FleetAsk:
    asks: list[FleetAsk] = [
        JoinEngine(1, url),
        BeginUpdate(1, url, policy_version, rng.choice([0.5, 5.0])),
        FinishUpdate(1, url, policy_version, rng.random() < 0.7, "why"),
        SleepEngine(1, url, 2.0),
        WakeEngine(1, url, policy_version),
        FenceEngine(1, url, policy_version, "off by 0.5"),
        ReadFleet(1),
    ]
    return rng.choice(asks)


def disturb(rng: random.Random, bench: Bench, engines: dict[str, RealEngine], serial: int) -> None:
    """Apply one random event."""
    url = rng.choice([A, B])
    engine = engines[url]
    act = rng.randrange(6)
    if act == 0:
        ask = random_ask(rng, url, rng.randrange(4))
        # A publisher continues its engine before it reports that it has finished.
        engine.is_paused &= not (isinstance(ask, FinishUpdate) and ask.ok)
        bench.ask(ask, rng.choice([b"p", b"q"]))
    elif act == 1:
        engine.is_up = not engine.is_up
        engine.incarnation, engine.is_paused = f"i{serial}", False
    elif act == 2:
        engine.is_paused = bench.phase(url) is EnginePhase.UPDATING
    elif act == 3:
        fault = EngineFaulted(url, engine.incarnation, "cut")
        bench.take(bench.fleet.step(Received(b"w", fault), bench.now_s))
    else:
        bench.tick(rng.choice([0.0, 0.3, 1.0]))
    serve_probes(bench, engines, rng)


def serve_probes(bench: Bench, engines: dict[str, RealEngine], rng: random.Random | None) -> None:
    for url, ask in list(bench.pending.items()):
        if rng and rng.random() < 0.3:
            continue
        engine = engines[url]
        if engine.is_up and isinstance(ask, ContinueEngine):
            engine.is_paused = False
        bench.answer(url, engine.policy_version, engine.incarnation, engine.is_up)


@pytest.mark.parametrize("seed", range(100))
def test_random_schedules_never_block_an_engine_nor_show_an_older_table(seed: int) -> None:
    rng = random.Random(seed)
    bench = Bench(A, B)
    engines = {A: RealEngine(), B: RealEngine()}
    epoch = 0
    for serial in range(150):
        disturb(rng, bench, engines, serial)
        assert bench.fleet.table().epoch >= epoch
        epoch = bench.fleet.table().epoch
    for engine in engines.values():
        engine.is_up = True
    for _ in range(100):
        bench.tick(0.5)
        serve_probes(bench, engines, None)
    for url, engine in engines.items():
        assert not (engine.is_paused and bench.phase(url) is EnginePhase.READY)
        bench.ask(WakeEngine(6, url, engine.policy_version))
        assert bench.phase(url) in (EnginePhase.READY, EnginePhase.JOINING)
        # Whatever happened before, one complete update makes the engine ready.
        assert bench.ask(BeginUpdate(7, url, 9, 5.0)).ok
        assert bench.ask(FinishUpdate(8, url, 9, True)).ok
        assert bench.phase(url) is EnginePhase.READY


@pytest.mark.parametrize("least_version", [UNVERSIONED, 0])
def test_without_a_publisher_an_engines_reported_version_is_used(
    least_version: int,
) -> None:
    settings = FleetSettings(believes_engines=True, least_version=least_version)
    bench = Bench(A, settings=settings)
    bench.tick()
    bench.answer(A, policy_version=-1)
    assert bench.row().phase is EnginePhase.READY
    bench.tick(1.0)
    bench.answer(A, policy_version=5)
    assert (bench.row().phase, bench.row().policy_version) == (EnginePhase.READY, 5)


def test_without_a_publisher_the_fleet_does_not_continue_a_fenced_engine() -> None:
    bench = Bench(A, settings=FleetSettings(believes_engines=True))
    bench.answer(A)
    fault = EngineFaulted(A, "i1", "connection reset")
    for _ in range(3):
        bench.take(bench.fleet.step(Received(b"", fault), bench.now_s))
    assert bench.phase() is EnginePhase.FENCED
    bench.tick(1.0)
    assert isinstance(bench.pending[A], ProbeEngine)


def test_in_a_resumed_run_untrained_engines_wait_for_the_publisher() -> None:
    bench = Bench(A, B, settings=FleetSettings(least_version=1))
    bench.tick()
    bench.answer(A, policy_version=0)
    bench.answer(B, policy_version=7)
    assert bench.phase(A) is EnginePhase.JOINING
    assert bench.phase(B) is EnginePhase.READY
    bench.ask(BeginUpdate(2, A, 8, 5.0))
    bench.ask(FinishUpdate(3, A, 8, True))
    assert bench.phase(A) is EnginePhase.READY


def test_a_fleet_that_expects_a_publisher_always_reports_one() -> None:
    bench = ready(A)
    assert bench.fleet.table().has_publisher
    bench.fleet.step(Received(PUBLISHER, PublisherLeft()), bench.now_s)
    assert bench.fleet.table().has_publisher


def test_a_fleet_of_fixed_weights_has_a_publisher_during_updates_and_their_grace() -> None:
    bench = Bench(A, settings=FleetSettings(believes_engines=True))
    bench.answer(A, policy_version=7)
    assert not bench.fleet.table().has_publisher
    bench.tick(0.5)
    bench.tick(0.1)
    before, num_sent = bench.fleet.table().epoch, len(bench.sent)
    bench.ask(BeginUpdate(1, A, 8, 5.0))
    assert bench.fleet.table().has_publisher
    assert (bench.fleet.table().epoch, len(bench.sent)) == (before + 1, num_sent + 1)
    bench.ask(FinishUpdate(2, A, 8, True))
    assert bench.fleet.table().has_publisher
    bench.tick(FleetSettings().publisher_grace_s)
    assert not bench.fleet.table().has_publisher, "it was silent for its grace"


def test_a_publisher_that_leaves_a_fleet_of_fixed_weights_is_no_longer_known() -> None:
    bench = Bench(A, settings=FleetSettings(believes_engines=True))
    bench.answer(A, policy_version=7)
    bench.ask(BeginUpdate(1, A, 8, 5.0))
    bench.ask(FinishUpdate(2, A, 8, True))
    bench.take(bench.fleet.step(Received(PUBLISHER, PublisherLeft()), bench.now_s))
    assert not bench.fleet.table().has_publisher


def test_why_none_serves_names_the_first_engine_and_is_empty_if_one_will_serve() -> None:
    assert Bench().fleet.why_none_serves() == "", "an environment may need no engine"
    bench = ready(A, B)
    assert bench.fleet.why_none_serves() == ""
    for url in (A, B):
        fault = EngineFaulted(url, "i1", "connection reset")
        for _ in range(3):
            bench.take(bench.fleet.step(Received(b"", fault), bench.now_s))
    reason = f"{A} is fenced: its requests fail: connection reset, and 1 more"
    assert bench.fleet.why_none_serves() == reason
    bench.ask(BeginUpdate(1, B, 1, 5.0))
    assert bench.fleet.why_none_serves() == ""


def test_a_fence_that_is_repeated_after_the_cool_down_is_answered_ok() -> None:
    bench = ready(A, B)
    assert bench.ask(FenceEngine(2, A, 0, "off by 0.5")).ok
    bench.tick(FleetSettings().fence_s)
    assert bench.phase(A) is EnginePhase.JOINING
    assert bench.ask(FenceEngine(2, A, 0, "off by 0.5")).ok


def test_a_publisher_that_has_only_announced_itself_is_known() -> None:
    bench = Bench(A, settings=FleetSettings(believes_engines=True))
    assert not bench.fleet.table().has_publisher
    bench.ask(ReadFleet(2, 7))
    assert bench.fleet.table().has_publisher
    bench.tick(FleetSettings().publisher_grace_s)
    assert not bench.fleet.table().has_publisher


def test_probes_that_fail_for_lack_of_a_local_descriptor_change_no_phase() -> None:
    bench = ready(A)
    for url, phase in ((A, EnginePhase.READY), (B, EnginePhase.JOINING)):
        if url == B:
            bench.ask(JoinEngine(2, B))
        for _ in range(10):
            bench.tick(1.0)
            bench.answer(url, ok=False, is_local=True)
            assert bench.phase(url) is phase
        assert bench.row(url).detail == ("" if url == A else "connection refused")
