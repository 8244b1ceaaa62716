"""A mesh without a trainer, for as long as a program needs it.

    async with ServingMesh(config) as mesh:
        ... mesh.router ...          # the router's address
        await mesh.end               # why it ended, if it did by itself

Invariants: inside the block every process has said that it serves, or the mesh has ended; after it
none is left. The first SIGINT or SIGTERM ends the mesh, and `end` tells it. Driven by `eval`.
"""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Self

from rollmesh.core.clock import SystemClock
from rollmesh.core.config import Config
from rollmesh.core.logs import setup
from rollmesh.core.run_state import RunState
from rollmesh.launch.folder import RunFolder, config_path
from rollmesh.launch.keys import make_run_keys
from rollmesh.launch.machine import End, MeshState
from rollmesh.launch.plan import plan_serving
from rollmesh.launch.sampler import Sampler
from rollmesh.launch.supervisor import Supervisor, open_mesh

LOOK_S = 0.05
ROUTER = "router"


class ServingMesh:
    """See the module."""

    def __init__(self, config: Config, resume_command: str = "", *, has_keys: bool = True) -> None:
        """`config` has been checked; an older run folder of its name is moved aside."""
        self.end: asyncio.Task[End]
        """Done when the mesh has ended, by itself or by a signal."""
        self.folder: RunFolder
        self._config = config
        self._resume_command = resume_command
        self._has_keys = has_keys
        self.keys: Path | None = None
        """The key folder of its run, if it has one."""
        self._supervisor: Supervisor
        self._left_as: RunState | None = None
        """The state of the run, once the program has left the block while the mesh served."""
        self._cause = ""

    @property
    def router(self) -> str:
        """The router's address."""
        return self._supervisor.ready[ROUTER].address

    async def __aenter__(self) -> Self:
        """Start, and wait until all serve or the mesh has ended."""
        config = self._config
        settings = ("--config", str(config_path(config)))
        plans = plan_serving(config, settings, router_words=("--fixed-weights",))
        mesh = open_mesh(plans)
        self.folder = RunFolder(config, resume_command=self._resume_command)
        setup("launch", self.folder.path, on_console=False)
        self.keys = make_run_keys(self.folder.path, plans) if self._has_keys else None
        clock = SystemClock()
        self._supervisor = Supervisor(mesh, config.launch, self.folder, clock, self.keys)
        self.end = asyncio.create_task(self._run(), name="mesh")
        async with AsyncExitStack() as undo:
            undo.push_async_callback(self.__aexit__)
            await self._started()
            undo.pop_all()
        return self

    async def _run(self) -> End:
        """As a run does: with its pulse for who looks at the folder, and a word at its end."""
        sampler = Sampler(self._supervisor, self.folder, SystemClock())
        async with asyncio.TaskGroup() as tasks:
            following = tasks.create_task(sampler.follow(), name="sampler")
            end = await self._supervisor.run()
            following.cancel()
        self.folder.end(self._left_as or end.state, self._cause or end.cause)
        return end

    async def _started(self) -> None:
        """Until all serve, or the mesh has ended."""
        machine = self._supervisor.machine
        while machine.state is not MeshState.RUNNING and not self.end.done():
            await asyncio.wait([self.end], timeout=LOOK_S)

    async def __aexit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        _: object = None,
    ) -> None:
        if not self.end.done():
            self._left_as = RunState.FAILED if kind else RunState.DONE
            self._cause = f"{kind.__name__}: {error}" if kind else ""
            self._supervisor.stop()
        await self.end
