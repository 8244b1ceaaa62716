"""A worker's view of the fleet: which engine a leg goes to."""

from rollmesh.engine.view import FleetView
from rollmesh.wire.messages import EnginePhase, EngineRow, FleetChanged

A, B = "http://a", "http://b"


def row(
    url: str, policy_version: int = 0, phase: EnginePhase = EnginePhase.READY, running: int = 0
) -> EngineRow:
    return EngineRow(url, "i1", phase, policy_version, num_running=running)


def view_of(*rows: EngineRow) -> FleetView:
    view = FleetView()
    view.update(FleetChanged(1, rows), "router")
    return view


def chosen(view: FleetView, session: str = "s", min_version: int = 0) -> str | None:
    found = view.choose(session, min_version)
    return found.url if found else None


def test_no_engine_is_chosen_from_an_empty_table() -> None:
    assert chosen(FleetView()) is None


def test_only_ready_engines_are_chosen() -> None:
    for phase in EnginePhase:
        expected = A if phase is EnginePhase.READY else None
        assert chosen(view_of(row(A, phase=phase))) == expected


def test_session_never_hops_to_older_weights() -> None:
    view = view_of(row(A, policy_version=3), row(B, policy_version=4, running=50))
    assert chosen(view, min_version=4) == B
    assert chosen(view, min_version=5) is None


def test_session_stays_with_its_engine_although_others_are_idle() -> None:
    view = view_of(row(A), row(B))
    home = chosen(view)
    assert home
    for _ in range(9):
        view.begin(home)
    assert chosen(view) == home
    assert chosen(view, session="other") != home


def test_least_loaded_engine_counts_own_legs_and_pushed_load() -> None:
    view = view_of(row(A, running=3), row(B, running=5))
    assert chosen(view, "s1") == A
    for _ in range(3):
        view.begin(A)
    assert chosen(view, "s2") == B
    for _ in range(3):
        view.end(A)
    assert chosen(view, "s3") == A


def test_own_legs_in_a_pushed_load_are_not_counted_twice() -> None:
    view = view_of(row(A), row(B))
    for _ in range(4):
        view.begin(A)
    view.update(FleetChanged(2, (row(A, running=4), row(B, running=5))), "router")
    assert chosen(view) == A


def test_engine_to_avoid_is_taken_only_where_there_is_no_other() -> None:
    view = view_of(row(A), row(B))
    found = view.choose("s", 0, {A})
    assert found
    assert found.url == B
    found = view.choose("s", 0, {A, B})
    assert found


def test_older_table_of_the_same_router_is_ignored() -> None:
    view = view_of(row(A))
    view.update(FleetChanged(0, ()), "router")
    assert chosen(view) == A
    view.update(FleetChanged(0, ()), "new router")
    assert chosen(view) is None


def test_view_is_paused_only_while_an_update_is_what_it_waits_for() -> None:
    updating = row(A, phase=EnginePhase.UPDATING)
    assert view_of(updating).is_paused(0)
    assert not view_of(updating, row(B)).is_paused(0)
    assert view_of(updating, row(B)).is_paused(1)
    assert not view_of(row(A, phase=EnginePhase.FENCED)).is_paused(0)


def test_listeners_hear_of_each_new_table() -> None:
    view, heard = FleetView(), []
    view.listeners.append(lambda: heard.append(view.find(A)))
    view.update(FleetChanged(1, (row(A),)), "router")
    view.update(FleetChanged(1, ()), "router")
    assert heard == [row(A)]
