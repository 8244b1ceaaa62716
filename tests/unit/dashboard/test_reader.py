"""The reader follows a growing run folder and reports exactly the changes for a page."""

import shutil
from pathlib import Path

import msgspec
import pytest

from rollmesh.core.run_state import STATE_FILE
from rollmesh.core.types import EVAL_SAMPLING
from rollmesh.dashboard.reader import EvalView, PageEvent, RunReader
from rollmesh.dashboard.rows import DroppedRollout, RowFile
from rollmesh.serve.client.evaluation_files import EvaluationPlan, Row, write_plan
from rollmesh.testing.run_folder import START_S, FakeRun


@pytest.fixture
def run(tmp_path: Path) -> FakeRun:
    return FakeRun(tmp_path / "demo", num_steps=50)


def names(events: list[PageEvent]) -> list[str]:
    return [event.name for event in events]


def test_the_first_poll_reports_the_whole_state(run: FakeRun) -> None:
    run.add_baseline(0.6)
    run.add_steps(3)
    [event] = RunReader(run.folder).poll(run.now_s)
    assert event.name == "state"
    assert event.data["run"]["name"] == "demo"
    assert event.data["run"]["num_steps"] == 50
    assert event.data["run"]["success_untrained"] == 0.6
    assert event.data["run"]["phase"] == "running"
    assert [row["step"] for row in event.data["steps"]] == [0, 1, 2]
    assert len(event.data["trajectories"]) == 3
    assert len(event.data["fleet"]["router"]["workers"]) == 2


def test_a_poll_reports_only_what_is_new(run: FakeRun) -> None:
    run.add_steps(2)
    reader = RunReader(run.folder)
    reader.poll(run.now_s)
    assert reader.poll(run.now_s) == []
    run.add_steps(1)
    events = reader.poll(run.now_s)
    assert names(events) == ["steps", "telemetry", "trajectories"]
    assert [row["step"] for row in events[0].data["rows"]] == [2]
    assert [summary.step for summary in events[2].data] == [2]


def test_applying_the_events_gives_the_state(run: FakeRun) -> None:
    reader = RunReader(run.folder)
    [first] = reader.poll(START_S)
    copy = first.data
    for _ in range(30):
        run.add_steps(1)
        for event in reader.poll(run.now_s):
            if event.name in ("steps", "telemetry"):
                copy[event.name] = [*copy[event.name], *event.data["rows"]]
    state = reader.state(run.now_s)
    assert copy["steps"] == state["steps"]
    assert copy["telemetry"] == state["telemetry"]


def test_thinned_plots_are_reported_as_a_fresh_state(run: FakeRun) -> None:
    run.add_steps(10)
    reader = RunReader(run.folder)
    reader.poll(run.now_s)
    for step in range(1000):
        run.append("metrics.jsonl", {"time_s": 1.0, "step": step, "success": 0.5})
    assert names(reader.poll(run.now_s)) == ["state"]
    assert names(reader.poll(run.now_s)) == []


def test_the_head_shows_a_silent_and_an_ended_run(run: FakeRun) -> None:
    run.add_steps(1)
    reader = RunReader(run.folder)
    reader.poll(run.now_s)
    assert names(reader.poll(run.now_s + 60.0)) == []
    assert reader.view.head(run.now_s + 60.0)["phase"] == "silent"
    run.finish()
    [event] = reader.poll(run.now_s)
    assert event.name == "run"
    assert event.data["phase"] == "done"
    assert event.data["success_untrained"] == 0.66


def test_a_new_run_in_the_same_folder_is_read_from_the_start(run: FakeRun) -> None:
    run.add_steps(5)
    reader = RunReader(run.folder)
    reader.poll(run.now_s)
    shutil.move(run.folder, run.folder.with_name("demo.1"))
    again = FakeRun(run.folder)
    again.add_steps(2)
    [event] = reader.poll(again.now_s)
    assert event.name == "state"
    assert len(event.data["steps"]) == 2


def test_lines_that_do_not_parse_are_counted_and_reported(run: FakeRun) -> None:
    reader = RunReader(run.folder)
    reader.poll(START_S)
    run.append("metrics.jsonl", ["not", "a", "row"])
    reader.poll(START_S)
    [event] = reader.poll(START_S)
    assert event.data["num_bad_lines"] == 1


def test_token_text_uses_the_runs_tokenizer(run: FakeRun) -> None:
    reader = RunReader(run.folder)
    reader.poll(START_S)
    ids = run.tokenizer.encode("higher").ids
    assert "".join(reader.token_text().pieces(ids)) == "higher"


