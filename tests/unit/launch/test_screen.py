"""The terminal's screen of a run."""

import io
from pathlib import Path

import msgspec
import pytest
from rich.console import Console, RenderableType

from rollmesh.core.config import Config, LaunchConfig, RunConfig
from rollmesh.core.process import Ready
from rollmesh.launch.folder import RunFolder
from rollmesh.launch.machine import TimePassed
from rollmesh.launch.notices import EngineLoads, LoadRow
from rollmesh.launch.plan import ChildPlan, OnDeath
from rollmesh.launch.progress import RunProgress
from rollmesh.launch.screen import (
    PLAIN_INTERVAL,
    PlainScreen,
    ScreenData,
    clock,
    line,
    paint,
    reward,
    summary_table,
)
from rollmesh.launch.supervisor import MAX_NOTES, MeshPlan, Supervisor
from rollmesh.launch.telemetry import MIB, ProcessSample, Telemetry, TelemetrySampler
from rollmesh.testing.clock import FakeClock


def telemetry(time_s: float, calls: int, cpu_s: float) -> Telemetry:
    worker = {"worker_id": "w", "in_flight": 114, "num_calls": calls, "num_tokens": 2 * calls}
    process = ProcessSample("router", 7, 62 * MIB, cpu_s)
    return Telemetry(time_s, [process], {"workers": [worker]})


@pytest.fixture
def data(tmp_path: Path) -> ScreenData:
    """The figures of a running run."""
    folder = RunFolder(Config(run=RunConfig(name="demo", folder=str(tmp_path))))
    plans = [ChildPlan(role="router", argv=("x",), on_death=OnDeath.END)]
    supervisor = Supervisor(MeshPlan(plans, {}, "launch.1"), LaunchConfig(), folder, FakeClock())
    supervisor.machine.step(TimePassed(), 0.0)
    supervisor.ready["dashboard"] = Ready("dashboard", 9, "http://127.0.0.1:5")
    sampler = TelemetrySampler(supervisor, folder, FakeClock(), LaunchConfig())
    sampler.before, sampler.last = telemetry(10.0, 0, 1.0), telemetry(12.0, 1200, 1.5)
    progress = RunProgress(num_steps=200)
    row = {"step": 0, "reward": 0.155, "age_histogram": {"0": 1, "1": 3}}
    progress.add([msgspec.json.encode({"time_s": 0.0, "step": -1, "reward_untrained": 0.16})])
    progress.add([msgspec.json.encode({"time_s": 2.0 * s, **row, "step": s}) for s in range(20)])
    return ScreenData("demo", progress, sampler, supervisor, EngineLoads(folder.logs))


def text_of(renderable: RenderableType) -> str:
    console = Console(file=io.StringIO(), width=100)
    console.print(renderable)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_live_view_shows_learning_throughput_processes_and_dashboard(data: ScreenData) -> None:
    text = text_of(paint(data, elapsed_s=65.0))
    for expected in (
        "rollmesh demo: starting, step 20 of 200",
        "1:05, about 6:00 left",
        "0.155 over the last 10 steps, untrained 0.160",
        "0: 25%, 1: 75%",
        "114 in flight",
        "600 calls/s, 1,200 tokens/s",
        "dashboard: http://127.0.0.1:5",
    ):
        assert expected in text
    [row] = [line.split() for line in text.splitlines() if "router" in line]
    assert row[1:5] == ["router", "starting", "62", "25%"]


REFUSED = "http://e:1: scoring: its log-probs differ from the trainer's by 0.251"


def add_row(data: ScreenData, **fields: object) -> None:
    data.progress.add([msgspec.json.encode({"time_s": 50.0, "step": -1, **fields})])


def test_refused_weights_are_shown_until_an_engine_accepts_some(data: ScreenData) -> None:
    add_row(data, refused=REFUSED)
    assert f"no engine serves: {REFUSED}" in line(data)
    assert "no engine serves: http://e:1" in text_of(paint(data, elapsed_s=65.0))
    add_row(data, refused="")
    assert "no engine serves" not in line(data)


def with_engine(sample: Telemetry, phase: str) -> Telemetry:
    row = {"url": "http://e:1", "phase": phase, "detail": "does not answer"}
    return msgspec.structs.replace(sample, router={**(sample.router or {}), "engines": [row]})


@pytest.mark.parametrize(
    ("phases", "is_shown"),
    [
        (("fenced", "joining"), True),
        (("ready", "fenced"), False),  # it may be fenced for a moment only
        (("fenced", "ready"), False),
        (("asleep", "asleep"), False),
        (("gone", "gone"), False),
    ],
)
def test_engines_that_do_not_serve_are_shown_with_their_reasons(
    data: ScreenData, phases: tuple[str, str], is_shown: bool
) -> None:
    sampler = data.sampler
    sampler.before, sampler.last = (
        with_engine(sample, phase)
        for sample, phase in zip((sampler.before, sampler.last), phases, strict=True)
    )
    expected = "no engine serves: http://e:1: does not answer"
    assert (expected in line(data)) == is_shown


def test_the_live_view_shows_the_latest_notes(data: ScreenData) -> None:
    data.supervisor.notes += [f"note {number}" for number in range(9)]
    text = text_of(paint(data, elapsed_s=65.0))
    assert "note 8" in text
    assert "note 4" not in text


def test_the_live_view_shows_how_far_an_engine_is_loaded(data: ScreenData) -> None:
    data.loads.states["router"] = LoadRow("engine.loading", "loading weights", "3/8")
    assert "starting: loading weights 3/8" in text_of(paint(data, elapsed_s=1.0))


