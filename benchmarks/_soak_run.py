"""One arm of the soak from its start to its end, and what was seen of it.

    idle, cold -> a few groups that warm up -> counts -> waves, each with a rest -> 10 s -> counts

Invariants: idle memory and gauges are read before the first rollout of all, so that whatever is
loaded late counts against us; files and threads are compared with those after the first few, since
pools have their threads by then; a resting figure is the median of the last RESTING_S. Driven by
rss_soak.py.
"""

import itertools
import time
from array import array
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import msgspec

from benchmarks._soak_agents import Told
from benchmarks._soak_mesh import Arm, Soaked, SoakMesh
from benchmarks._soak_relay import SoakRelay
from benchmarks._soak_watch import MB, Held, Scrape, Series, Watch, peak_bytes
from benchmarks._soak_worker import read_beats, read_lags
from rollmesh.runtime.heap_trimmer import LOOK_S, MIN_INTERVAL_S

IDLE_S = 3.0
REST_S = 10.0
BETWEEN_S = 6.0
"""Kept connections to engines are closed by then."""
RESTING_S = 2.0
"""A resting figure is the median of so many last seconds."""
WARM_TURNS, WARM_GROUPS = 6, 2
"""Groups for each that runs at a time; then one of all turns, since zmq gets a thread and a context
of its own with the first long result that is sent."""
LEAD_S = MIN_INTERVAL_S + LOOK_S
"""What was to be held up to so long before a figure is still in it: a trim, which gives back what
was freed, comes no oftener; and a whole rollout of three screenshots takes hardly longer."""
MAX_RSS_BYTES = 8 * 2**30

_tolds = msgspec.json.Decoder(Told)


class Plan(msgspec.Struct, frozen=True):
    """How long an arm runs: for so many rollouts in one wave, or for so long in waves."""

    num_rollouts: int = 0
    minutes: float = 5.0
    num_waves: int = 24


class Rest(msgspec.Struct, frozen=True):
    """After a wave."""

    num_rollouts: int
    """Since the start."""
    rss_bytes: dict[str, float]
    """By judged process."""


class Seen(msgspec.Struct, kw_only=True):
    """All that is known of an arm when it is over."""

    name: str
    judged: list[str]
    ports: dict[str, str]
    series: dict[str, Series]
    peaks: dict[str, int]
    """As the kernel has them."""
    idle: dict[str, float]
    resting: dict[str, float]
    rests: list[Rest] = []
    scrapes: dict[str, list[Scrape]] = {}
    """Bytes held by what, as the process itself says, from time to time."""
    cold: dict[str, Held] = {}
    """At the first, after the small wave, and in the end."""
    before: dict[str, Held] = {}
    after: dict[str, Held] = {}
    num_missed: int = 0
    """Times that a worker did not beat for so long that one is missing, or was given up."""
    load: list[Told] = []
    lags: dict[str, tuple["array[float]", "array[float]"]] = {}
    began_s: float = 0.0
    ended_s: float = 0.0
    """When the last wave did."""
    waves: list[tuple[float, float]] = []
    """When each began and ended."""
    num_groups: int = 0
    num_dropped: int = 0
    reasons: dict[str, int] = {}
    is_stopped: bool = False
    """A process was past MAX_RSS_BYTES."""


def run_arm(arm: Arm, plan: Plan, mode: str, folder: Path) -> Seen:
    """Run it in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        soaked: SoakMesh | SoakRelay
        soaked = SoakRelay(arm, folder) if mode == "relay" else SoakMesh(arm, folder)
        stack.enter_context(soaked)
        watch = Watch(soaked.pids, soaked.metrics, MAX_RSS_BYTES)
        stack.callback(watch.close)
        return _soak(arm, plan, soaked, watch)


def _soak(arm: Arm, plan: Plan, soaked: Soaked, watch: Watch) -> Seen:
    time.sleep(IDLE_S)
    seen = Seen(
        name=arm.name,
        judged=soaked.judged,
        ports=soaked.ports,
        series=watch.series,
        scrapes=watch.scrapes,
        peaks={},
        idle=_resting(soaked, watch),
        resting={},
    )
    num_at_once = arm.num_workers * arm.shape.slots // arm.shape.group_size
    seen.cold = soaked.held()
    soaked.wave(WARM_GROUPS * num_at_once, WARM_TURNS, watch.is_over)
    soaked.wave(num_at_once, arm.shape.num_turns, watch.is_over)
    time.sleep(BETWEEN_S)
    seen.before, seen.began_s = soaked.held(), time.monotonic()
    for num_groups in _waves(arm, plan, seen):
        begun_s = time.monotonic()
        wave = soaked.wave(num_groups, arm.shape.num_turns, watch.is_over)
        seen.ended_s = time.monotonic()
        seen.waves.append((begun_s, seen.ended_s))
        seen.num_groups += num_groups
        seen.num_dropped += wave.num_dropped
        for reason, number in wave.reasons.items():
            seen.reasons[reason] = seen.reasons.get(reason, 0) + number
        if watch.is_over.is_set():
            seen.is_stopped = True
            break
        time.sleep(BETWEEN_S)
        num_rollouts = seen.num_groups * arm.shape.group_size
        seen.rests.append(Rest(num_rollouts, _resting(soaked, watch)))
        resting = max(seen.rests[-1].rss_bytes.values()) / MB
        print(f"soak: {arm.name}: {num_rollouts} rollouts, rests at {resting:.0f} MB", flush=True)
    time.sleep(max(0.0, seen.ended_s + REST_S - time.monotonic()))
    seen.resting = _resting(soaked, watch)
    seen.after, seen.num_missed = soaked.held(), soaked.num_lost() + _num_missed(soaked)
    seen.peaks = {name: peak_bytes(soaked.pids[name]) for name in soaked.judged}
    seen.load = [_tolds.decode(line) for line in soaked.load_log.read_bytes().splitlines()]
    seen.lags = {name: read_lags(path) for name, path in soaked.lags.items()}
    return seen


def _num_missed(soaked: Soaked) -> int:
    gaps = (
        after - before
        for path in soaked.lags.values()
        for before, after in itertools.pairwise(read_beats(path))
    )
    return sum(gap_s > 2 * soaked.beat_s for gap_s in gaps)


def _resting(soaked: Soaked, watch: Watch) -> dict[str, float]:
    now_s = time.monotonic()
    since_s = now_s - RESTING_S
    return {name: median(watch.series[name].between(since_s, now_s)) for name in soaked.judged}


def _waves(arm: Arm, plan: Plan, seen: Seen) -> Iterator[int]:
    """Groups of each wave; the first is small where time decides, and tells how fast it goes."""
    size = arm.shape.group_size
    if plan.num_rollouts:
        yield -(-plan.num_rollouts // size)
        return
    wave_s = 60 * plan.minutes / plan.num_waves - BETWEEN_S
    until_s = seen.began_s + 60 * plan.minutes
    num_at_once = max(1, arm.num_workers * arm.shape.slots // size)
    num_groups = 2 * num_at_once
    while (began_s := time.monotonic()) + wave_s / 2 < until_s:
        yield num_groups
        took_s = seen.ended_s - began_s
        num_groups = max(num_at_once, round(num_groups * wave_s / took_s))
