"""The processes of the tensor benchmark, as the benchmark controls and measures them.

- Every lap is a step: published, taken, fetched, checked, ended; the next begins when the owner
  holds nothing of it.
- Memory is the kernel's count (VmHWM of proc(5), reset before a fetch), read from outside.
"""

import itertools
import socket
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from benchmarks.lib.process_watch import memory_of, peak_bytes
from benchmarks.lib.tensor_protocol import (
    Ask,
    BatchStored,
    EndStepRequest,
    Fetched,
    FetchRequest,
    HeldBytes,
    Look,
    Publish,
)

T = TypeVar("T")
COMPARED = ("raw", "shm", "raw_warm", "tcp", "pioneer")
"""Arms with one consumer each, in the order of their laps: ratios are between neighbours."""
SETTLE_S = 10.0
"""For at most this long an owner may hold what all consumers have released."""
POLL_S = 0.002


class PartyError(Exception):
    """Wrong or missing data, which makes the run invalid."""


class Party:
    """The process of an owner or a consumer."""

    def __init__(self, role: str, arm: str) -> None:
        self.name = f"{arm} {role}"
        mine, theirs = socket.socketpair()
        with theirs:
            argv = [sys.executable, "-m", "benchmarks.lib.tensor_process", role, arm, "--fd"]
            argv.append(str(theirs.fileno()))
            self._process = subprocess.Popen(
                argv,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        with mine:
            self._stream = mine.makefile("rwb")
        self.pid = self._process.pid

    def send(self, ask: Ask) -> None:
        """Send a request without waiting."""
        self._stream.write(msgspec.json.encode(ask) + b"\n")
        self._stream.flush()

    def receive(self, kind: type[T]) -> T:
        """Receive the answer to the oldest request."""
        line = self._stream.readline()
        if not line:
            raise PartyError(f"the {self.name} ended with code {self._process.wait()}")
        return msgspec.json.decode(line, type=kind)

    def ask(self, ask: Ask, kind: type[T]) -> T:
        """Send a request and wait for its answer."""
        self.send(ask)
        return self.receive(kind)

    def look(self) -> HeldBytes:
        """Return what the process holds."""
        return self.ask(Look(), HeldBytes)

    def reset_peak(self) -> None:
        """Set the peak to the current resident memory."""
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")

    def peak_bytes(self) -> int:
        """Peak resident memory since the last reset."""
        return peak_bytes(self.pid)

    def segments(self) -> set[Path]:
        """Shared-memory segments of rollmesh that the process has mapped."""
        maps = Path(f"/proc/{self.pid}/maps").read_text().splitlines()
        files = {line.split(maxsplit=5)[-1] for line in maps if "/rollmesh-" in line}
        return {Path(file) for file in files if not file.endswith("(deleted)")}

    def end(self) -> None:
        """Close the connection and wait for the process to exit; kill it if it does not."""
        self._stream.close()
        try:
            self._process.wait(SETTLE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class StepTimes(NamedTuple):
    """One step of one arm."""

    num_bytes: int
    publish_s: float
    publish_cpu_s: float
    fetched: Fetched
    cpu_s: float
    """CPU time of owner and consumer during the fetch."""
    peak_bytes: int
    """Peak memory of the consumer, minus its memory before the first fetch."""

    @property
    def fetch_s(self) -> float:
        return sum(self.fetched.took_s)


class TensorPair:
    """An owner and its consumer."""

    def __init__(self, owner: Party, consumer: Party, steps: "itertools.count[int]") -> None:
        self.owner = owner
        self._consumer = consumer
        self._steps = steps
        consumer.look()  # it answers once its imports are loaded
        self._idle_bytes = memory_of(consumer.pid)[0]

    def lap(self, batch: str, *, one_by_one: bool = False) -> StepTimes:
        """Transfer and free a batch; raise PartyError if other data arrives."""
        step = next(self._steps)
        published = self.owner.ask(Publish(batch, step, step), BatchStored)
        self._consumer.reset_peak()
        before = self.owner.look()
        fetched = self._consumer.ask(fetch_of(published, one_by_one=one_by_one), Fetched)
        after, most_bytes = self.owner.look(), self._consumer.peak_bytes()
        check(fetched, published, self._consumer)
        self._consumer.ask(EndStepRequest(step), HeldBytes)
        self.owner.ask(EndStepRequest(step), HeldBytes)
        settle(self.owner)
        return StepTimes(
            num_bytes=published.num_bytes,
            publish_s=published.took_s,
            publish_cpu_s=published.cpu_s,
            fetched=fetched,
            cpu_s=fetched.cpu_s + after.cpu_s - before.cpu_s,
            peak_bytes=most_bytes - self._idle_bytes,
        )


def fetch_of(published: BatchStored, *, one_by_one: bool = False) -> FetchRequest:
    """Return the request that fetches a published batch."""
    return FetchRequest(published.address, published.handles, one_by_one)


def check(fetched: Fetched, published: BatchStored, consumer: Party) -> None:
    """Raise PartyError unless every word arrived, in order."""
    if fetched.digest != published.digest:
        raise PartyError(f"the {consumer.name} has other bytes than were published")


def settle(owner: Party) -> None:
    """Wait until the owner holds nothing; raise PartyError if something remains."""
    late_s = time.monotonic() + SETTLE_S
    while not (held := owner.look()).is_empty:
        if time.monotonic() > late_s:
            raise PartyError(f"the {owner.name} still has {held}")
        time.sleep(POLL_S)


class TensorBench:
    """State shared by the cases, and the figures so far."""

    def __init__(self, options: Namespace, stack: ExitStack) -> None:
        self.is_quick: bool = options.quick
        self.num_steps: int = options.steps
        self.figures: dict[str, float] = {}
        self.steps = itertools.count(1)
        self._stack = stack
        self._arms: dict[str, TensorPair] = {}

    def party(self, role: str, arm: str) -> Party:
        """Start a process that ends with the run."""
        party = Party(role, arm)
        self._stack.callback(party.end)
        return party

    @property
    def arms(self) -> Mapping[str, TensorPair]:
        """The compared arms."""
        if not self._arms:
            for name in COMPARED:
                is_warm = name == "raw_warm"
                owner = self._arms["raw"].owner if is_warm else self.party("owner", name)
                self._arms[name] = TensorPair(owner, self.party("consumer", name), self.steps)
        return self._arms

    def rounds(self, batch: str, *, one_by_one: bool = False) -> dict[str, list[StepTimes]]:
        """Run laps, one arm after the other; the first lap of each is a warm-up."""
        num_rounds = 3 if self.is_quick else 7
        laps: dict[str, list[StepTimes]] = {name: [] for name in self.arms}
        for number in range(1 + num_rounds):
            for name, arm in self.arms.items():
                # A lap of the pioneer takes seconds, and its ratios do not depend on neighbouring
                # laps.
                if name != "pioneer" or number <= num_rounds // 3:
                    laps[name].append(arm.lap(batch, one_by_one=one_by_one))
        return laps

    def note(self, what: str, figures: Mapping[str, float]) -> None:
        """Record figures under a prefix."""
        self.figures |= {f"{what}.{name}": value for name, value in figures.items()}
