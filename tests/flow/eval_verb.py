"""Run `rollmesh eval` as a process, in its own folder, with a model that needs no weights."""

import asyncio
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from rollmesh.serve.client.evaluation_files import RESULTS, Row
from rollmesh.testing.engine import ScriptedEngine
from rollmesh.testing.model_folder import write_model_folder
from tests.flow.worker_mesh import LOOK_S, PATIENCE_S, TURNS

START_S = 60.0
"""A small mesh imports many modules before it serves."""


class Verb:
    """An evaluation process and its folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.out = folder / "out"
        self.process: asyncio.subprocess.Process
        write_model_folder(folder / "model")
        (
            folder / "model" / "model.safetensors"
        ).touch()  # the command checks that the file exists; the engine is scripted
        (folder / "mesh.json").write_bytes(
            msgspec.json.encode(
                {"env": "echo", "env_settings": TURNS, "worker": {"num_workers": 1}}
            )
        )

    async def start(self, *args: str) -> None:
        argv = [sys.executable, "-m", "rollmesh.cli.main", "eval", "--out", str(self.out), *args]
        pipe = asyncio.subprocess.PIPE
        self.process = await asyncio.create_subprocess_exec(
            *argv, cwd=self.folder, stdout=pipe, stderr=pipe
        )

    async def ends(self) -> tuple[int, str, str]:
        """Return exit code, stdout and stderr."""
        async with asyncio.timeout(PATIENCE_S + START_S):
            out, err = await self.process.communicate()
        assert self.process.returncode is not None
        return self.process.returncode, out.decode(), err.decode()

    def mesh_args(self, engine: ScriptedEngine, num_tasks: int) -> list[str]:
        """Arguments that start a small mesh with two rollouts of each task."""
        args = ["--config", "mesh.json", "--model-dir", "model", "--engine", engine.url]
        return [*args, "-n", "2", "--num-tasks", str(num_tasks), "--json"]

    def rows(self) -> list[Row]:
        lines = (self.out / RESULTS).read_bytes().splitlines(keepends=True)
        return [msgspec.json.decode(line, type=Row) for line in lines if line.endswith(b"\n")]

    async def status(self) -> dict[str, Any]:
        """Output of `rollmesh status`."""
        process = await self._status("--json")
        out, _ = await process.communicate()
        return msgspec.json.decode(out, type=dict[str, Any])

    async def until_status(self, is_so: Callable[[dict[str, Any]], bool]) -> None:
        """Wait until the router's status satisfies `is_so`."""
        process = await self._status("--json", "--watch")
        assert process.stdout
        while line := await process.stdout.readline():
            router = msgspec.json.decode(line)["router"]
            if router and router["workers"] and is_so(router):
                break
        process.send_signal(signal.SIGINT)
        await process.communicate()

    async def _status(self, *args: str) -> asyncio.subprocess.Process:
        argv = [sys.executable, "-m", "rollmesh.cli.main", "status", str(self.out), *args]
        return await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE)

    async def until_rows(self, num_rows: int) -> list[Row]:
        """Wait until this many rows are written."""
        return await asyncio.to_thread(self._look_until_rows, num_rows)

    def _look_until_rows(self, num_rows: int) -> list[Row]:
        give_up_s = time.monotonic() + START_S
        while not (self.out / RESULTS).exists() or len(self.rows()) < num_rows:
            assert time.monotonic() < give_up_s, "no rows came"
            threading.Event().wait(LOOK_S)
        return self.rows()
