"""A worker's view of the fleet: the engine that each request goes to."""

from rollmesh.engine.view import OVERLOAD_TABLES, FleetView
from rollmesh.wire.fleet import EnginePhase, EngineRow, FleetChanged

A, B = "http://a", "http://b"


def row(
    url: str, policy_version: int = 0, phase: EnginePhase = EnginePhase.READY, running: int = 0
) -> EngineRow:
    return EngineRow(url, "i1", phase, policy_version, num_running=running)


def view_of(*rows: EngineRow, has_publisher: bool = True) -> FleetView:
    view = FleetView()
    view.update(FleetChanged(1, rows, has_publisher=has_publisher), "router")
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


def test_trouble_names_the_engine_its_phase_and_its_detail() -> None:
    away = EngineRow(B, "", EnginePhase.JOINING, -1, detail="connection refused")
    assert view_of(row(A), away).trouble() == f"{B}: joining, connection refused"
    assert view_of(row(A)).trouble() == ""
    assert view_of(row(A, phase=EnginePhase.UPDATING)).trouble() == f"{A}: updating"


def test_a_session_never_moves_to_older_weights() -> None:
    view = view_of(row(A, policy_version=3), row(B, policy_version=4, running=50))
    assert chosen(view, min_version=4) == B
    assert chosen(view, min_version=5) is None


def test_without_a_publisher_a_session_prefers_its_version_and_falls_back_to_the_newest() -> None:
    rows = row(A, policy_version=3), row(B, policy_version=4, running=50)
    view = view_of(*rows, has_publisher=False)
    assert chosen(view, min_version=4) == B
    view = view_of(*rows, has_publisher=False)
    assert chosen(view, min_version=9) == B
    gone = row(A, policy_version=3), row(B, 4, EnginePhase.FENCED)
    view.update(FleetChanged(2, gone, has_publisher=False), "router")
    assert chosen(view, min_version=9) == A
    assert (view.is_paused(9), view.is_behind(9), view.why_waiting(9)) == (False, False, "")


def test_unnumbered_weights_are_compared_only_where_a_publisher_numbers_them() -> None:
    rows = row(A, policy_version=-1), row(B, policy_version=3)
    assert chosen(view_of(rows[0], has_publisher=False), min_version=7) == A
    assert chosen(view_of(*rows, has_publisher=False), min_version=7) == A
    assert chosen(view_of(rows[0]), min_version=0) is None


def test_a_session_that_waits_for_newer_weights_gets_the_reason() -> None:
    view = view_of(row(A, policy_version=3), row(B, 4, EnginePhase.FENCED))
    assert (view.is_behind(4), view.is_behind(3)) == (True, False)
    assert view.why_waiting(4).startswith(
        f"{A}: ready, with policy version 3; the session has seen 4"
    )
    assert view.why_waiting(3) == ""
    assert view_of(row(B, 4, EnginePhase.FENCED)).why_waiting(4) == f"{B}: fenced"


def test_a_session_learns_that_the_weights_of_an_ended_run_will_not_return() -> None:
    view = FleetView()
    behind = (row(A, 4), row(B, 5, EnginePhase.FENCED))
    view.update(FleetChanged(1, behind, 5), "router")
    assert view.why_never(5) == "", "the other engine is still to get them"
    view.update(FleetChanged(2, (row(A, 1), row(B, 18)), 1), "router")
    assert view.why_never(18) == "", "one engine has them"
    view.update(FleetChanged(3, (row(A, 1), row(B, 1)), 1), "router")
    assert "policy version 18, was of another run: engines are at version 1" in view.why_never(18)
    assert view.why_never(1) == ""
    view.update(FleetChanged(0, (row(A, -1, EnginePhase.JOINING),)), "a new router")
    assert view.why_never(18) == "", "no publisher is known yet"


def test_session_stays_with_its_engine_although_others_are_idle() -> None:
    view = view_of(row(A), row(B))
    home = chosen(view)
    assert home
    for _ in range(9):
        view.count(home, requests=1)
    assert chosen(view) == home
    assert chosen(view, session="other") != home


