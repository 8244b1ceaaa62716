"""The soak's agents, in one process of their own: browsers that talk to a model over HTTP.

    python -m benchmarks._soak_agents --socket PATH --shape JSON --log FILE --ready-fd N

Whoever has an endpoint for an agent connects to the socket, says where it is (Seat), and is told in
the end how it went (Ended); hanging up ends the agent. Each TICK_S a line of the log says what
every server must hold: unique bytes of the groups that run, and bytes of bodies that are being sent
or not answered. Invariant: an agent's memory is never a worker's, and what must be held is counted
from what was sent. Driven by _soak_env.py and _soak_relay.py.
"""

import argparse
import asyncio
import contextlib
import gc
import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import msgspec
import uvloop

from benchmarks._soak_calls import CallError, Line
from benchmarks._soak_load import Browser, Pieces, Shape, Shots, num_bytes, read_events, read_reply
from rollmesh.core.process import Ready, announce, die_with_parent

TICK_S = 0.1
GIVE_WAY = 5
"""The load's niceness: on real machines agents and engines have cores of their own."""
BACKLOG = 128
PATH = "/v1/chat/completions"


class Seat(msgspec.Struct, frozen=True):
    """An agent that should begin."""

    base_url: str
    """Ends in /v1."""
    api_key: str
    task: int
    num_turns: int


class Ended(msgspec.Struct, frozen=True):
    """How an agent did."""

    how: str
    """done, crashed, or broken: it was answered as it should not be."""
    why: str = ""


class Load(msgspec.Struct):
    """What one server must hold now."""

    live_bytes: int = 0
    body_bytes: int = 0


class Told(msgspec.Struct, frozen=True):
    """A line of the log."""

    at_s: float
    """time.monotonic, which all processes share."""
    held: dict[str, Load]
    """By the server's port."""
    counts: dict[str, int]
    """turns, rollouts, done, crashed, broken, vanished: since the start."""
    turns_s: list[float]
    """How long each turn since the last line took."""


class Group:
    """Siblings; what they hold is held until the last has ended, as a group's scope has it."""

    def __init__(self) -> None:
        self.num_begun = self.num_ended = 0
        self.num_bytes = 0