def test_the_plain_view_prints_each_phase_of_a_load_once(
    data: ScreenData, capsys: pytest.CaptureFixture[str]
) -> None:
    screen = PlainScreen(data)
    for amount in ("1/8", "2/8"):
        data.loads.states["engine-0"] = LoadRow("engine.loading", "loading weights", amount)
        screen.refresh(1.0)
    assert capsys.readouterr().out.count("engine-0: loading weights") == 1


def test_the_plain_view_prints_a_line_at_intervals(
    data: ScreenData, capsys: pytest.CaptureFixture[str]
) -> None:
    with PlainScreen(data) as screen:
        data.supervisor.note("worker-0 died")
        for second in range(PLAIN_INTERVAL):
            screen.refresh(float(second))
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["worker-0 died", "dashboard: http://127.0.0.1:5"]
    assert lines[2].startswith("0:09  step 20 of 200  reward 0.155 (untrained 0.160)  equal")
    assert lines[3].endswith("62 MB  6:00 left")
    assert len(lines) == 4


def test_the_plain_view_prints_the_last_of_many_notes(
    data: ScreenData, capsys: pytest.CaptureFixture[str]
) -> None:
    with PlainScreen(data) as screen:
        screen.refresh(0.0)
        capsys.readouterr()
        for number in range(3 * MAX_NOTES):
            data.supervisor.note(f"note {number}")
        screen.refresh(1.0)
        screen.refresh(2.0)
        lines = capsys.readouterr().out.splitlines()
    assert lines == [f"note {number}" for number in range(2 * MAX_NOTES, 3 * MAX_NOTES)]
    assert len(data.supervisor.notes) == MAX_NOTES


def test_a_run_without_figures_is_shown_with_dashes(data: ScreenData) -> None:
    data.sampler.before = data.sampler.last = Telemetry(0.0, [], None)
    fresh = data._replace(progress=RunProgress(num_steps=5))
    text = text_of(paint(fresh, elapsed_s=0.0))
    assert "step 0 of 5" in text
    assert "about - left" in text


def test_the_summary_is_a_line_per_figure() -> None:
    text = text_of(summary_table({"num_lost": 0, "success": None, "peak_rss_mb": {"a": 1, "b": 2}}))
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines == ["num_lost 0", "success -", "peak_rss_mb a 1, b 2"]


def test_a_table_in_the_summary_is_a_line_per_row() -> None:
    rows = [{"engine": "http://a", "fork_cause": "", "num": 1}, {"engine": "http://b", "num": 2}]
    text = text_of(summary_table({"exactness": rows, "no_row": []}))
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines == ["exactness engine http://a, num 1", "engine http://b, num 2", "no_row -"]


@pytest.mark.parametrize(
    ("seconds", "expected"), [(None, "-"), (-3, "0:00"), (65, "1:05"), (3665, "1:01:05")]
)
def test_durations_are_formatted_as_clocks(seconds: float | None, expected: str) -> None:
    assert clock(seconds) == expected


@pytest.mark.parametrize(
    ("frac_equal_groups", "shown"), [(0.89, "89%"), (1.0, "all (no group differs)")]
)
def test_groups_with_equal_rewards_are_shown(
    data: ScreenData, frac_equal_groups: float, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"success": 0.5, "frac_equal_groups": frac_equal_groups}
    rows = [msgspec.json.encode({"time_s": 2.0 * at, "step": at, **row}) for at in range(20, 40)]
    data.progress.add(rows)
    assert shown in text_of(paint(data, elapsed_s=65.0))
    with PlainScreen(data) as screen:
        for second in range(PLAIN_INTERVAL):
            screen.refresh(float(second))
    assert f"equal groups {shown}" in capsys.readouterr().out


def test_success_is_shown_after_the_reward_if_known(data: ScreenData) -> None:
    assert "success" not in text_of(paint(data, elapsed_s=65.0))
    progress = RunProgress(num_steps=200)
    for row in (
        {"time_s": 0.0, "step": -1, "reward_untrained": 0.5, "success_untrained": 0.25},
        {"time_s": 0.0, "step": 0, "reward": 0.5, "success": 0.25},
    ):
        progress.add([msgspec.json.encode(row)])
    known = data._replace(progress=progress)
    assert "reward 0.500 (untrained 0.500)  success 0.25 (untrained 0.25)" in line(known)
    lines = text_of(paint(known, elapsed_s=65.0)).splitlines()
    rows = [each.split()[1] for each in lines if "untrained" in each]
    assert rows == ["reward", "success"]


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0.0, "0.000"), (0.155, "0.155"), (-12.5, "-12.500"), (3e-5, "3e-05")],
)
def test_a_reward_is_shown_with_the_digits_that_it_has(value: float | None, text: str) -> None:
    assert reward(value) == text


def test_masked_samples_are_shown_if_there_are_any(data: ScreenData) -> None:
    assert "masked" not in line(data) + text_of(paint(data, elapsed_s=65.0))
    row = {"time_s": 41.0, "step": 20, "reward": 0.1, "num_samples": 4096, "num_masked": 12}
    data.progress.add([msgspec.json.encode(row)])
    assert "  masked 12 of 4,096 samples  " in line(data)
    data.progress.add([msgspec.json.encode({"time_s": 42.0, "step": 21, "num_masked_tokens": 7})])
    assert "  masked 12 of 4,096 samples, 7 tokens  " in line(data)
    assert "12 of 4,096 samples" in text_of(paint(data, elapsed_s=65.0))
