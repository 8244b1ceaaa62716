"""The soak in relay mode: our gateway that records all, or a bare proxy that records nothing.

Owns the processes of one arm and the waves of groups that go through them. A session of ours is
opened, finished (its record is read to the end, and thrown away here) and deleted by the admin's
routes; the proxy knows no sessions. Invariant: both get the same rollouts from the same agents'
process before the same engine. Driven by rss_soak.py.
"""

import asyncio
import os
import secrets
import sys
import threading
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from benchmarks._arms import Child
from benchmarks._soak_agents import Ended, Seat
from benchmarks._soak_engine import write_folder
from benchmarks._soak_mesh import Arm, Places, Wave, sets, start_agents, start_engine
from benchmarks._soak_watch import Held, Metrics, held_by

BARE = "bare"
READ_BYTES = 2**18


class SoakRelay:
    """See the module; `with` ends all of it."""

    def __init__(self, arm: Arm, folder: Path) -> None:
        self.arm = arm
        self._places = places = Places(folder)
        self.load_log = places.load_log
        self.beat_s = 0.0
        self._token = secrets.token_urlsafe(32)
        self._task = 0
        with ExitStack() as stack:
            engine = start_engine(write_folder(folder / "model"), stack)
            agents = start_agents(places, arm.shape, stack)
            self._url = engine.ready.address
            child = self._bare() if arm.name == BARE else self._gateway(folder)
            stack.callback(child.end)
            self._address = child.ready.address
            self.judged = [arm.name]
            self.pids = {arm.name: child.ready.pid, "engine": engine.ready.pid}
            self.pids["agents"] = agents.ready.pid
            self.ports = {arm.name: child.ready.address.rpartition(":")[2]}
            self.lags = {} if arm.name == BARE else {arm.name: places.lag(arm.name)}
            url = f"{self._address}/metrics"
            self.metrics = {name: Metrics(url, self._token) for name in self.lags}
            self._stack = stack.pop_all()

    def __enter__(self) -> "SoakRelay":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _bare(self) -> Child:
        argv = [sys.executable, "-m", "benchmarks._bare", "--engine", self._url]
        return Child(argv, os.sched_getaffinity(0), env=self.arm.environ)

    def _gateway(self, folder: Path) -> Child:
        token_file = folder / "admin.token"
        token_file.touch(0o600)
        token_file.write_text(self._token)
        argv = [sys.executable, "-m", "benchmarks._soak_worker", "--lag"]
        argv += [str(self._places.lag(self.arm.name)), "--ablate", ",".join(self.arm.ablated)]
        argv += ["gateway", "--engine", self._url, "--capture", "relay", "--port", "0"]
        argv += ["--host", "127.0.0.1", "--admin-token-file", str(token_file)]
        argv += sets(self.arm.settings)
        return Child(argv, os.sched_getaffinity(0), env=self.arm.environ)

    def wave(self, num_groups: int, num_turns: int, stop: threading.Event) -> Wave:
        """So many groups, as many at a time as there are slots."""
        return asyncio.run(self._wave(num_groups, num_turns, stop))

    async def _wave(self, num_groups: int, num_turns: int, stop: threading.Event) -> Wave:
        shape, wave = self.arm.shape, Wave()
        lanes = asyncio.Semaphore(max(1, self.arm.num_workers * shape.slots // shape.group_size))
        reasons: Counter[str] = Counter()
        headers = {"Authorization": f"Bearer {self._token}"}

        async def lane(number: int) -> None:
            async with lanes:
                if stop.is_set():
                    return
                hows = await self._group(admin, number, num_turns)
            reasons.update(how for how in hows if how != "done")
            wave.num_dropped += any(how != "done" for how in hows)
            wave.num_finished += all(how == "done" for how in hows)

        session = aiohttp.ClientSession(self._address, headers=headers)
        async with session as admin, asyncio.TaskGroup() as group:
            for number in range(self._task, self._task + num_groups):
                group.create_task(lane(number))
        self._task += num_groups
        wave.reasons = dict(reasons)
        return wave

    async def _group(self, admin: aiohttp.ClientSession, number: int, num_turns: int) -> list[str]:
        """How each of its agents ended; the sessions go when all have."""
        num_siblings = self.arm.shape.group_size
        opened = [await self._open(admin) for _ in range(num_siblings)]
        seats = [Seat(o["base_url"], o["api_key"], number, num_turns) for o in opened]
        hows = await asyncio.gather(*map(self._play, seats))
        for each in opened:
            await self._close(admin, each)
        return list(hows)

    async def _play(self, seat: Seat) -> str:
        reader, writer = await asyncio.open_unix_connection(str(self._places.socket))
        writer.write(msgspec.json.encode(seat) + b"\n")
        ended = msgspec.json.decode(await reader.readline(), type=Ended)
        writer.close()
        return ended.how if ended.how != "broken" else f"broken: {ended.why[:80]}"

    async def _open(self, admin: aiohttp.ClientSession) -> dict[str, Any]:
        if self.arm.name == BARE:
            return {"base_url": f"{self._address}/v1", "api_key": "none"}
        async with admin.post("/admin/sessions", json={"metadata": {}}) as answer:
            answer.raise_for_status()
            opened: dict[str, Any] = await answer.json()
            return opened

    async def _close(self, admin: aiohttp.ClientSession, opened: dict[str, Any]) -> None:
        if self.arm.name == BARE:
            return
        path = f"/admin/sessions/{opened['session_id']}"
        async with admin.post(f"{path}/finish", json={}) as answer:
            answer.raise_for_status()
            async for _ in answer.content.iter_chunked(READ_BYTES):
                pass
        async with admin.delete(path) as answer:
            answer.raise_for_status()

    def held(self) -> dict[str, Held]:
        """Of the server."""
        return {name: held_by(self.pids[name], self.metrics.get(name)) for name in self.judged}

    def num_lost(self) -> int:
        """There are no workers here."""
        return 0
