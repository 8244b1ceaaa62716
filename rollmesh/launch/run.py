"""One run, from its settings to its summary; and a mesh without a trainer, for evaluations.

- Order: check, make the folder, start, follow, stop, summarize.
- A mistake that can be detected early moves no older run aside.
- On a shared fleet nothing is started before the pipeline's name is claimed.
- A run that began leaves a summary.json, however it ended.
"""

import asyncio
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal, Self

import msgspec
from rich.text import Text

from rollmesh.core.clock import SystemClock
from rollmesh.core.config import Config
from rollmesh.core.errors import UserError
from rollmesh.core.files import FileTail
from rollmesh.core.gpus import visible_gpus
from rollmesh.core.logs import setup
from rollmesh.core.orphans import new_mark
from rollmesh.core.process import FAILED, USAGE
from rollmesh.core.run_state import RunState
from rollmesh.core.share import Share
from rollmesh.launch.checks import check
from rollmesh.launch.devices import Devices, assign_devices, with_devices
from rollmesh.launch.folder import RunFolder, config_path
from rollmesh.launch.hosts.base import Host
from rollmesh.launch.hosts.slurm import (
    Allocation,
    find_allocation,
    gpus_of_job,
    place_in_job,
    sized,
)
from rollmesh.launch.keys import check_run_keys, make_engine_key, make_run_keys
from rollmesh.launch.machine import MeshState, RunEnd
from rollmesh.launch.notices import EngineLoads, ErrorTail, RecoveryTail, RolloutFailures
from rollmesh.launch.pipeline import claim_name, new_claim, read_grant, release_name
from rollmesh.launch.plan import (
    TRAINER,
    ChildPlan,
    engine_roles,
    for_cluster,
    on_network,
    plan_mesh,
    plan_serving,
    start_weights,
    with_local_ranks,
    with_router_on,
)
from rollmesh.launch.progress import RunProgress
from rollmesh.launch.screen import (
    STATE_STYLES,
    Screen,
    ScreenData,
    Terminal,
    ignore_closed_output,
    screen_for,
    summary_table,
)
from rollmesh.launch.supervisor import MeshPlan, Supervisor, open_mesh
from rollmesh.launch.telemetry import TelemetrySampler

REFRESH_S = 1.0
END_TEXT = {RunState.DONE: "is done", RunState.STOPPED: "was stopped", RunState.FAILED: "failed"}
PIPE_WIDTH = 200
"""Width without a terminal, so that lines are not cut."""


ClusterKind = Literal["ray", "slurm"]


class RunOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Config of a run, and how to show it."""

    config: Config
    make_model: tuple[str, ...] = ()
    """The verb and its arguments that write the model first; empty if the model exists."""
    is_live: bool = True
    """Show a live view if stdout is a terminal."""
    about: str = ""
    """Printed first."""
    resume: bool = False
    """Resume the run in the folder."""
    share: Share | None = None
    """The share of a fleet's GPUs, if the run has no GPUs of its own."""
    resume_command: str = ""
    """The command that resumes the run, shown to the user; '' if there is none."""
    has_keys: bool = True
    """Create keys for the run, unless the user has configured some."""
    cluster: ClusterKind | None = None
    """The cluster whose nodes run the processes; None for this machine."""


def launch(order: RunOptions) -> int:
    """Run it and return the exit code; raise UserError for what the user can fix."""
    return asyncio.run(LaunchedRun(order).run())


