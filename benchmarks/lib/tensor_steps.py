"""Case of the tensor benchmark: many steps of 300 MiB with different shapes, and the memory they
leave.

- Two owners, one for shared memory and one for TCP, each with a consumer: all four store, fetch and
  read at the same time, and then the step ends.
- After each step every process reports what it holds, and its resident memory is read from outside.
- A slope is the upper end of its two-sided 95 % interval, over all steps but the first tenth.
"""

import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from benchmarks.lib.process_watch import MB, memory_of
from benchmarks.lib.soak_run import Slope, slope
from benchmarks.lib.tensor_mesh import Party, TensorBench, check, fetch_of, settle
from benchmarks.lib.tensor_protocol import BatchStored, EndStepRequest, Fetched, HeldBytes, Publish

MIN_STEPS = 5
"""Fewest steps for which a slope is computed."""
JUDGED_STEPS = 100
"""Fewest steps for which the slope is significant."""
GIB = 2**30


class StepMemory(NamedTuple):
    """Measurements after one step."""

    num_bytes: int
    """Stored by each owner."""
    left_bytes: int
    """Bytes still held, by the process that holds most."""
    left_tensors: int
    rss_bytes: dict[str, int]


class Pair:
    """An owner and a consumer that run through all steps."""

    def __init__(self, bench: TensorBench, arm: str) -> None:
        self.owner, self.consumer = bench.party("owner", arm), bench.party("consumer", arm)


class Steps:
    """The pairs of shared memory and of TCP."""

    def __init__(self, bench: TensorBench) -> None:
        self._pairs = {arm: Pair(bench, arm) for arm in ("shm", "tcp")}

    @property
    def parties(self) -> Mapping[str, Party]:
        """All processes, by arm and role."""
        pairs = self._pairs.items()
        owners = {f"{arm}_owner": pair.owner for arm, pair in pairs}
        return owners | {f"{arm}_consumer": pair.consumer for arm, pair in pairs}

    def run(self, step: int) -> StepMemory:
        """Run one step; raise PartyError if other bytes arrive or something is not freed."""
        pairs = self._pairs.values()
        for pair in pairs:
            pair.owner.send(Publish("shifting", step, step))
        published = [pair.owner.receive(BatchStored) for pair in pairs]
        for pair, each in zip(pairs, published, strict=True):
            pair.consumer.send(fetch_of(each))
        for pair, each in zip(pairs, published, strict=True):
            check(pair.consumer.receive(Fetched), each, pair.consumer)
        # Consumers first: they map memory that the owners free.
        ending = [pair.consumer for pair in pairs] + [pair.owner for pair in pairs]
        held = [party.ask(EndStepRequest(step), HeldBytes) for party in ending]
        for pair in pairs:
            settle(pair.owner)
        return StepMemory(
            num_bytes=published[0].num_bytes,
            left_bytes=max(each.total_bytes for each in held),
            left_tensors=max(each.num_tensors for each in held),
            rss_bytes={name: memory_of(each.pid)[0] for name, each in self.parties.items()},
        )


def steps(bench: TensorBench) -> None:
    """Run all steps; check the shared memory left after the owners end."""
    mesh, began_s = Steps(bench), time.monotonic()
    rests = [mesh.run(step) for step in range(1, bench.num_steps + 1)]
    wall_s = time.monotonic() - began_s
    segments = {path for party in mesh.parties.values() for path in party.segments()}
    for party in mesh.parties.values():
        party.end()
    bench.note("steps", {
        "number": len(rests),
        "stored_gib": sum(each.num_bytes for each in rests) / GIB,
        "step_ms": 1e3 * wall_s / len(rests),
        "left_bytes": max(each.left_bytes for each in rests),
        "left_tensors": max(each.left_tensors for each in rests),
        "segments": len(segments),
        "segments_left": sum(each.exists() for each in segments),
    })  # fmt: skip
    slopes = {name: _slope_of(name, rests) for name in mesh.parties}
    for name, fit in slopes.items():
        bench.note(f"steps.{name}", {
            "rss_mb": rests[-1].rss_bytes[name] / MB,
            "slope_mb_per_100": fit.at,
            "slope_upper_mb_per_100": fit.high,
        })  # fmt: skip
    if len(rests) >= JUDGED_STEPS:
        worst = max(each.high for each in slopes.values())
        bench.note("steps", {"worst_slope_mb_per_100": worst})


def _slope_of(name: str, rests: Sequence[StepMemory]) -> Slope:
    first = len(rests) // 10
    hundreds = [number / 100 for number in range(first, len(rests))]
    return slope(hundreds, [each.rss_bytes[name] / MB for each in rests[first:]])