class UnevenLoad:
    """All of our sessions are at A, which has `num_running` requests; B has `num_beside`."""

    def __init__(self, num_running: int, num_beside: int = 0, num_own: int = 16) -> None:
        self.view = view_of(row(A), row(B, running=99))
        self.keys = [f"s{n}" for n in range(64)]
        assert {chosen(self.view, key) for key in self.keys} == {A}
        for _ in range(num_own):
            self.view.count(A, requests=1)
        self.rows = (row(A, running=num_running), row(B, running=num_beside))
        self.epoch = 1

    def push(self, num_tables: int = 1) -> None:
        for _ in range(num_tables):
            self.epoch += 1
            self.view.update(FleetChanged(self.epoch, self.rows), "router")

    def num_moved(self) -> int:
        """Number of sessions that choose B for their next request."""
        return [chosen(self.view, key) for key in self.keys].count(B)


def test_sessions_leave_an_engine_that_stays_overfull_a_few_at_a_time() -> None:
    load = UnevenLoad(num_running=40)
    load.push(OVERLOAD_TABLES - 1)
    assert load.num_moved() == 0
    load.push()
    assert load.num_moved() == 2
    assert load.num_moved() == 2
    load.push()
    assert load.num_moved() == 4


def test_a_repeated_table_counts_as_time() -> None:
    load = UnevenLoad(num_running=40)
    load.push()
    for _ in range(OVERLOAD_TABLES):
        load.view.update(FleetChanged(load.epoch, load.rows), "router")
    assert load.num_moved() == 2


def test_sessions_stay_if_loads_differ_little() -> None:
    load = UnevenLoad(num_running=2 * 20 + 4, num_beside=20)
    load.push(10)
    assert load.num_moved() == 0


def test_a_short_overload_moves_no_session() -> None:
    load = UnevenLoad(num_running=40)
    crowded, calm = load.rows, (row(A, running=18), row(B, running=17))
    for rows in (crowded, crowded, calm) * 4:
        load.rows = rows
        load.push()
        assert load.num_moved() == 0


def test_session_that_moved_does_not_move_back_while_loads_are_near() -> None:
    load = UnevenLoad(num_running=40)
    load.push(OVERLOAD_TABLES)
    moved = [key for key in load.keys if chosen(load.view, key) == B]
    load.rows = (row(A, running=20), row(B, running=30))
    load.push(10)
    assert moved
    assert [chosen(load.view, key) for key in moved] == [B] * len(moved)


def test_sessions_do_not_move_to_an_engine_that_is_avoided_or_has_older_weights() -> None:
    load = UnevenLoad(num_running=40)
    load.rows = (row(A, policy_version=1, running=40), row(B, policy_version=0))
    load.push(OVERLOAD_TABLES)
    assert {chosen(load.view, key, min_version=1) for key in load.keys} == {A}
    sick = load.view.choose("s0", 0, {B})
    assert sick
    assert sick.url == A


def test_own_requests_are_counted_for_each_engine() -> None:
    view = view_of(row(A), row(B))
    view.count(A, requests=1)
    view.count(A, requests=1)
    view.count(A, requests=-1)
    assert (view.num_requests(A), view.num_requests(B), view.num_requests("http://c")) == (1, 0, 0)


def test_the_least_loaded_engine_counts_own_requests_and_pushed_load() -> None:
    view = view_of(row(A, running=3), row(B, running=5))
    assert chosen(view, "s1") == A
    for _ in range(3):
        view.count(A, requests=1)
    assert chosen(view, "s2") == B
    for _ in range(3):
        view.count(A, requests=-1)
    assert chosen(view, "s3") == A


def test_own_requests_in_a_pushed_load_are_not_counted_twice() -> None:
    view = view_of(row(A), row(B))
    for _ in range(4):
        view.count(A, requests=1)
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


def test_a_view_is_paused_only_while_it_waits_for_an_update() -> None:
    updating = row(A, phase=EnginePhase.UPDATING)
    assert view_of(updating).is_paused(0)
    assert not view_of(updating, row(B)).is_paused(0)
    assert view_of(updating, row(B)).is_paused(1)
    assert not view_of(row(A, phase=EnginePhase.FENCED)).is_paused(0)


def test_listeners_are_called_for_each_new_table() -> None:
    view, rows = FleetView(), []
    view.listeners.append(lambda: rows.append(view.find(A)))
    view.update(FleetChanged(1, (row(A),)), "router")
    view.update(FleetChanged(1, ()), "router")
    assert rows == [row(A)]