class LaunchedRun:
    """One run."""

    def __init__(self, order: RunOptions) -> None:
        self._order = order
        self._config = order.config
        self._allocation: Allocation
        self._address = ""
        """On a cluster: the address of this node for the others."""
        self._clock = SystemClock()
        self._started_s = self._clock.now_s()
        width = None if sys.stdout.isatty() else PIPE_WIDTH
        self._console = Terminal(highlight=False, width=width)

    async def run(self) -> int:
        """Implement `launch`."""
        if cluster := self._order.cluster:
            check_run_keys(f"--on {cluster}", has_keys=self._order.has_keys)
            self._address = self._join_cluster()
            self._config = on_network(self._config)
        config = self._config
        makes_model, is_local = bool(self._order.make_model), not self._order.cluster
        await check(config, makes_model, self._order.share, self._print, is_local=is_local)
        devices = self._devices() if is_local else {}
        if self._order.about:
            with ignore_closed_output():
                self._console.print(self._order.about, markup=False)
        mark = new_mark("launch")
        with self._claimed_name(
            mark
        ):  # before all else: an earlier run may still use the folder and ports
            resumed = start_weights(config) if self._order.resume else None
            order, path = self._order, config_path(config)
            plans = plan_mesh(config, path, order.make_model, resumed, order.share)
            mesh = self._place(with_devices(plans, devices), mark)
            folder = RunFolder(config, resume=order.resume, resume_command=order.resume_command)
            setup("launch", folder.path, on_console=False)
            try:
                keys = make_run_keys(folder.path, plans) if order.has_keys else None
                if keys and mesh.hosts:
                    make_engine_key(keys)
                sampler, end = await self._follow(mesh, folder, keys)
            except BaseException as error:
                folder.end(RunState.FAILED, f"launch failed: {type(error).__name__}: {error}")
                raise
        self._sum_up(end, folder, sampler)
        return end.code

    def _devices(self) -> Devices:
        """Return the GPUs of this machine that each process uses."""
        share, config = self._order.share, self._config
        if config.engine.launch != "sglang" and not share:
            return {}
        granted = read_grant(share, config.launch) if share else None
        return assign_devices(config, visible_gpus(), granted)

    def _join_cluster(self) -> str:
        """Find the cluster; return the address of this node for the others."""
        if self._order.cluster == "slurm":
            self._allocation = find_allocation()
            self._config = sized(self._config, len(self._allocation.nodes), gpus_of_job())
            return self._allocation.address
        from rollmesh.launch.hosts.ray import (  # noqa: PLC0415 - an extra
            connect_to_cluster,
            largest_node_gpus,
        )

        address = connect_to_cluster(self._config.ray.address)
        self._config = with_local_ranks(self._config, largest_node_gpus())
        return address

    def _place(self, plans: list[ChildPlan], mark: str) -> MeshPlan:
        """Assign the processes to hosts, and open the listening sockets of this machine."""
        config = self._config
        hosts: Mapping[str, Host]
        if self._order.cluster:
            plans = with_router_on(self._address, config, plans)
        match self._order.cluster:
            case None:
                return open_mesh(plans, mark)
            case "slurm":
                plans, hosts = place_in_job(config, plans, self._allocation, mark)
            case "ray":
                from rollmesh.launch.hosts.ray import (  # noqa: PLC0415 - an extra
                    RayHost,
                    cluster_gpus,
                )

                plans = for_cluster(config, plans, cluster_gpus())
                gang = [plan for plan in plans if plan.is_rank or plan.role == TRAINER]
                host = RayHost(config.run_folder() / "logs", mark, gang)
                hosts = {plan.role: host for plan in plans if not plan.stays_here}
        return open_mesh(plans, mark, hosts, (str(config_path(config)),))

    async def _follow(
        self, mesh: MeshPlan, folder: RunFolder, keys: Path | None
    ) -> tuple[TelemetrySampler, RunEnd]:
        """Run the mesh and show its progress."""
        config = self._config
        supervisor = Supervisor(mesh, config.launch, folder, self._clock, keys)
        sampler = TelemetrySampler(supervisor, folder, self._clock, config.launch)
        progress = RunProgress(config.trainer.num_steps)
        loads = EngineLoads(folder.logs, engine_roles(config))
        data = ScreenData(config.run.name, progress, sampler, supervisor, loads)
        with screen_for(data, self._order.is_live) as screen:
            async with asyncio.TaskGroup() as tasks:
                following = [
                    tasks.create_task(sampler.follow(), name="sampler"),
                    tasks.create_task(self._show_progress(data, screen, folder), name="screen"),
                ]
                end = await supervisor.run()
                for task in following:
                    task.cancel()
        if end.state is RunState.FAILED and (place := folder.moved_to()):
            # A process may fail first, because its files are missing.
            end = RunEnd(FAILED, moved_away(folder, place))
        return sampler, end

    @contextmanager
    def _claimed_name(self, mark: str) -> Iterator[None]:
        """Hold the pipeline's name, if the run has a share, until none of its processes is left."""
        share = self._order.share
        if share is None:
            yield
            return
        config = self._config
        runs, owns_engines = config.run_folder().parent, not config.engine.urls
        run = new_claim(share, mark, runs, owns_engines=owns_engines)
        claim_name(share, run, config.launch)
        try:
            yield
        finally:
            if fault := release_name(share, run, config.launch):
                with ignore_closed_output():
                    self._console.print(fault, markup=False)

    async def _show_progress(self, data: ScreenData, screen: Screen, folder: RunFolder) -> None:
        metrics, num_restarts = FileTail(folder.path / "metrics.jsonl"), 0
        recoveries, errors = RecoveryTail(folder.path), ErrorTail(folder)
        failures = RolloutFailures(folder.logs)
        while True:
            if (place := folder.moved_to()) and data.supervisor.machine.end is None:
                data.supervisor.abort(moved_away(folder, place))
            failed = failures.new(data.sampler.last)
            for note in (*recoveries.new(), *errors.new(), *failed):
                data.supervisor.note(note)
            lines = metrics.read()
            if metrics.num_restarts > num_restarts:
                num_restarts = metrics.num_restarts
                data.progress.start_over()
            data.progress.add(line.data for line in lines)
            data.loads.read()
            screen.refresh(self._elapsed_s())
            await asyncio.sleep(REFRESH_S)

    def _sum_up(self, end: RunEnd, folder: RunFolder, sampler: TelemetrySampler) -> None:
        wall_s = round(self._elapsed_s(), 1)
        summary = folder.end(end.state, end.cause, wall_s=wall_s, peak_rss_mb=sampler.peak_rss_mb)
        if end.code == USAGE:
            raise UserError(end.reason)
        with ignore_closed_output():
            self._show(end, summary, folder)

    def _show(self, end: RunEnd, summary: dict[str, Any], folder: RunFolder) -> None:
        self._console.print(summary_table(summary))
        if folder.fault:
            self._console.print(folder.fault, markup=False)
        for line in end_lines(summary, folder):
            self._console.print(line)

    def _print(self, line: str) -> None:
        with ignore_closed_output():
            self._console.print(line, markup=False)

    def _elapsed_s(self) -> float:
        return self._clock.now_s() - self._started_s


