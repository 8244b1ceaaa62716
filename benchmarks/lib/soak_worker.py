"""A worker or gateway of the soak: the real verb, with some memory measures disabled.

    python -m benchmarks.lib.soak_worker --lag FILE --ablate evict,trim worker --router ...

    evict     a finished rollout's scope stays in the registry, with all that it holds
    discard   every request's body stays in a table of in-flight requests
    trim      the heap has the C library's layout and is never trimmed (its two halves are mallopt
              and keeper)
    dedupe    each turn holds its own copy of the history that it was asked with, images included,
              as long as its session
    spill     nothing is moved to disk

- Each function disables one measure before the process begins; rollmesh/ has no switch for it.
- Otherwise the process differs from the real verb by two records: the lag of its loop each PROBE_S
  (0.3 % of a core), and the time of each heartbeat.
"""

import argparse
import asyncio
import sys
import time
from array import array
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path

import msgspec
import uvloop

from benchmarks.lib.serving_worker import PlainEnv
from benchmarks.lib.soak_agents import AgentEnd, AgentRequest
from rollmesh.cli import main as cli
from rollmesh.core.errors import AgentFailed
from rollmesh.core.heap import Heap
from rollmesh.core.types import Task
from rollmesh.envs.env import Endpoint, Transcript
from rollmesh.runtime import blobs
from rollmesh.runtime.chat import Turn
from rollmesh.runtime.replies import Reply
from rollmesh.runtime.scopes import Scope
from rollmesh.runtime.session import Session
from rollmesh.serve.interception.request import HttpRequest
from rollmesh.serve.server.transport import HeartbeatThread

HEAP = ("mallopt", "keeper")


def keep_scopes() -> None:
    """Disable `evict`."""
    Scope.end = Scope.close  # type: ignore[method-assign]


def keep_bodies() -> None:
    """Disable `discard`."""
    read, bodies = HttpRequest.read, list[bytes]()

    @wraps(read)
    async def kept(request: HttpRequest, max_bytes: int, silence_s: float) -> bytes:
        body = await read(request, max_bytes, silence_s)
        bodies.append(body)
        return body

    HttpRequest.read = kept  # type: ignore[assignment, method-assign]


def copy_histories() -> None:
    """Disable `dedupe`."""
    attach, forget = Session.attach, Session.forget
    copies: dict[str, list[bytearray]] = {}

    @wraps(attach)
    async def copied(session: Session, turn: Turn) -> tuple[Reply, ...]:
        own = copies.setdefault(session.session_id, [])
        own += map(bytearray, (turn.messages_raw, *turn.messages))
        return await attach(session, turn)

    @wraps(forget)
    def forgotten(session: Session) -> None:
        copies.pop(session.session_id, None)
        forget(session)

    Session.attach, Session.forget = copied, forgotten  # type: ignore[assignment, method-assign]


def leave_heap() -> None:
    """Disable `mallopt`."""
    Heap.settle = lambda heap: False  # type: ignore[assignment, method-assign]


def leave_free() -> None:
    """Disable `keeper`."""
    Heap.can_trim = property(lambda heap: False)  # type: ignore[assignment, method-assign]


def leave_both() -> None:
    """Disable `trim`."""
    leave_heap()
    leave_free()


def spill_nothing() -> None:
    """Disable `spill`."""
    settle = blobs.settle

    def settled(max_memory_bytes: int, folder: Path | None) -> None:
        del max_memory_bytes
        settle(sys.maxsize, folder)

    blobs.settle = settled


MEASURES: dict[str, Callable[[], None]] = {
    "evict": keep_scopes,
    "discard": keep_bodies,
    "trim": leave_both,
    "dedupe": copy_histories,
    "spill": spill_nothing,
}
_PARTS = {"mallopt": leave_heap, "keeper": leave_free}


def ablate(names: Sequence[str]) -> None:
    """Disable these measures, or halves of one."""
    for name in names:
        (MEASURES | _PARTS)[name]()


