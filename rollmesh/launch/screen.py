"""The terminal's view of a run: a live view, or a plain line now and then.

- It reads figures that others hold and never slows them.
- Text of agents, models and peers cannot control the terminal: all text passes through `printable`
  before it is styled.
"""

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from rollmesh.core.run_state import RunState
from rollmesh.core.text import printable_lines
from rollmesh.launch.notices import EngineLoads
from rollmesh.launch.progress import RunProgress, cpu_shares, rates, unserved
from rollmesh.launch.supervisor import Supervisor
from rollmesh.launch.telemetry import MIB, TelemetrySampler


class Terminal(Console):
    """A rich console whose text has no control characters except newlines."""

    def __init__(self, **options: Any) -> None:
        super().__init__(emoji=False, **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Yield the segments of `renderable` with their text escaped."""
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
            else:
                yield segment._replace(text=printable_lines(segment.text))


PLAIN_INTERVAL = 10
"""The plain view prints a line at every this many refreshes."""
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
"""Terminal styles by the run's state."""


@contextmanager
def ignore_closed_output() -> Iterator[None]:
    """Ignore that stdout is closed (a closed terminal, `| head`): the run continues without
    output.
    """
    try:
        yield
    except (OSError, SystemExit):  # rich raises SystemExit for a broken pipe
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())


class ScreenData(NamedTuple):
    """The sources of the figures on the screen."""

    name: str
    progress: RunProgress
    sampler: TelemetrySampler
    supervisor: Supervisor
    loads: EngineLoads


class LiveScreen:
    """A view that is repainted in place."""

    def __init__(self, data: ScreenData) -> None:
        self._data = data
        self._live = Live(console=Terminal(), auto_refresh=False)

    def __enter__(self) -> "LiveScreen":
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        with ignore_closed_output():
            self._live.stop()

    def refresh(self, elapsed_s: float) -> None:
        """Repaint."""
        with ignore_closed_output():
            self._live.update(paint(self._data, elapsed_s), refresh=True)


class PlainScreen:
    """A line-by-line view, for logs and pipes."""

    def __init__(self, data: ScreenData) -> None:
        self._data = data
        self._console = Terminal(highlight=False, soft_wrap=True)
        self._num_refreshes = 0
        self._num_notes = 0
        self._page = ""
        self._phases: dict[str, str] = {}
        """The last printed phase of each engine's load."""

    def __enter__(self) -> "PlainScreen":
        return self

    def __exit__(self, *_: object) -> None:
        with ignore_closed_output():
            self._console.print(Text(line(self._data)))

    def refresh(self, elapsed_s: float) -> None:
        """Print what is new."""
        with ignore_closed_output():
            self._print(elapsed_s)

    def _print(self, elapsed_s: float) -> None:
        supervisor = self._data.supervisor
        num_new = supervisor.num_notes - self._num_notes
        for note in supervisor.notes[-num_new:] if num_new else ():
            self._console.print(Text(note))
        self._num_notes = supervisor.num_notes
        if self._page != dashboard_url(self._data.supervisor):
            self._page = dashboard_url(self._data.supervisor)
            self._console.print(Text(f"dashboard: {self._page}"))
        for role, load in self._data.loads.states.items():
            if self._phases.get(role) != load.phase:
                self._phases[role] = load.phase
                self._console.print(Text(f"{role}: {load}"))
        self._num_refreshes += 1
        if self._num_refreshes % PLAIN_INTERVAL == 0:
            self._console.print(Text(f"{clock(elapsed_s)}  {line(self._data)}"))


Screen = LiveScreen | PlainScreen


def screen_for(data: ScreenData, is_live: bool) -> Screen:
    """Return the live view if it is wanted and stdout is a terminal, else the plain one."""
    return LiveScreen(data) if is_live and sys.stdout.isatty() else PlainScreen(data)


