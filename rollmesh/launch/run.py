"""One run from its settings to its summary.

Owns the order: check, make the folder, start, follow, stop, sum up. Invariants: a mistake that can
be seen early moves no older run aside; on a shared fleet nothing is begun before the pipeline's
name is this run's; a run that began leaves a summary.json, however it ended.
Driven by the verbs `up` and `demo`.
"""

import asyncio
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from rich.text import Text

from rollmesh.core.clock import SystemClock
from rollmesh.core.config import Config
from rollmesh.core.errors import UserError
from rollmesh.core.logs import setup
from rollmesh.core.process import FAILED, USAGE
from rollmesh.core.run_state import RunState
from rollmesh.core.share import Share
from rollmesh.core.tail import Tail
from rollmesh.core.warden import new_mark
from rollmesh.launch.checks import check
from rollmesh.launch.claim import claim_of, give_back, take
from rollmesh.launch.complaints import Complaints, RolloutFailures
from rollmesh.launch.earlier import find_earlier
from rollmesh.launch.folder import RunFolder, config_path
from rollmesh.launch.keys import make_run_keys
from rollmesh.launch.machine import End
from rollmesh.launch.plan import plan_mesh
from rollmesh.launch.progress import Progress
from rollmesh.launch.recoveries import Recoveries
from rollmesh.launch.sampler import Sampler
from rollmesh.launch.screen import (
    STATE_STYLES,
    Scene,
    Screen,
    screen_for,
    summary_table,
    unread,
)
from rollmesh.launch.supervisor import Mesh, Supervisor, open_mesh
from rollmesh.launch.terminal import Terminal

