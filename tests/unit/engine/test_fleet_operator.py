"""Engines that the operator adds and removes while the mesh runs."""

from pathlib import Path

import msgspec
import pytest

from rollmesh.core.errors import ConfigError
from rollmesh.engine.fleet import (
    COUNTS,
    DRAINS,
    ContinueEngine,
    EngineProbed,
    Fleet,
    FleetSettings,
)
from rollmesh.engine.roster import AddedEngine, ChangesFile, FleetChanges
from rollmesh.wire.fleet import (
    AddEngine,
    BeginUpdate,
    DropEngine,
    EngineOrigin,
    EnginePhase,
    FinishUpdate,
    FleetAnswered,
    JoinEngine,
    SleepEngine,
)
from rollmesh.wire.machine import Received, Send
from tests.unit.engine.fleet_bench import A, B, Bench, ready

C = "http://10.0.0.5:30000"
OPERATOR = b"operator"


def change(bench: Bench, ask: AddEngine | DropEngine) -> FleetAnswered:
    """Send an operator's request."""
    actions = bench.take(bench.fleet.step(Received(OPERATOR, ask), bench.now_s))
    [answer] = [each.message for each in actions if isinstance(each, Send)]
    assert isinstance(answer, FleetAnswered)
    assert answer.engines == bench.fleet.table().engines
    return answer


def load(bench: Bench, num_running: int, incarnation: str = "i1", *, ok: bool = True) -> None:
    """Answer the probe of engine A."""
    bench.take(
        bench.fleet.step(
            EngineProbed(
                url=A,
                serial=bench.pending.pop(A).serial,
                ok=ok,
                incarnation=incarnation,
                policy_version=0,
                num_running=num_running,
                detail="" if ok else "refused",
            ),
            bench.now_s,
        )
    )


def draining() -> Bench:
    """Engines A and B, of which A drains."""
    bench = ready(A, B)
    assert change(bench, DropEngine(1, A, drains=True)).ok
    assert bench.phase() is EnginePhase.DRAINING
    bench.pending.pop(A, None)
    return bench


def update(bench: Bench, url: str, policy_version: int) -> None:
    assert bench.ask(BeginUpdate(2, url, policy_version, 5.0)).ok
    assert bench.ask(FinishUpdate(3, url, policy_version, True)).ok


def test_the_operator_adds_an_engine_of_any_host() -> None:
    bench = ready(A)
    assert not bench.ask(JoinEngine(1, C)).ok
    assert change(bench, AddEngine(1, C)).ok
    assert bench.phase(C) is EnginePhase.JOINING
    assert bench.fleet.origins() == (EngineOrigin.JOINED, EngineOrigin.ADDED)
    assert not bench.ask(JoinEngine(1, "http://10.0.0.5:30001")).ok, "another port of that host"


def test_an_added_engine_serves_only_after_the_publisher_updated_it() -> None:
    bench = ready(A)
    change(bench, AddEngine(1, C))
    for after_s in (0.0, 0.25):
        bench.tick(after_s)
        bench.answer(C, policy_version=0)  # the same number, of other weights
        assert bench.phase(C) is EnginePhase.JOINING
    assert "publisher" in bench.row(C).detail
    assert bench.fleet.changes.added == (AddedEngine(C, is_verified=False),)
    update(bench, C, 0)
    assert bench.phase(C) is EnginePhase.READY
    assert bench.fleet.changes.added == (AddedEngine(C, is_verified=True),)


def test_an_engine_that_launch_started_is_one_of_the_configuration() -> None:
    bench = ready(A)
    change(bench, AddEngine(1, C, is_launched=True))
    bench.answer(C, policy_version=0)
    assert bench.phase(C) is EnginePhase.READY
    assert bench.fleet.origins()[1] is EngineOrigin.CONFIGURED
    assert bench.fleet.changes == FleetChanges(), "launch names it to the next router"


def test_an_address_where_launch_runs_no_engine_any_more_is_not_kept_out() -> None:
    bench = Bench()
    for url in (A, C):
        change(bench, AddEngine(1, url, is_launched=True))
    assert change(bench, DropEngine(1, C, is_launched=True)).ok
    assert bench.phase(C) is EnginePhase.GONE
    assert bench.fleet.changes == FleetChanges()
    assert change(bench, AddEngine(1, C, is_launched=True)).ok
    assert bench.phase(C) is EnginePhase.JOINING


def test_launch_brings_back_an_address_that_the_operator_removed() -> None:
    bench = Bench()
    for url in (A, C):
        change(bench, AddEngine(1, url, is_launched=True))
    change(bench, DropEngine(1, C))
    assert bench.fleet.changes.removed == (C,)
    change(bench, AddEngine(1, C, is_launched=True))
    assert bench.fleet.changes == FleetChanges()


