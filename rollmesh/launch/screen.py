"""What the terminal shows of a run: a live view, or a plain line now and then.

Owns the layout and nothing else. Invariant: it reads figures that others hold and never slows
them. Driven by one task of `run`; rich paints.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from rich.console import Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rollmesh.core.run_state import RunState
from rollmesh.launch.progress import Progress, cpu_shares, rates, unserved
from rollmesh.launch.sampler import MIB, Sampler
from rollmesh.launch.supervisor import Supervisor
from rollmesh.launch.terminal import Terminal

PLAIN_EVERY = 10
"""The plain view says a line at every so many looks."""
NUM_NOTES = 4
NONE = "-"
STATE_STYLES = {
    RunState.WAITING: "",
    RunState.RUNNING: "cyan",
    RunState.SILENT: "yellow",
    RunState.DONE: "green",
    RunState.STOPPED: "yellow",
    RunState.FAILED: "red",
    RunState.KILLED: "red",
}
"""How the terminal shows a run's state."""


@contextmanager
def unread() -> Iterator[None]:
    """What is shown may find no reader (a closed terminal, `| head`): the run goes on unseen."""
    try:
        yield
    except (OSError, SystemExit):  # rich makes a SystemExit of a broken pipe
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())


class Scene(NamedTuple):
    """What is looked at."""

    name: str
    progress: Progress
    sampler: Sampler
    supervisor: Supervisor


class LiveScreen:
    """Repaints in place."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._live = Live(console=Terminal(), auto_refresh=False)

    def __enter__(self) -> "LiveScreen":
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        with unread():
            self._live.stop()

    def look(self, elapsed_s: float) -> None:
        """Paint the present."""
        with unread():
            self._live.update(paint(self._scene, elapsed_s), refresh=True)


class PlainScreen:
    """One line at a time, for logs and pipes."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._console = Terminal(highlight=False, soft_wrap=True)
        self._num_looks = 0
        self._num_notes = 0
        self._page = ""

    def __enter__(self) -> "PlainScreen":
        return self

    def __exit__(self, *_: object) -> None:
        with unread():
            self._console.print(Text(line(self._scene)))

    def look(self, elapsed_s: float) -> None:
        """Say what is new."""
        with unread():
            self._say(elapsed_s)

    def _say(self, elapsed_s: float) -> None:
        supervisor = self._scene.supervisor
        num_new = supervisor.num_notes - self._num_notes
        for note in supervisor.notes[-num_new:] if num_new else ():
            self._console.print(Text(note))
        self._num_notes = supervisor.num_notes
        if self._page != page(self._scene.supervisor):
            self._page = page(self._scene.supervisor)
            self._console.print(Text(f"the page: {self._page}"))
        self._num_looks += 1
        if self._num_looks % PLAIN_EVERY == 0:
            self._console.print(Text(f"{clock(elapsed_s)}  {line(self._scene)}"))


Screen = LiveScreen | PlainScreen


def screen_for(scene: Scene, is_live: bool) -> Screen:
    """The live view where it is wanted and stdout is a terminal."""
    return LiveScreen(scene) if is_live and sys.stdout.isatty() else PlainScreen(scene)


def paint(scene: Scene, elapsed_s: float) -> RenderableType:
    """The live view."""
    progress, supervisor = scene.progress, scene.supervisor
    left = f"about {clock(progress.seconds_left())} left"
    head = Table.grid(padding=(0, 2), expand=True)
    head.add_column(ratio=1)
    head.add_column(justify="right")
    bar = ProgressBar(max(progress.num_steps, 1), progress.num_done)
    head.add_row(bar, f"{clock(elapsed_s)}, {left}")
    parts: list[RenderableType] = [head, figures(scene), Text(), processes(scene)]
    if page(supervisor):
        parts += [Text(), Text(f"the page: {page(supervisor)}", style="bold")]
    if fault := no_engine(scene):
        parts.append(Text(fault, style="red"))
    parts += [Text(note, style="yellow") for note in supervisor.notes[-NUM_NOTES:]]
    state = supervisor.machine.state.value
    title = f"rollmesh {escape(scene.name)}: {state}, {steps(progress)}"
    return Panel(Group(*parts), title=title, title_align="left", padding=(1, 2))


def figures(scene: Scene) -> Table:
    """Learning and pace."""
    progress, now = scene.progress, rates(scene.sampler.before, scene.sampler.last)
    table = Table.grid(padding=(0, 2))
    recent = f"{reward(progress.reward())} over the last 10 steps"
    table.add_row("reward", f"{recent}, untrained {reward(progress.reward_untrained)}")
    if progress.success() is not None:
        recent = f"{share(progress.success())} over the last 10 steps"
        table.add_row("success", f"{recent}, untrained {share(progress.success_untrained)}")
    table.add_row("equal groups", equal_groups(progress))
    table.add_row("staleness", ages(progress))
    if masked(progress):
        table.add_row("masked", Text(f"{masked(progress)} (docs: exactness)", style="yellow"))
    table.add_row("rollouts", f"{now.num_in_flight} in flight")
    table.add_row("pace", f"{now.calls_per_s:,.0f} calls/s, {now.tokens_per_s:,.0f} tokens/s")
    return table