LOOK_S = 1.0
WORDS = {RunState.DONE: "is done", RunState.STOPPED: "was stopped", RunState.FAILED: "failed"}
PIPE_WIDTH = 200
"""Where stdout is no terminal, lines are cut for no one."""


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What to run, and how to show it."""

    config: Config
    make_model: tuple[str, ...] = ()
    """The verb, with its words, that writes the model first; empty where it is there."""
    is_live: bool = True
    """A live view, where stdout is a terminal."""
    about: str = ""
    """Said first."""
    resume: bool = False
    """Go on with the run that is there."""
    share: Share | None = None
    """In a fleet, where its GPUs are not its own."""
    resume_command: str = ""
    """The command that resumes the run, for people; '' if there is none."""
    has_keys: bool = True
    """Make keys for the run, unless the user has named some."""


def launch(order: Order) -> int:
    """Run it; the exit code. UserError for what the user can mend."""
    return asyncio.run(Run(order).run())


class Run:
    """One run."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._clock = SystemClock()
        self._started_s = self._clock.now_s()
        width = None if sys.stdout.isatty() else PIPE_WIDTH
        self._console = Terminal(highlight=False, width=width)

    async def run(self) -> int:
        """See `launch`."""
        config = self._order.config
        await check(config, bool(self._order.make_model), self._order.share, self._say)
        if self._order.about:
            with unread():
                self._console.print(self._order.about, markup=False)
        mark = new_mark("launch")
        with self._named(mark):  # before all else: a run before may still have folder and ports
            earlier = find_earlier(config) if self._order.resume else None
            order, path = self._order, config_path(config)
            plans = plan_mesh(config, path, order.make_model, earlier, order.share)
            mesh = open_mesh(plans, mark)
            folder = RunFolder(config, resume=order.resume, resume_command=order.resume_command)
            setup("launch", folder.path, on_console=False)
            try:
                keys = make_run_keys(folder.path, plans) if order.has_keys else None
                sampler, end = await self._follow(mesh, folder, keys)
            except BaseException as error:
                folder.end(RunState.FAILED, f"launch failed: {type(error).__name__}: {error}")
                raise
        self._sum_up(end, folder, sampler)
        return end.code

    async def _follow(
        self, mesh: Mesh, folder: RunFolder, keys: Path | None
    ) -> tuple[Sampler, End]:
        """Run it, and show how it goes."""
        config = self._order.config
        supervisor = Supervisor(mesh, config.launch, folder, self._clock, keys)
        sampler = Sampler(supervisor, folder, self._clock)
        progress = Progress(config.trainer.num_steps)
        scene = Scene(config.run.name, progress, sampler, supervisor)
        with screen_for(scene, self._order.is_live) as screen:
            async with asyncio.TaskGroup() as tasks:
                following = [
                    tasks.create_task(sampler.follow(), name="sampler"),
                    tasks.create_task(self._watch(scene, screen, folder), name="screen"),
                ]
                end = await supervisor.run()
                for task in following:
                    task.cancel()
        if end.state is RunState.FAILED and (place := folder.moved_to()):
            # A process may notice first; it sees files that are missing, and not why.
            end = End(FAILED, moved_away(folder, place))
        return sampler, end

    @contextmanager
    def _named(self, mark: str) -> Iterator[None]:
        """Has the name of its share, if it has one, until none of its processes is left."""
        share = self._order.share
        if share is None:
            yield
            return
        config = self._order.config
        runs, owns_engines = config.run_folder().parent, not config.engine.urls
        run = claim_of(share, mark, runs, owns_engines=owns_engines)
        take(share, run)
        try:
            yield
        finally:
            if fault := give_back(share, run):
                with unread():
                    self._console.print(fault, markup=False)

    async def _watch(self, scene: Scene, screen: Screen, folder: RunFolder) -> None:
        metrics, num_restarts = Tail(folder.path / "metrics.jsonl"), 0
        recoveries, complaints = Recoveries(folder.path), Complaints(folder)
        failures = RolloutFailures(folder.logs)
        while True:
            if (place := folder.moved_to()) and scene.supervisor.machine.end is None:
                scene.supervisor.abort(moved_away(folder, place))
            failed = failures.new(scene.sampler.last)
            for note in (*recoveries.new(), *complaints.new(), *failed):
                scene.supervisor.note(note)
            lines = metrics.read()
            if metrics.num_restarts > num_restarts:
                num_restarts = metrics.num_restarts
                scene.progress.start_over()
            scene.progress.add(line.data for line in lines)
            screen.look(self._elapsed_s())
            await asyncio.sleep(LOOK_S)

    def _sum_up(self, end: End, folder: RunFolder, sampler: Sampler) -> None:
        wall_s = round(self._elapsed_s(), 1)
        summary = folder.end(end.state, end.cause, wall_s=wall_s, peak_rss_mb=sampler.peak_rss_mb)
        if end.code == USAGE:
            raise UserError(end.reason)
        with unread():
            self._show(end, summary, folder)

    def _show(self, end: End, summary: dict[str, Any], folder: RunFolder) -> None:
        self._console.print(summary_table(summary))
        if folder.fault:
            self._console.print(folder.fault, markup=False)
        for line in end_lines(summary, folder):
            self._console.print(line)

    def _say(self, line: str) -> None:
        with unread():
            self._console.print(line, markup=False)

    def _elapsed_s(self) -> float:
        return self._clock.now_s() - self._started_s


def moved_away(folder: RunFolder, place: str) -> str:
    """Why a run ends whose folder was moved: its processes would write to both places."""
    name = Path(place)
    where = f"--set run.folder={shlex.quote(str(name.parent))} --set run.name={name.name}"
    return f"{folder.path} was moved to {place} while it ran; nothing is lost: --resume {where}"


def end_lines(summary: dict[str, Any], folder: RunFolder) -> Iterator[Text]:
    """The last lines on the terminal: the end, its cause, the files, how to resume."""
    state = RunState(summary["ended"])
    cause = summary.get("cause", "")
    yield Text(f"the run {WORDS[state]}{cause and f': {cause}'}", style=STATE_STYLES[state])
    if state is RunState.FAILED:
        yield Text(f"its processes' logs: {folder.logs}")
    yield Text(f"left in {folder.path}")
    if resume := summary.get("resume"):
        yield Text(f"to resume it: {resume}")