MANY = 64
"""More threads than a pool has."""


class SoakEnv(PlainEnv):
    """`socket` is the address of the agents' process."""

    def __init__(self, *, socket: str) -> None:
        self._socket = socket
        self._is_warm = False

    async def run(self, task: Task, agent: Endpoint) -> Transcript:
        if not self._is_warm:
            # From here on the worker's pool has all its threads, so they can be counted.
            self._is_warm = True
            await asyncio.gather(*(asyncio.to_thread(time.sleep, 0.1) for _ in range(MANY)))
        request = AgentRequest(
            agent.base_url, agent.api_key, task.data["number"], task.data["num_turns"]
        )
        reader, writer = await asyncio.open_unix_connection(self._socket)
        try:
            writer.write(msgspec.json.encode(request) + b"\n")
            result = msgspec.json.decode(await reader.readline(), type=AgentEnd)
        finally:
            writer.close()
        if result.outcome != "done":
            raise AgentFailed(f"{result.outcome}: {result.error}")
        return Transcript()


PROBE_S = 0.005
NUM_BUFFERED = 400
"""Numbers buffered between two writes to the file."""


class LagMeter:
    """Write pairs of doubles to a file: time.monotonic, and the loop's lag at that time."""

    def __init__(self, loop: asyncio.AbstractEventLoop, path: Path) -> None:
        self._loop = loop
        self._file = path.open("wb", buffering=0)
        self._figures = array("d")
        self._due_s = 0.0

    def begin(self) -> None:
        """Schedule the next probe; called on the loop."""
        self._due_s = time.monotonic() + PROBE_S
        self._loop.call_later(PROBE_S, self._probe)

    def _probe(self) -> None:
        now_s = time.monotonic()
        self._figures.extend((now_s, max(0.0, now_s - self._due_s)))
        if len(self._figures) >= NUM_BUFFERED:
            self._file.write(self._figures.tobytes())
            del self._figures[:]
        self.begin()


def note_beats(path: Path) -> None:
    """Write the time.monotonic of each heartbeat to a file, as doubles."""
    beat, file = HeartbeatThread._beat, path.open("wb", buffering=0)  # noqa: SLF001 - where a beat is sent

    @wraps(beat)
    def noted(beats: HeartbeatThread) -> None:
        beat(beats)
        file.write(array("d", [time.monotonic()]).tobytes())

    HeartbeatThread._beat = noted  # type: ignore[assignment, method-assign]  # noqa: SLF001 - likewise


def beats_in(lag: Path) -> Path:
    """Return the file of the heartbeats' times, next to that of the lags."""
    return lag.with_suffix(".beats")


def read_beats(lag: Path) -> "array[float]":
    """Return the times of heartbeats; empty for a gateway."""
    times = array("d")
    times.frombytes(beats_in(lag).read_bytes())
    return times


def read_lags(path: Path) -> tuple["array[float]", "array[float]"]:
    """Return the times and lags of a file."""
    figures = array("d")
    raw = path.read_bytes()
    figures.frombytes(raw[: len(raw) // 16 * 16])
    return figures[::2], figures[1::2]


def main() -> None:
    """Run the verb with probes."""
    arguments = argparse.ArgumentParser(prog="python -m benchmarks.lib.soak_worker")
    arguments.add_argument("--lag", type=Path, required=True)
    arguments.add_argument("--ablate", default="")
    options, rest = arguments.parse_known_args()
    new_loop = uvloop.new_event_loop

    def measured() -> asyncio.AbstractEventLoop:
        loop = new_loop()
        loop.call_soon(LagMeter(loop, options.lag).begin)
        return loop

    note_beats(beats_in(options.lag))
    uvloop.new_event_loop = measured  # type: ignore[assignment]  # a loop is all that is wanted
    ablate([name for name in options.ablate.split(",") if name])
    sys.exit(cli.main(rest))


if __name__ == "__main__":
    main()
