"""Rounds: the same talks through several servers, one after the other, and what that tells.

Owns the servers of one run of the benchmark and its figures. Invariant: sessions are opened before
and closed behind the clock; a ratio is between neighbours in time, and a figure the median over the
rounds, of which the first, that warms up, is not counted. Driven by interception.py.
"""

import gc
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import msgspec

from benchmarks import _shapes as shapes
from benchmarks._arms import (
    NUM_CONNECTIONS,
    Arm,
    Child,
    Door,
    start_bare,
    start_engine,
    start_gateway,
)
from benchmarks._canned import Pace
from benchmarks._corpus import Texts, model_folder
from benchmarks._load import Talk, Timings, carry
from benchmarks._peers import start_peers

Talks = Callable[[list[Door]], Iterable[Talk]]


class Run(msgspec.Struct, frozen=True):
    """What one server did in one round."""

    timings: Timings
    cpu_s: float

    @property
    def calls_per_s(self) -> float:
        return len(self.timings.calls_s) / self.timings.wall_s

    @property
    def cpu_us(self) -> float:
        """Per call."""
        return 1e6 * self.cpu_s / len(self.timings.calls_s)


class Bench:
    """The servers and the figures so far."""

    def __init__(self, options: Namespace, stack: ExitStack) -> None:
        self.is_quick: bool = options.quick
        self.figures: dict[str, float] = {}
        self.model = model_folder()
        self.texts = Texts(seed=1)
        self._stack = stack
        self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        self.engine = self._kept(start_engine(self.model))
        self.direct = Arm("direct", self.engine)
        self.bare = start_bare(self.engine)
        self._kept(self.bare.child)
        self.tokens = self.new_gateway("tokens")
        self.relay = self.new_gateway("relay")

    def new_gateway(self, capture: str, *, journal: str = "") -> Arm:
        """A gateway that has served nothing yet; its sessions outlive it in a journal, if named."""
        folder = self.journal(journal) if journal else None
        arm = start_gateway(capture, self.engine, self.model, self._folder, folder)
        self._kept(arm.child)
        return arm

    def journal(self, name: str) -> Path:
        """Where the journal of this name stands."""
        return self._folder / f"{name}.journal"

    def new_peers(self) -> list[Arm]:
        """The peers that are installed."""
        peers = []
        for peer in start_peers(self.engine, self._folder):
            self._kept(peer.child)
            peers.append(peer)
        return peers

    def sized(self, number: int) -> int:
        """So many in a full run."""
        return number // 4 if self.is_quick else number

    async def pace(self, pace: Pace) -> None:
        """How the engine's streams come from now on."""
        request = shapes.post(Door(b"/canned", b"none"), msgspec.json.encode(pace))
        await carry(self.engine.port, [shapes.once(request)], 1)

    async def rounds(self, arms: Sequence[Arm], num_sessions: int, talks: Talks) -> list[list[Run]]:
        """The runs of each server."""
        runs: list[list[Run]] = [[] for _ in arms]
        for _ in range(1 + (3 if self.is_quick else 7)):
            for arm, done in zip(arms, runs, strict=True):
                done.append(await run(arm, num_sessions, talks))
        return [done[1:] for done in runs]

    async def compare(
        self, case: str, arms: Sequence[Arm], num_sessions: int, talks: Talks
    ) -> dict[str, list[Run]]:
        """Rounds of plain calls; notes rates, CPU, tails and the ratios to bare."""
        done = await self.rounds(arms, num_sessions, talks)
        runs = {arm.name: each for arm, each in zip(arms, done, strict=True)}
        for name, mine in runs.items():
            self.note(f"{case}.{name}", {
                "calls_per_s": median(each.calls_per_s for each in mine),
                "cpu_us": median(each.cpu_us for each in mine),
                "p50_ms": median(each.timings.percentile_ms(50) for each in mine),
                "p99_ms": median(each.timings.percentile_ms(99) for each in mine),
            })  # fmt: skip
        for name in runs.keys() - {"direct", "bare"}:
            pairs = list(zip(runs[name], runs["bare"], strict=True))
            self.note(f"{case}.{name}_vs_bare", {
                "": median(a.calls_per_s / b.calls_per_s for a, b in pairs),
                "by_cpu": median(b.cpu_us / a.cpu_us for a, b in pairs),
            })  # fmt: skip
        return runs

    def note(self, what: str, figures: dict[str, float]) -> None:
        """Put down figures below a name; one named '' is the thing itself."""
        for name, value in figures.items():
            self.figures[f"{what}.{name}" if name else what] = value

    def _kept(self, child: Child) -> Child:
        self._stack.callback(child.end)
        return child


async def run(arm: Arm, num_sessions: int, talks: Talks, stagger_s: float = 0.0) -> Run:
    """One round of one server."""
    doors = await arm.open(num_sessions)
    made = list(talks(doors))
    gc.collect()
    cpu_s = arm.child.cpu_s()
    timings = await carry(arm.port, made, NUM_CONNECTIONS, stagger_s)
    cpu_s = arm.child.cpu_s() - cpu_s
    await arm.close(doors)
    return Run(timings, cpu_s)
