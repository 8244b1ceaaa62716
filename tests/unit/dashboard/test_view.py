"""The dashboard's view: figures are folded in bounded memory."""

from rollmesh.core.run_state import SILENT_AFTER_S, RunRecord, RunState
from rollmesh.dashboard.rows import (
    DroppedRollout,
    ProcessRow,
    RouterRow,
    StepRow,
    TelemetryRow,
)
from rollmesh.dashboard.view import MAX_KINDS, OTHER_KINDS, RunView, Series
from rollmesh.wire.worker_report import WorkerStatus


def telemetry(time_s: float, calls: int, tokens: int = 0, worker_id: str = "w") -> TelemetryRow:
    worker = WorkerStatus(worker_id, in_flight=3, num_calls=calls, num_tokens=tokens)
    return TelemetryRow(time_s, [ProcessRow("router", 1, 100)], RouterRow(workers=[worker]))


def test_rates_are_the_counters_gain_per_second() -> None:
    view = RunView()
    view.add_telemetry(telemetry(10.0, calls=100, tokens=1000))
    row = view.add_telemetry(telemetry(12.0, calls=150, tokens=1600))
    assert row == {
        "time_s": 12.0,
        "in_flight": 3,
        "calls_per_s": 25.0,
        "tokens_per_s": 300.0,
        "rollouts_per_s": 0.0,
        "rss/router": 100,
    }


def test_a_restarted_worker_counts_from_zero() -> None:
    view = RunView()
    view.add_telemetry(telemetry(10.0, calls=100))
    row = view.add_telemetry(telemetry(11.0, calls=7))
    assert row is not None
    assert row["calls_per_s"] == 7.0


def test_a_new_worker_has_no_rate_yet() -> None:
    view = RunView()
    view.add_telemetry(telemetry(10.0, calls=100))
    row = view.add_telemetry(telemetry(11.0, calls=5000, worker_id="new"))
    assert row is not None
    assert row["calls_per_s"] == 0.0


def test_a_router_that_did_not_answer_leaves_a_gap() -> None:
    view = RunView()
    row = view.add_telemetry(TelemetryRow(10.0, [ProcessRow("router", 1, 100)]))
    assert row == {"time_s": 10.0, "rss/router": 100}


def test_ages_are_summed_over_the_run_and_over_recent_steps() -> None:
    view = RunView()
    for step in range(40):
        ages = {"0": 3} if step < 20 else {"1": 2, "2": 1}
        view.add_step(StepRow(step=step, success=0.5, age_histogram=ages))
    assert view.learning()["ages"] == {"0": 60, "1": 40, "2": 20}
    assert view.learning()["recent_ages"] == {"1": 40, "2": 20}


def test_the_baseline_is_not_a_step() -> None:
    view = RunView()
    row = StepRow(time_s=1.0, step=-1, reward_untrained=0.5, success_untrained=0.66)
    assert view.add_step(row) is None
    assert (view.reward_untrained, view.success_untrained) == (0.5, 0.66)
    assert view.learning()["last"] is None


def test_drops_are_counted_by_kind() -> None:
    view = RunView()
    view.add_drop(DroppedRollout("stale"))
    view.add_drop(DroppedRollout("env_failed: no module", num_rollouts=16))
    view.add_drop(DroppedRollout("env_failed: no attribute", num_rollouts=16))
    assert view.learning()["drops"] == {"stale": 1, "env_failed": 32}


def test_kinds_of_drops_are_bounded() -> None:
    view = RunView()
    for number in range(3 * MAX_KINDS):
        view.add_drop(DroppedRollout(f"kind-{number}: why"))
    drops = view.learning()["drops"]
    assert len(drops) == MAX_KINDS + 1
    assert drops[OTHER_KINDS] == 2 * MAX_KINDS


def test_the_state_follows_the_newest_line_of_either_file() -> None:
    view = RunView()
    assert view.status(100.0).state is RunState.WAITING
    view.add_telemetry(telemetry(100.0, calls=0))
    assert view.status(101.0).state is RunState.RUNNING
    assert view.status(100.0 + SILENT_AFTER_S).state is RunState.SILENT
    view.add_step(StepRow(time_s=109.0, step=0, success=0.1))
    assert view.status(100.0 + SILENT_AFTER_S).state is RunState.RUNNING


def test_the_head_has_why_a_run_ended_and_how_to_resume_it() -> None:
    view = RunView()
    resume = "rollmesh up --resume"
    view.record = RunRecord(state=RunState.FAILED, cause="router exited with code 1", resume=resume)
    head = view.head(0.0)
    assert (head["phase"], head["cause"]) == ("failed", "router exited with code 1")
    assert head["resume"] == resume


def test_the_run_began_with_the_first_line_of_any_file() -> None:
    view = RunView()
    view.add_step(StepRow(time_s=120.0, step=0, success=0.5))
    view.add_telemetry(telemetry(100.0, calls=0))
    assert view.head(130.0)["started_s"] == 100.0


def test_the_view_of_a_long_run_is_bounded() -> None:
    view = RunView()
    for second in range(3000):
        view.add_telemetry(telemetry(float(second), calls=second))
        view.add_step(StepRow(time_s=float(second), step=second, success=0.5))
    assert len(view.telemetry.rows()) <= 1000
    assert len(view.steps.rows()) <= 1000


def test_rows_are_kept_unchanged_while_there_is_room() -> None:
    series = Series(max_rows=4)
    assert series.append({"x": 1.0}) == {"x": 1.0}
    series.append({"x": 2.0, "y": 5.0})
    assert series.rows() == [{"x": 1.0}, {"x": 2.0, "y": 5.0}]
    assert series.num_thinnings == 0


def test_a_full_series_joins_neighbours_into_means() -> None:
    series = Series(max_rows=4)
    for x in range(4):
        series.append({"x": float(x)})
    assert series.rows() == [{"x": 0.5}, {"x": 2.5}]
    assert series.num_thinnings == 1
    assert series.append({"x": 4.0}) is None
    assert series.append({"x": 5.0}) == {"x": 4.5}


def test_a_series_never_outgrows_its_bounds() -> None:
    series = Series(max_rows=8, max_names=3)
    for x in range(5000):
        series.append({"x": float(x), f"role-{x}": 1.0})
    assert len(series.rows()) < 8
    assert {name for row in series.rows() for name in row} <= {"x", "role-0", "role-1"}
    joined = [row["x"] for row in series.rows()]
    assert joined == sorted(joined)
    assert joined[-1] > 3000


def test_a_name_that_some_rows_lack_is_averaged_over_the_others() -> None:
    series = Series(max_rows=2)
    series.append({"x": 0.0})
    series.append({"x": 2.0, "y": 7.0})
    assert series.rows() == [{"x": 1.0, "y": 7.0}]
