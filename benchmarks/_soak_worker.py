"""A worker or gateway of the soak: the real verb, whose loop measures itself, with measures off.

    python -m benchmarks._soak_worker --lag FILE --ablate evict,trim worker --router ...

Invariant: nothing but the named measures differs from `rollmesh worker` and `rollmesh gateway`, and
two notes: each PROBE_S its loop notes how late it is, which costs a core some 0.3 %, and each beat
when it was sent. What a measure's absence is stands in _soak_ablations.py. Driven by _soak_mesh.py
and _soak_relay.py.
"""

import argparse
import asyncio
import sys
import time
from array import array
from functools import wraps
from pathlib import Path

import uvloop

from benchmarks._soak_ablations import ablate
from rollmesh.cli import main as cli
from rollmesh.serve.server.transport import HeartbeatThread

PROBE_S = 0.005
NUM_BUFFERED = 400
"""Figures between two writes to the file."""


class LagMeter:
    """Pairs of doubles into a file: time.monotonic, and how late the loop was then."""

    def __init__(self, loop: asyncio.AbstractEventLoop, path: Path) -> None:
        self._loop = loop
        self._file = path.open("wb", buffering=0)
        self._figures = array("d")
        self._due_s = 0.0

    def begin(self) -> None:
        """Now, on the loop."""
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
    """Have each beat's time.monotonic in a file, as doubles."""
    beat, file = HeartbeatThread._beat, path.open("wb", buffering=0)  # noqa: SLF001 - where a beat is sent

    @wraps(beat)
    def noted(beats: HeartbeatThread) -> None:
        beat(beats)
        file.write(array("d", [time.monotonic()]).tobytes())

    HeartbeatThread._beat = noted  # type: ignore[assignment, method-assign]  # noqa: SLF001 - likewise


def beats_in(lag: Path) -> Path:
    """Where the beats' times stand beside the loop's lags."""
    return lag.with_suffix(".beats")


def read_beats(lag: Path) -> "array[float]":
    """Times of beats; none of a gateway."""
    times = array("d")
    times.frombytes(beats_in(lag).read_bytes())
    return times


def read_lags(path: Path) -> tuple["array[float]", "array[float]"]:
    """Times and lags of a file."""
    figures = array("d")
    raw = path.read_bytes()
    figures.frombytes(raw[: len(raw) // 16 * 16])
    return figures[::2], figures[1::2]


def main() -> None:
    """Be that verb."""
    arguments = argparse.ArgumentParser(prog="python -m benchmarks._soak_worker")
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
