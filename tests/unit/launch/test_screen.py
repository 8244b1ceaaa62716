"""What the terminal says of a run."""

import io
from pathlib import Path

import msgspec
import pytest
from rich.console import Console, RenderableType

from rollmesh.core.config import Config, LaunchConfig, RunConfig
from rollmesh.core.process import Ready
from rollmesh.launch.folder import RunFolder
from rollmesh.launch.machine import Ticked
from rollmesh.launch.plan import ChildPlan, OnDeath
from rollmesh.launch.progress import Progress
from rollmesh.launch.sampler import MIB, ProcessSample, Sampler, Telemetry
from rollmesh.launch.screen import (
    PLAIN_EVERY,
    PlainScreen,
    Scene,
    clock,
    line,
    paint,
    reward,
    summary_table,
)
from rollmesh.launch.supervisor import MAX_NOTES, Mesh, Supervisor
from rollmesh.testing.clock import FakeClock


def telemetry(time_s: float, calls: int, cpu_s: float) -> Telemetry:
    worker = {"worker_id": "w", "in_flight": 114, "num_calls": calls, "num_tokens": 2 * calls}
    process = ProcessSample("router", 7, 62 * MIB, cpu_s)
    return Telemetry(time_s, [process], {"workers": [worker]})


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    """A run in mid-flight."""
    folder = RunFolder(Config(run=RunConfig(name="demo", folder=str(tmp_path))))
    plans = [ChildPlan(role="router", argv=("x",), on_death=OnDeath.END)]
    supervisor = Supervisor(Mesh(plans, {}, "launch.1"), LaunchConfig(), folder, FakeClock())
    supervisor.machine.step(Ticked(), 0.0)
    supervisor.ready["dashboard"] = Ready("dashboard", 9, "http://127.0.0.1:5")
    sampler = Sampler(supervisor, folder, FakeClock())
    sampler.before, sampler.last = telemetry(10.0, 0, 1.0), telemetry(12.0, 1200, 1.5)
    progress = Progress(num_steps=200)
    row = {"step": 0, "reward": 0.155, "age_histogram": {"0": 1, "1": 3}}
    progress.add([msgspec.json.encode({"time_s": 0.0, "step": -1, "reward_untrained": 0.16})])
    progress.add([msgspec.json.encode({"time_s": 2.0 * s, **row, "step": s}) for s in range(20)])
    return Scene("demo", progress, sampler, supervisor)


def text_of(renderable: RenderableType) -> str:
    console = Console(file=io.StringIO(), width=100)
    console.print(renderable)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_live_view_tells_learning_pace_processes_and_page(scene: Scene) -> None:
    text = text_of(paint(scene, elapsed_s=65.0))
    for told in (
        "rollmesh demo: starting, step 20 of 200",
        "1:05, about 6:00 left",
        "0.155 over the last 10 steps, untrained 0.160",
        "0: 25%, 1: 75%",
        "114 in flight",
        "600 calls/s, 1,200 tokens/s",
        "the page: http://127.0.0.1:5",
    ):
        assert told in text
    [row] = [line.split() for line in text.splitlines() if "router" in line]
    assert row[1:5] == ["router", "starting", "62", "25%"]


REFUSED = "http://e:1: scoring: its log-probs differ from the trainer's by 0.251"


def add_row(scene: Scene, **fields: object) -> None:
    scene.progress.add([msgspec.json.encode({"time_s": 50.0, "step": -1, **fields})])


def test_refused_weights_are_shown_until_an_engine_accepts_some(scene: Scene) -> None:
    add_row(scene, refused=REFUSED)
    assert f"no engine serves: {REFUSED}" in line(scene)
    assert "no engine serves: http://e:1" in text_of(paint(scene, elapsed_s=65.0))
    add_row(scene, refused="")
    assert "no engine serves" not in line(scene)


def with_engine(sample: Telemetry, phase: str) -> Telemetry:
    row = {"url": "http://e:1", "phase": phase, "detail": "does not answer"}
    return msgspec.structs.replace(sample, router={**(sample.router or {}), "engines": [row]})


@pytest.mark.parametrize(
    ("phases", "is_shown"),
    [
        (("fenced", "joining"), True),
        (("ready", "fenced"), False),  # perhaps for a moment
        (("fenced", "ready"), False),
        (("asleep", "asleep"), False),
        (("gone", "gone"), False),
    ],
)
def test_engines_that_do_not_serve_are_shown_with_their_reasons(
    scene: Scene, phases: tuple[str, str], is_shown: bool
) -> None:
    sampler = scene.sampler
    sampler.before, sampler.last = (
        with_engine(sample, phase)
        for sample, phase in zip((sampler.before, sampler.last), phases, strict=True)
    )
    told = "no engine serves: http://e:1: does not answer"
    assert (told in line(scene)) == is_shown