def test_without_a_publisher_an_added_engine_serves_at_once() -> None:
    bench = Bench(A, settings=FleetSettings(believes_engines=True))
    change(bench, AddEngine(1, C))
    bench.answer(C, policy_version=-1)
    assert bench.phase(C) is EnginePhase.READY


def test_a_repeated_add_changes_nothing() -> None:
    bench = ready(A, B)
    before = bench.fleet.table()
    assert change(bench, AddEngine(1, A)).ok
    assert change(bench, AddEngine(2, A)).ok
    assert bench.fleet.table() == before


@pytest.mark.parametrize("url", ["ftp://h", "http://h:1/latest/meta-data", "http://u:w@h:1", "h"])
def test_an_added_url_is_scheme_host_and_port(url: str) -> None:
    bench = ready(A)
    assert url in change(bench, AddEngine(1, url)).error
    assert bench.fleet.changes == FleetChanges()


def test_a_removed_engine_stays_out_until_it_is_added() -> None:
    bench = ready(A, B)
    assert change(bench, DropEngine(1, A)).ok
    assert bench.phase() is EnginePhase.GONE
    assert change(bench, DropEngine(2, A)).ok, "repeated"
    for ask in (JoinEngine(1, A), SleepEngine(1, A, 5.0)):
        assert "engine add" in bench.ask(ask).error
    assert not bench.ask(BeginUpdate(1, A, 1, 5.0)).ok
    bench.tick(10.0)
    assert [row.url for row in bench.fleet.table().engines] == [B]
    assert "not in the fleet" in change(bench, DropEngine(3, A)).error
    assert change(bench, AddEngine(1, A)).ok
    update(bench, A, 1)
    assert bench.phase() is EnginePhase.READY


def test_the_last_engine_is_removed_only_by_force() -> None:
    bench = ready(A, B)
    assert change(bench, DropEngine(1, A, drains=True)).ok
    for drains in (True, False):
        assert "--force" in change(bench, DropEngine(1, B, drains)).error
        assert bench.phase(B) is EnginePhase.READY
    assert change(bench, DropEngine(1, A)).ok, "A is leaving already"
    assert change(bench, DropEngine(1, B, force=True)).ok
    assert bench.phase(B) is EnginePhase.GONE


def test_a_draining_engine_is_removed_when_its_requests_have_ended() -> None:
    bench = draining()
    bench.tick(0.5)
    assert A not in bench.pending, "requests that were sent before may still arrive"
    bench.tick(0.5)
    for num_running in (3, 0, 1, 0):
        load(bench, num_running)
        assert bench.phase() is EnginePhase.DRAINING
        assert bench.row().num_running == num_running
        bench.tick(0.25)
    load(bench, 0)
    assert bench.phase() is EnginePhase.GONE
    assert bench.fleet.changes == FleetChanges(removed=(A,))


def test_a_probe_from_before_the_drain_does_not_count() -> None:
    bench = ready(A, B)
    bench.tick(1.0)
    load(bench, 3)
    bench.tick(1.0)
    before = bench.pending[A]
    assert change(bench, DropEngine(1, A, drains=True)).ok
    assert bench.row().detail == COUNTS, "its load is that of a probe before the drain"
    load(bench, 0)  # the answer to the probe that was under way
    assert (bench.row().num_running, bench.row().detail) == (3, COUNTS)
    bench.tick(1.0)
    assert bench.pending[A] != before
    load(bench, 0)
    assert (bench.row().num_running, bench.row().detail) == (0, DRAINS)
    assert bench.phase() is EnginePhase.DRAINING


def test_a_draining_engine_is_not_updated() -> None:
    bench = draining()
    assert "removed" in bench.ask(BeginUpdate(1, A, 1, 5.0)).error
    assert bench.phase() is EnginePhase.DRAINING


def test_a_draining_engine_that_dies_is_removed() -> None:
    bench = draining()
    bench.tick(1.0)
    load(bench, 3)
    for _ in range(2):
        bench.tick(0.25)
        load(bench, 0, ok=False)
    assert bench.phase() is EnginePhase.GONE


def test_a_draining_engine_that_restarts_is_removed() -> None:
    bench = draining()
    bench.tick(1.0)
    load(bench, 0, incarnation="i2")
    assert bench.phase() is EnginePhase.GONE


def test_adding_a_draining_engine_ends_its_drain() -> None:
    bench = draining()
    assert change(bench, AddEngine(1, A)).ok
    assert isinstance(bench.pending[A], ContinueEngine)
    bench.answer(A)
    assert bench.phase() is EnginePhase.READY
    assert bench.fleet.changes == FleetChanges(added=(AddedEngine(A),))


