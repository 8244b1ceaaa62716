"""What the reader tells a page brings the page's copy to the reader's state."""

import shutil
from pathlib import Path

import msgspec
import pytest

from rollmesh.core.run_state import STATE_FILE
from rollmesh.dashboard.reader import PageEvent, RunReader
from rollmesh.testing.run_folder import START_S, FakeRun


@pytest.fixture
def run(tmp_path: Path) -> FakeRun:
    return FakeRun(tmp_path / "demo", num_steps=50)


def names(events: list[PageEvent]) -> list[str]:
    return [event.name for event in events]


def test_the_first_poll_tells_the_whole_state(run: FakeRun) -> None:
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


def test_a_poll_tells_what_is_new_and_nothing_else(run: FakeRun) -> None:
    run.add_steps(2)
    reader = RunReader(run.folder)
    reader.poll(run.now_s)
    assert reader.poll(run.now_s) == []
    run.add_steps(1)
    events = reader.poll(run.now_s)
    assert names(events) == ["steps", "telemetry", "trajectories"]
    assert [row["step"] for row in events[0].data["rows"]] == [2]
    assert [summary.step for summary in events[2].data] == [2]


def test_added_events_and_the_state_agree(run: FakeRun) -> None:
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


def test_thinned_plots_are_told_as_a_fresh_state(run: FakeRun) -> None:
    run.add_steps(10)
    reader = RunReader(run.folder)
    reader.poll(run.now_s)
    for step in range(1000):
        run.append("metrics.jsonl", {"time_s": 1.0, "step": step, "success": 0.5})
    assert names(reader.poll(run.now_s)) == ["state"]
    assert names(reader.poll(run.now_s)) == []


def test_silence_and_the_end_change_the_head(run: FakeRun) -> None:
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


def test_a_new_run_in_the_same_place_is_read_anew(run: FakeRun) -> None:
    run.add_steps(5)
    reader = RunReader(run.folder)
    reader.poll(run.now_s)
    shutil.move(run.folder, run.folder.with_name("demo.1"))
    again = FakeRun(run.folder)
    again.add_steps(2)
    [event] = reader.poll(again.now_s)
    assert event.name == "state"
    assert len(event.data["steps"]) == 2


def test_lines_that_do_not_parse_are_counted_and_told(run: FakeRun) -> None:
    reader = RunReader(run.folder)
    reader.poll(START_S)
    run.append("metrics.jsonl", ["not", "a", "row"])
    reader.poll(START_S)
    [event] = reader.poll(START_S)
    assert event.data["num_bad_lines"] == 1


def test_the_tokenizer_is_the_runs_own(run: FakeRun) -> None:
    reader = RunReader(run.folder)
    reader.poll(START_S)
    ids = run.tokenizer.encode("higher").ids
    assert "".join(reader.token_text().pieces(ids)) == "higher"


def test_the_state_goes_into_json(run: FakeRun) -> None:
    run.add_steps(2)
    reader = RunReader(run.folder)
    reader.poll(run.now_s)
    assert msgspec.json.decode(msgspec.json.encode(reader.state(run.now_s)))["steps"]


def test_a_run_that_goes_on_from_before_its_last_steps_is_read_anew(run: FakeRun) -> None:
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