def test_the_live_view_shows_the_latest_notes(scene: Scene) -> None:
    scene.supervisor.notes += [f"note {number}" for number in range(9)]
    text = text_of(paint(scene, elapsed_s=65.0))
    assert "note 8" in text
    assert "note 4" not in text


def test_the_plain_view_says_a_line_now_and_then(
    scene: Scene, capsys: pytest.CaptureFixture[str]
) -> None:
    with PlainScreen(scene) as screen:
        scene.supervisor.note("worker-0 died")
        for second in range(PLAIN_EVERY):
            screen.look(float(second))
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["worker-0 died", "the page: http://127.0.0.1:5"]
    assert lines[2].startswith("0:09  step 20 of 200  reward 0.155 (untrained 0.160)  equal")
    assert lines[3].endswith("62 MB  6:00 left")
    assert len(lines) == 4


def test_of_many_notes_the_plain_view_says_the_last(
    scene: Scene, capsys: pytest.CaptureFixture[str]
) -> None:
    with PlainScreen(scene) as screen:
        screen.look(0.0)
        capsys.readouterr()
        for number in range(3 * MAX_NOTES):
            scene.supervisor.note(f"note {number}")
        screen.look(1.0)
        screen.look(2.0)
        lines = capsys.readouterr().out.splitlines()
    assert lines == [f"note {number}" for number in range(2 * MAX_NOTES, 3 * MAX_NOTES)]
    assert len(scene.supervisor.notes) == MAX_NOTES


def test_a_run_that_has_told_nothing_is_shown_with_dashes(scene: Scene) -> None:
    scene.sampler.before = scene.sampler.last = Telemetry(0.0, [], None)
    fresh = scene._replace(progress=Progress(num_steps=5))
    text = text_of(paint(fresh, elapsed_s=0.0))
    assert "step 0 of 5" in text
    assert "about - left" in text


def test_the_summary_is_a_line_per_figure() -> None:
    text = text_of(summary_table({"num_lost": 0, "success": None, "peak_rss_mb": {"a": 1, "b": 2}}))
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines == ["num_lost 0", "success -", "peak_rss_mb a 1, b 2"]


def test_what_the_summary_has_a_table_of_is_a_line_for_each_row() -> None:
    rows = [{"engine": "http://a", "fork_cause": "", "num": 1}, {"engine": "http://b", "num": 2}]
    text = text_of(summary_table({"exactness": rows, "no_row": []}))
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines == ["exactness engine http://a, num 1", "engine http://b, num 2", "no_row -"]


@pytest.mark.parametrize(
    ("seconds", "told"), [(None, "-"), (-3, "0:00"), (65, "1:05"), (3665, "1:01:05")]
)
def test_times_are_told_as_clocks(seconds: float | None, told: str) -> None:
    assert clock(seconds) == told


@pytest.mark.parametrize(
    ("frac_equal_groups", "shown"), [(0.89, "89%"), (1.0, "all (no group differs)")]
)
def test_groups_with_equal_rewards_are_shown(
    scene: Scene, frac_equal_groups: float, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"success": 0.5, "frac_equal_groups": frac_equal_groups}
    told = [msgspec.json.encode({"time_s": 2.0 * at, "step": at, **row}) for at in range(20, 40)]
    scene.progress.add(told)
    assert shown in text_of(paint(scene, elapsed_s=65.0))
    with PlainScreen(scene) as screen:
        for second in range(PLAIN_EVERY):
            screen.look(float(second))
    assert f"equal groups {shown}" in capsys.readouterr().out


def test_success_is_shown_behind_the_reward_where_it_is_known(scene: Scene) -> None:
    assert "success" not in text_of(paint(scene, elapsed_s=65.0))
    progress = Progress(num_steps=200)
    for row in (
        {"time_s": 0.0, "step": -1, "reward_untrained": 0.5, "success_untrained": 0.25},
        {"time_s": 0.0, "step": 0, "reward": 0.5, "success": 0.25},
    ):
        progress.add([msgspec.json.encode(row)])
    known = scene._replace(progress=progress)
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


def test_masked_samples_are_shown_where_there_are_any(scene: Scene) -> None:
    assert "masked" not in line(scene) + text_of(paint(scene, elapsed_s=65.0))
    row = {"time_s": 41.0, "step": 20, "reward": 0.1, "num_samples": 4096, "num_masked": 12}
    scene.progress.add([msgspec.json.encode(row)])
    assert "  masked 12 of 4,096 samples  " in line(scene)
    scene.progress.add([msgspec.json.encode({"time_s": 42.0, "step": 21, "num_masked_tokens": 7})])
    assert "  masked 12 of 4,096 samples, 7 tokens  " in line(scene)
    assert "12 of 4,096 samples" in text_of(paint(scene, elapsed_s=65.0))