def processes(scene: Scene) -> Table:
    """Who runs, and what it costs."""
    sampler = scene.sampler
    samples = {sample.role: sample for sample in sampler.last.processes}
    busy = cpu_shares(sampler.before, sampler.last)
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading, justify in (
        ("process", "left"),
        ("state", "left"),
        ("MB", "right"),
        ("CPU", "right"),
    ):
        table.add_column(heading, justify=justify, header_style="dim")  # type: ignore[arg-type]
    for role, child in scene.supervisor.machine.children.items():
        sample = samples.get(role)
        memory = f"{sample.rss_bytes / MIB:,.0f}" if sample else NONE
        cores = f"{busy[sample.pid]:.0%}" if sample and sample.pid in busy else NONE
        table.add_row(role, child.state.value, memory, cores)
    return table


def line(scene: Scene) -> str:
    """The plain view."""
    progress, sampler = scene.progress, scene.sampler
    now = rates(sampler.before, sampler.last)
    total_mb = sum(sample.rss_bytes for sample in sampler.last.processes) / MIB
    success = ""
    if progress.success() is not None:
        untrained = share(progress.success_untrained)
        success = f"  success {share(progress.success())} (untrained {untrained})"
    fault = no_engine(scene)
    return (
        f"{steps(progress)}  reward {reward(progress.reward())}"
        f" (untrained {reward(progress.reward_untrained)}){success}"
        f"  equal groups {equal_groups(progress)}  ages {ages(progress)}"
        f"{f'  masked {masked(progress)}' if masked(progress) else ''}"
        f"  {now.num_in_flight} in flight  {now.calls_per_s:.0f} calls/s"
        f"  {now.tokens_per_s:.0f} tokens/s  {total_mb:.0f} MB"
        f"  {clock(progress.seconds_left())} left" + (f"  {fault}" if fault else "")
    )


def summary_table(summary: dict[str, Any]) -> Table:
    """The figures of a run's summary; how it ended is shown beside the table."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for key, value in summary.items():
        if key in ("ended", "cause", "resume"):
            continue
        lines = (value or [None]) if isinstance(value, list) else [value]
        for at, line in enumerate(lines):
            table.add_row("" if at else key, Text(_figure(line)))
    return table


def _figure(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {each}" for name, each in value.items() if each != "")
    return NONE if value is None else str(value)


def no_engine(scene: Scene) -> str:
    """`no engine serves: ...` with the reason; empty where one does, or the first is awaited."""
    progress, sampler = scene.progress, scene.sampler
    if not progress.refused and not progress.num_done:
        return ""
    why = progress.refused or unserved(sampler.before, sampler.last)
    return f"no engine serves: {why}" if why else ""


def page(supervisor: Supervisor) -> str:
    """Where the page is, once it is there."""
    ready = supervisor.ready.get("dashboard")
    return ready.address if ready else ""


def steps(progress: Progress) -> str:
    """`step 3 of 200`"""
    return f"step {progress.num_done} of {progress.num_steps}"


def equal_groups(progress: Progress) -> str:
    """Share of groups whose rewards were all equal, over the last steps: they teach nothing."""
    value = progress.equal_groups()
    if value is None:
        return NONE
    return "all (no group differs)" if value == 1.0 else f"{value:.0%}"


def masked(progress: Progress) -> str:
    """`12 of 4,096 samples, 7 tokens`: what did not train because log-probs differ; '' if none."""
    parts = []
    if progress.num_masked:
        parts.append(f"{progress.num_masked:,} of {progress.num_samples:,} samples")
    if progress.num_masked_tokens:
        parts.append(f"{progress.num_masked_tokens:,} tokens")
    return ", ".join(parts)


def ages(progress: Progress) -> str:
    """Shares of the samples by age: `0: 24%, 1: 76%`."""
    return ", ".join(f"{age}: {part:.0%}" for age, part in progress.ages().items()) or NONE


def share(value: float | None) -> str:
    """Two digits."""
    return NONE if value is None else f"{value:.2f}"


def reward(value: float | None) -> str:
    """Three digits after the point, or three significant ones of a very small or large value."""
    if value is None:
        return NONE
    return f"{value:.3f}" if value == 0.0 or 0.01 <= abs(value) < 1e5 else f"{value:.3g}"


def clock(seconds: float | None) -> str:
    """`1:05`, `2:01:05`."""
    if seconds is None:
        return NONE
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