def paint(data: ScreenData, elapsed_s: float) -> RenderableType:
    """Return the live view."""
    progress, supervisor = data.progress, data.supervisor
    left = f"about {clock(progress.seconds_left())} left"
    head = Table.grid(padding=(0, 2), expand=True)
    head.add_column(ratio=1)
    head.add_column(justify="right")
    bar = ProgressBar(max(progress.num_steps, 1), progress.num_done)
    head.add_row(bar, f"{clock(elapsed_s)}, {left}")
    parts: list[RenderableType] = [head, figures(data), Text(), processes(data)]
    if dashboard_url(supervisor):
        parts += [Text(), Text(f"dashboard: {dashboard_url(supervisor)}", style="bold")]
    if fault := no_engine(data):
        parts.append(Text(fault, style="red"))
    parts += [Text(note, style="yellow") for note in supervisor.notes[-NUM_NOTES:]]
    state = supervisor.machine.state.value
    title = f"rollmesh {escape(data.name)}: {state}, {steps(progress)}"
    return Panel(Group(*parts), title=title, title_align="left", padding=(1, 2))


def figures(data: ScreenData) -> Table:
    """Return the table of learning and throughput."""
    progress, now = data.progress, rates(data.sampler.before, data.sampler.last)
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


def processes(data: ScreenData) -> Table:
    """Return the table of processes and their resources."""
    sampler = data.sampler
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
    for role, child in data.supervisor.machine.children.items():
        sample = samples.get(role)
        memory = f"{sample.rss_bytes / MIB:,.0f}" if sample else NONE
        cores = f"{busy[sample.pid]:.0%}" if sample and sample.pid in busy else NONE
        load = data.loads.states.get(role)
        state = f"{child.state.value}: {load}" if load else child.state.value
        table.add_row(role, Text(state), memory, cores)
    return table


def line(data: ScreenData) -> str:
    """Return the plain view's line."""
    progress, sampler = data.progress, data.sampler
    now = rates(sampler.before, sampler.last)
    total_mb = sum(sample.rss_bytes for sample in sampler.last.processes) / MIB
    success = ""
    if progress.success() is not None:
        untrained = share(progress.success_untrained)
        success = f"  success {share(progress.success())} (untrained {untrained})"
    fault = no_engine(data)
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
    """Return the figures of a run's summary, without how it ended."""
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


def no_engine(data: ScreenData) -> str:
    """Return `no engine serves: ...` with the reason; '' if one serves, or none has been ready
    yet.
    """
    progress, sampler = data.progress, data.sampler
    if not progress.refused and not progress.num_done:
        return ""
    why = progress.refused or unserved(sampler.before, sampler.last)
    return f"no engine serves: {why}" if why else ""


def dashboard_url(supervisor: Supervisor) -> str:
    """Return the dashboard's URL; '' before it is ready."""
    ready = supervisor.ready.get("dashboard")
    return ready.address if ready else ""


def steps(progress: RunProgress) -> str:
    """Return `step 3 of 200`."""
    return f"step {progress.num_done} of {progress.num_steps}"


def equal_groups(progress: RunProgress) -> str:
    """Format the share of groups whose rewards were all equal, over the last steps: they train
    nothing.
    """
    value = progress.equal_groups()
    if value is None:
        return NONE
    return "all (no group differs)" if value == 1.0 else f"{value:.0%}"


def masked(progress: RunProgress) -> str:
    """Format what was excluded from training because log-probs differ, as `12 of 4,096 samples, 7
    tokens`; '' if nothing was.
    """
    parts = []
    if progress.num_masked:
        parts.append(f"{progress.num_masked:,} of {progress.num_samples:,} samples")
    if progress.num_masked_tokens:
        parts.append(f"{progress.num_masked_tokens:,} tokens")
    return ", ".join(parts)


def ages(progress: RunProgress) -> str:
    """Format the shares of samples by age: `0: 24%, 1: 76%`."""
    return ", ".join(f"{age}: {part:.0%}" for age, part in progress.ages().items()) or NONE


def share(value: float | None) -> str:
    """Format with two decimals."""
    return NONE if value is None else f"{value:.2f}"


def reward(value: float | None) -> str:
    """Format with three decimals, or three significant digits if very small or large."""
    if value is None:
        return NONE
    return f"{value:.3f}" if value == 0.0 or 0.01 <= abs(value) < 1e5 else f"{value:.3g}"


def clock(seconds: float | None) -> str:
    """Format as `1:05` or `2:01:05`."""
    if seconds is None:
        return NONE
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