def moved_away(folder: RunFolder, place: str) -> str:
    """Return why a run ends whose folder was moved: its processes would write to both places."""
    name = Path(place)
    where = f"--set run.folder={shlex.quote(str(name.parent))} --set run.name={name.name}"
    return f"{folder.path} was moved to {place} while it ran; nothing is lost: --resume {where}"


def end_lines(summary: dict[str, Any], folder: RunFolder) -> Iterator[Text]:
    """Yield the last lines on the terminal: the end, its cause, the files, how to resume."""
    state = RunState(summary["ended"])
    cause = summary.get("cause", "")
    yield Text(f"the run {END_TEXT[state]}{cause and f': {cause}'}", style=STATE_STYLES[state])
    if state is RunState.FAILED:
        yield Text(f"logs: {folder.logs}")
    yield Text(f"files: {folder.path}")
    if resume := summary.get("resume"):
        yield Text(f"to resume: {resume}")


START_POLL_S = 0.05
ROUTER = "router"


class ServingMesh:
    """A mesh without a trainer, for the time of an `async with` block.

        async with ServingMesh(config) as mesh:
            ... mesh.router ...          # the router's address
            await mesh.end               # why it ended, if it did by itself

    - Inside the block every process is ready, or the mesh has ended; after it none is left.
    - The first SIGINT or SIGTERM ends the mesh, which `end` reports.
    """

    def __init__(self, config: Config, resume_command: str = "", *, has_keys: bool = True) -> None:
        """`config` has been checked; an older run folder of its name is moved aside."""
        self.end: asyncio.Task[RunEnd]
        """Done when the mesh has ended, by itself or by a signal."""
        self.folder: RunFolder
        self._config = config
        self._resume_command = resume_command
        self._has_keys = has_keys
        self.keys: Path | None = None
        """The key folder of its run, if it has one."""
        self._supervisor: Supervisor
        self._end_state: RunState | None = None
        """The state of the run, once the block has been left while the mesh served."""
        self._cause = ""

    @property
    def router(self) -> str:
        """The router's address."""
        return self._supervisor.ready[ROUTER].address

    async def __aenter__(self) -> Self:
        """Start, and wait until all processes are ready or the mesh has ended."""
        config = self._config
        settings = ("--config", str(config_path(config)))
        plans = plan_serving(config, settings, router_options=("--fixed-weights",))
        if config.engine.launch == "sglang":
            plans = with_devices(plans, assign_devices(config, visible_gpus(), trains=False))
        mesh = open_mesh(plans)
        self.folder = RunFolder(config, resume_command=self._resume_command)
        setup("launch", self.folder.path, on_console=False)
        self.keys = make_run_keys(self.folder.path, plans) if self._has_keys else None
        clock = SystemClock()
        self._supervisor = Supervisor(mesh, config.launch, self.folder, clock, self.keys)
        self.end = asyncio.create_task(self._run(), name="mesh")
        async with AsyncExitStack() as undo:
            undo.push_async_callback(self.__aexit__)
            await self._wait_until_ready()
            undo.pop_all()
        return self

    async def _run(self) -> RunEnd:
        """Run the mesh with telemetry, and record its end in the folder."""
        sampler = TelemetrySampler(
            self._supervisor, self.folder, SystemClock(), self._config.launch
        )
        async with asyncio.TaskGroup() as tasks:
            following = tasks.create_task(sampler.follow(), name="sampler")
            end = await self._supervisor.run()
            following.cancel()
        self.folder.end(self._end_state or end.state, self._cause or end.cause)
        return end

    async def _wait_until_ready(self) -> None:
        """Return once all processes are ready, or the mesh has ended."""
        machine = self._supervisor.machine
        while machine.state is not MeshState.RUNNING and not self.end.done():
            await asyncio.wait([self.end], timeout=START_POLL_S)

    async def __aexit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        _: object = None,
    ) -> None:
        if not self.end.done():
            self._end_state = RunState.FAILED if kind else RunState.DONE
            self._cause = f"{kind.__name__}: {error}" if kind else ""
            self._supervisor.stop()
        await self.end