def test_a_draining_engine_can_be_removed_at_once() -> None:
    bench = draining()
    assert change(bench, DropEngine(2, A)).ok
    assert bench.phase() is EnginePhase.GONE


@pytest.mark.parametrize("ok", [True, False])
def test_an_engine_drains_once_its_update_has_ended(ok: bool) -> None:
    bench = ready(A, B)
    bench.ask(BeginUpdate(1, A, 1, 5.0))
    assert change(bench, DropEngine(2, A, drains=True)).ok
    assert bench.phase() is EnginePhase.UPDATING
    assert bench.ask(BeginUpdate(3, A, 1, 5.0)).ok, "its publisher renews the lease"
    assert not bench.ask(BeginUpdate(4, A, 2, 5.0), b"another").ok
    bench.ask(FinishUpdate(5, A, 1, ok))
    assert bench.phase() is (EnginePhase.DRAINING if ok else EnginePhase.GONE)


def test_an_engine_drains_once_the_lease_of_its_update_has_lapsed() -> None:
    bench = ready(A, B)
    bench.ask(BeginUpdate(1, A, 1, 5.0))
    change(bench, DropEngine(2, A, drains=True))
    bench.tick(5.0)
    bench.tick(0.0)
    assert bench.phase() is EnginePhase.DRAINING
    bench.tick(1.0)
    assert isinstance(bench.pending[A], ContinueEngine), "its publisher may have left it paused"


def test_a_sleeping_engine_is_removed_at_once() -> None:
    bench = ready(A, B)
    bench.ask(SleepEngine(1, A, 5.0))
    assert change(bench, DropEngine(2, A, drains=True)).ok
    assert bench.phase() is EnginePhase.GONE


def test_a_removal_during_an_update_refuses_its_end() -> None:
    bench = ready(A, B)
    bench.ask(BeginUpdate(1, A, 1, 5.0))
    change(bench, DropEngine(2, A))
    assert not bench.ask(FinishUpdate(3, A, 1, True)).ok
    assert bench.phase() is EnginePhase.GONE


def restarted(bench: Bench, *urls: str) -> Bench:
    """A fleet of a new router, with the changes of the old one and these configured engines."""
    changes = msgspec.json.decode(msgspec.json.encode(bench.fleet.changes), type=FleetChanges)
    new = Bench()
    new.fleet = Fleet(FleetSettings(), changes)
    for url in urls:
        new.take(new.fleet.step(Received(b"", JoinEngine(0, url)), 0.0))
    return new


def test_a_restarted_router_has_the_same_engines() -> None:
    bench = ready(A, B)
    change(bench, AddEngine(1, C))
    change(bench, DropEngine(2, A))
    new = restarted(bench, A, B)
    assert [row.url for row in new.fleet.table().engines] == [C, B]
    assert new.fleet.origins() == (EngineOrigin.ADDED, EngineOrigin.CONFIGURED)
    new.tick()
    new.answer(B)
    new.answer(C)
    assert new.phase(B) is EnginePhase.READY
    assert new.phase(C) is EnginePhase.JOINING, "no publisher has updated it yet"
    update(bench, C, 0)
    new = restarted(bench, B)
    new.tick()
    new.answer(C)
    assert new.phase(C) is EnginePhase.READY


def test_a_restarted_router_continues_a_drain() -> None:
    new = restarted(draining(), A, B)
    new.tick()
    assert new.phase() is EnginePhase.DRAINING
    new.tick(1.0)
    load(new, 0)
    new.tick(0.25)
    load(new, 0)
    assert new.phase() is EnginePhase.GONE


def test_the_file_keeps_changes(tmp_path: Path) -> None:
    path = tmp_path / "engines.json"
    file = ChangesFile(path)
    assert file.read() == FleetChanges()
    file.keep(file.read())
    assert not path.exists(), "nothing has changed"
    changes = FleetChanges((AddedEngine(C, True),), (A,), (B,))
    file.keep(changes)
    assert file.is_kept
    assert ChangesFile(path).read() == changes
    assert not ChangesFile(None).is_kept


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"added": [{"url": "ftp://h", "is_verified": true}]}']
)
def test_a_file_that_is_not_readable_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "engines.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"--engine-changes .*engines\.json"):
        ChangesFile(path).read()


def test_a_failed_write_is_visible(tmp_path: Path) -> None:
    file = ChangesFile(tmp_path / "missing" / "engines.json")
    assert file.is_kept
    file.keep(FleetChanges(removed=(A,)))
    assert not file.is_kept
