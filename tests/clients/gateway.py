"""A `rollmesh gateway` process, and the parts of its admin API that tests need."""

import asyncio
import sys
import types
from pathlib import Path
from typing import Any, NamedTuple, Self

import aiohttp

from tests.clients.harnesses import REPO

START_S = 20.0


class Opened(NamedTuple):
    """A session, as returned by `POST /admin/sessions`."""

    session_id: str
    api_key: str
    base_url: str
    path_url: str


class Gateway:
    """`async with Gateway(token_file, engine.url, "--model-dir", folder) as gateway:`"""

    def __init__(self, token_file: Path, engine_url: str, *options: str) -> None:
        self._token_file = token_file
        self._argv = ("--engine", engine_url, *options)
        self._process: asyncio.subprocess.Process | None = None
        self._client: aiohttp.ClientSession | None = None
        self.url = ""

    async def __aenter__(self) -> Self:
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "rollmesh.cli.main", "gateway", "--port", "0"),
            *("--admin-token-file", str(self._token_file), *self._argv),
            stdout=asyncio.subprocess.PIPE,
            cwd=REPO,
        )
        try:
            async with asyncio.timeout(START_S):
                self.url = await self._announced(self._process)
        except BaseException:
            await self._end(self._process)
            raise
        token = self._token_file.read_text().strip()
        self._client = aiohttp.ClientSession(headers={"Authorization": f"Bearer {token}"})
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        if self._client is not None:
            await self._client.close()
        assert self._process is not None
        await self._end(self._process)

    async def open(self, **body: object) -> Opened:
        """Open a new session."""
        answer = await self.ask("POST", "/admin/sessions", body)
        return Opened(**{name: answer[name] for name in Opened._fields})

    async def finish(self, opened: Opened) -> Any:
        """Finish the session; return its account."""
        return await self.ask("POST", f"/admin/sessions/{opened.session_id}/finish", {})

    async def ask(self, method: str, path: str, body: object = None) -> Any:
        """Make a call of the admin API."""
        assert self._client is not None
        async with self._client.request(method, self.url + path, json=body) as response:
            answer = await response.json()
            assert response.ok, f"{method} {path}: {response.status} {answer}"
            return answer

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        if process.returncode is None:
            process.terminate()
        await process.communicate()

    async def _announced(self, process: asyncio.subprocess.Process) -> str:
        """The address in the first line of its output that has one."""
        assert process.stdout is not None
        async for line in process.stdout:
            _, found, rest = line.decode().partition("http://")
            if found:
                return f"http://{rest.split()[0].rstrip('/')}"
        raise AssertionError(f"the gateway ended: {await process.wait()}")