def test_the_state_can_be_encoded_as_json(run: FakeRun) -> None:
    run.add_steps(2)
    reader = RunReader(run.folder)
    reader.poll(run.now_s)
    assert msgspec.json.decode(msgspec.json.encode(reader.state(run.now_s)))["steps"]


def test_a_run_resumed_from_an_earlier_step_is_read_from_the_start(run: FakeRun) -> None:
    run.add_steps(2)
    metrics = run.folder / "metrics.jsonl"
    kept = metrics.read_bytes()
    run.add_steps(4)
    run.finish()
    reader = RunReader(run.folder)
    reader.poll(run.now_s)
    metrics.write_bytes(kept)
    (run.folder / "summary.json").unlink()
    (run.folder / STATE_FILE).unlink()
    [event] = reader.poll(run.now_s)
    assert event.name == "state"
    assert [row["step"] for row in event.data["steps"]] == [0, 1]
    assert event.data["run"]["phase"] == "running"
    assert reader.poll(run.now_s) == []


def test_metrics_of_the_environment_are_reported_with_each_step(run: FakeRun) -> None:
    run.add_steps(1)
    run.append("metrics.jsonl", {"step": 1, "reward": 0.5, "env/turns": 3, "env/odd": None})
    [event] = RunReader(run.folder).poll(run.now_s)
    assert [row.get("env/num_guesses") for row in event.data["steps"]] == [2.5, None]
    assert (event.data["steps"][1]["env/turns"], "env/odd" in event.data["steps"][1]) == (3, False)
    assert event.data["learning"]["last"]["metrics"] == {"turns": 3.0}


def test_failed_rollouts_are_reported_with_error_and_place(run: FakeRun) -> None:
    place = {"kind": "ValueError", "file": "/h/my_env.py", "line": 15, "function": "score"}
    run.add_drop("t1", length=3, age=4)
    rollout_id = run.add_failure("ValueError: no (my_env.py:15 in score)", place)
    run.add_steps(1)
    [event] = RunReader(run.folder).poll(run.now_s)
    [failed] = event.data["learning"]["failed"]
    assert (failed.rollout_id, failed.outcome) == (rollout_id, "agent_error")
    assert failed.place == "my_env.py:15 in score"


def test_an_evaluations_report_is_shown_and_follows_its_rows(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "eval-7")
    plan = EvaluationPlan(
        env="guess",
        env_settings={},
        model="",
        split="eval",
        num_tasks=2,
        num_samples=1,
        seed=0,
        sampling=EVAL_SAMPLING,
    )
    write_plan(plan, run.folder)
    row = Row(task_id="a", group_id="r/0", index=0, num_samples=1, outcome="completed", reward=0.5)
    run.append("results.jsonl", row)
    reader = RunReader(run.folder)
    [state] = reader.poll(run.now_s)
    assert (state.data["run"]["name"], state.data["run"]["is_eval"]) == ("eval-7", True)
    assert state.data["evaluation"]["report"]["reward"]["mean"] == 0.5
    assert "success" not in state.data["evaluation"]["report"]
    run.append("results.jsonl", msgspec.structs.replace(row, group_id="r/1", reward=1.0))
    [event] = reader.poll(run.now_s)
    assert (event.name, event.data["num_rows"], event.data["num_wanted"]) == ("evaluation", 2, 2)
    assert event.data["report"]["reward"]["mean"] == 0.75
    assert reader.poll(run.now_s) == []


def test_a_resumed_evaluation_is_read_again(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "eval")
    (run.folder / "eval.json").write_text("{}")
    row = Row(task_id="a", group_id="r/0", index=0, num_samples=1, outcome="completed", reward=0.5)
    run.append("results.jsonl", row)
    view = EvalView(run.folder)
    view.read()
    (run.folder / "results.jsonl").unlink()
    run.append("results.jsonl", row)
    view.read()
    view.read()
    assert view.num_rows == 1


def test_an_evaluation_without_a_plan_has_no_snapshot(tmp_path: Path) -> None:
    assert EvalView(tmp_path).snapshot(None) is None


def test_malformed_lines_are_counted_and_skipped(tmp_path: Path) -> None:
    path = tmp_path / "drops.jsonl"
    path.write_bytes(b'{"reason": "stale"}\nnot json\n{"reason": 3}\n{"reason": "late", "x": 1}\n')
    file = RowFile(path, DroppedRollout)
    assert [row.reason for row in file.read()] == ["stale", "late"]
    assert file.num_bad_lines == 2


def test_a_late_reader_catches_up_over_several_blocks(tmp_path: Path) -> None:
    path = tmp_path / "drops.jsonl"
    reason = "x" * 1000
    path.write_bytes(b'{"reason": "%s"}\n' % reason.encode() * 3000)
    assert len(RowFile(path, DroppedRollout).read()) == 3000