class Agents:
    """All that run."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.held: dict[str, Load] = {}
        self.counts: Counter[str] = Counter()
        self.turns_s: list[float] = []
        self._shots = Shots(shape)
        self._groups: dict[tuple[str, int], Group] = {}

    async def play(self, seat: Seat) -> Ended:
        """One rollout."""
        port = seat.base_url.partition("//")[2].partition("/")[0].rpartition(":")[2]
        key = (port, seat.task)
        group = self._groups.setdefault(key, Group())
        held = self.held.setdefault(port, Load())
        browser = Browser(self.shape, self._shots, seat.task, group.num_begun)
        group.num_begun += 1
        agent = _Agent(self, held, group, browser, Line(int(port), seat.api_key))
        try:
            how = await agent.run(seat.num_turns)
            ended = Ended(how)
        except (CallError, OSError, EOFError, TimeoutError) as error:
            ended = Ended("broken", f"{type(error).__name__}: {error}")
        finally:
            agent.line.close()
            group.num_ended += 1
            if group.num_ended >= self.shape.group_size:
                held.live_bytes -= group.num_bytes
                del self._groups[key]
        self.counts["rollouts"] += 1
        self.counts[ended.how] += 1
        return ended


class _Agent:
    """One rollout's way."""

    def __init__(
        self, agents: Agents, held: Load, group: Group, browser: Browser, line: Line
    ) -> None:
        self.line = line
        self._agents = agents
        self._held = held
        self._group = group
        self._browser = browser
        self._num_counted = 0
        self._count()

    async def run(self, num_turns: int) -> str:
        """done, or crashed."""
        crash_turn = self._browser.crash_turn()
        for turn in range(1, num_turns + 1):
            is_stream = self._browser.does_stream()
            vanishes = self._browser.does_vanish()
            if turn == crash_turn:
                await self._crash()
                return "crashed"
            if vanishes:
                await self._vanish(self._browser.body(True))
            began_s = time.perf_counter()
            pieces = self._browser.body(is_stream or vanishes)
            await self._call(pieces, is_stream or vanishes, vanishes)
            self._agents.turns_s.append(time.perf_counter() - began_s)
            self._agents.counts["turns"] += 1
            self._count()
        return "done"

    async def _call(self, pieces: Pieces, is_stream: bool, is_retry: bool) -> None:
        with self._in_flight(pieces):
            await self.line.ask(PATH, pieces, is_retry=is_retry)
            if is_stream:
                said = read_events([event async for event in self.line.events()])
            else:
                said = read_reply(await self.line.plain())
        self._browser.hear(said.message, said.call_ids)

    async def _vanish(self, pieces: Pieces) -> None:
        """Ask for a stream and be gone at its first event."""
        with self._in_flight(pieces):
            await self.line.ask(PATH, pieces, is_retry=False)
            async with contextlib.aclosing(self.line.events()) as events:
                await anext(events)
        self.line.close()
        self._agents.counts["vanished"] += 1

    async def _crash(self) -> None:
        """Die: in the midst of a body, or of an answer."""
        pieces = self._browser.body(True)
        if self._browser.does_stream():
            await self._vanish(pieces)
            return
        with self._in_flight(pieces):
            await self.line.ask(PATH, pieces, is_retry=False, is_cut=True)
        self.line.close()

    @contextlib.contextmanager
    def _in_flight(self, pieces: Pieces) -> Iterator[None]:
        size = num_bytes(pieces)
        self._held.body_bytes += size
        try:
            yield
        finally:
            self._held.body_bytes -= size

    def _count(self) -> None:
        """What it has shown since the last time is held from now on."""
        new = self._browser.num_unique_bytes - self._num_counted
        self._num_counted += new
        self._group.num_bytes += new
        self._held.live_bytes += new


async def _seat(agents: Agents, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One visitor of the socket: its agent runs until it is done or the visitor has gone."""
    line = await reader.readline()
    if not line:
        writer.close()
        return
    playing = asyncio.ensure_future(agents.play(msgspec.json.decode(line, type=Seat)))
    gone = asyncio.ensure_future(reader.read(1))
    try:
        await asyncio.wait([playing, gone], return_when=asyncio.FIRST_COMPLETED)
        if playing.done():
            writer.write(msgspec.json.encode(playing.result()) + b"\n")
    finally:
        for task in (playing, gone):
            task.cancel()
        writer.close()


async def _tell(agents: Agents, log: IO[bytes]) -> None:
    while True:
        turns_s, agents.turns_s = agents.turns_s, []
        told = Told(time.monotonic(), agents.held, dict(agents.counts), turns_s)
        log.write(msgspec.json.encode(told) + b"\n")
        log.flush()
        await asyncio.sleep(TICK_S)


async def _serve(options: argparse.Namespace, log: IO[bytes]) -> None:
    agents = Agents(msgspec.json.decode(options.shape, type=Shape))
    server = await asyncio.start_unix_server(
        lambda reader, writer: _seat(agents, reader, writer), options.socket, backlog=BACKLOG
    )
    gc.freeze()
    announce(options.ready_fd, Ready("agents", os.getpid(), ""))
    async with server:
        await _tell(agents, log)


def main() -> None:
    """Serve until killed."""
    arguments = argparse.ArgumentParser(prog="python -m benchmarks._soak_agents")
    arguments.add_argument("--socket", required=True)
    arguments.add_argument("--shape", required=True)
    arguments.add_argument("--log", required=True)
    arguments.add_argument("--ready-fd", type=int)
    options = arguments.parse_args()
    die_with_parent()
    os.nice(GIVE_WAY)
    with Path(options.log).open("wb") as log:
        uvloop.run(_serve(options, log))


if __name__ == "__main__":
    main()
