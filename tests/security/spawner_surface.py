"""The spawner, for the fuzz tests."""

import asyncio
import json
import os
import re
import shutil
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.security.mutations import Mutator
from tests.security.surfaces import ANSWER_S, MAX_GROWTH_BYTES, Surface
from tests.unit.envs.test_spawner import FIRST_UID, NOBODY, NUM_UIDS, started

SLOTS = range(FIRST_UID, FIRST_UID + NUM_UIDS)


class SpawnerSurface:
    """Requests to a spawner, with a program of `id -u`, and other descriptors than it expects."""

    def __init__(self, pid: int, connection: socket.socket) -> None:
        self.pid = pid
        self.max_growth_bytes = MAX_GROWTH_BYTES
        self._connection = connection
        argv = [shutil.which("id"), "-u"]
        self._requests: list[dict[str, Any]] = [
            {"do": "run", "uid": SLOTS[0], "argv": argv, "folder": "/", "env": {"A": "b"}},
            {"do": "end", "uid": SLOTS[1]},
            {"do": "share", "uid": SLOTS[2], "folders": ["/nowhere"]},
        ]

    async def send(self, mutator: Mutator) -> None:
        is_run = mutator.rng.random() < 0.5
        request = self._requests[0 if is_run else mutator.rng.randrange(3)]
        num_descriptors = 4 if is_run else mutator.rng.choice([0, 1, 2, 2, 3, 4])
        is_file = mutator.rng.random() < 0.95
        _, printed = await self._ask(mutator.json(request), num_descriptors, is_file=is_file)
        found = re.match(rb"(?:uid=)?(\d+)", printed)
        assert found is None or int(found[1]) in SLOTS, "a program ran as another user"

    async def check(self) -> None:
        raw = json.dumps(self._requests[0]).encode()
        assert await self._ask(raw, 4) == (b"0", f"{SLOTS[0]}\n".encode())

    async def _ask(
        self, raw: bytes, num_descriptors: int, *, is_file: bool = True
    ) -> tuple[bytes, bytes]:
        """The output of the spawner and the program, once all its descriptors are closed there."""
        pipes = [os.pipe() for _ in range(3)]
        with os.fdopen(os.memfd_create("request"), "wb+") as request:
            request.write(raw)
            request.flush()
            first = request.fileno() if is_file else pipes[2][0]
            status, output = pipes[0][1], pipes[1][1]
            descriptors = [first, status, output, os.open(os.devnull, os.O_RDONLY)]
            socket.send_fds(self._connection, [b"."], descriptors[:num_descriptors])
            for each in (*descriptors[1:], *pipes[2]):
                os.close(each)

        def read(number: int) -> bytes:
            with os.fdopen(number, "rb") as file:
                return file.read()

        async with asyncio.timeout(ANSWER_S):
            readers = [asyncio.to_thread(read, reading) for reading, _ in pipes[:2]]
            written, printed = await asyncio.gather(*readers)
        return written, printed


@asynccontextmanager
async def spawner(_folder: Path, _: Mutator) -> AsyncIterator[Surface]:
    """Requests to the process that starts programs as other users, as a worker could send them."""
    if os.geteuid() != 0:
        pytest.skip("only root may become another user")
    with started(NOBODY, FIRST_UID, NUM_UIDS) as (_connection, process, ours):
        yield SpawnerSurface(process.pid, ours)
