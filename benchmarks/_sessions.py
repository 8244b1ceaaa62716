"""What sessions cost our gateway: memory before and after their first call, and long histories.

Each case has a gateway of its own, so that memory is that of the case. Invariant: resident memory
is read when the server is idle, after a first few calls that load what is loaded once. Driven by
interception.py.
"""

from collections.abc import Iterator, Sequence

from benchmarks import _shapes as shapes
from benchmarks._arms import NUM_CONNECTIONS, Arm, Door
from benchmarks._load import Talk, carry
from benchmarks._rounds import Bench, run

NUM_OPENED = 10_000
EARLY, LATE = 40, 400
"""Turns whose costs are compared, each by the turns around it."""
WINDOW = 16
NUM_TURNS = 50


async def opened(bench: Bench) -> None:
    """10,000 sessions, before and after one 1 KB call each."""
    arm = bench.new_gateway("tokens")

    def talks(doors: list[Door]) -> Iterator[Talk]:
        for door in doors:
            yield shapes.once(shapes.chat(door, shapes.first(bench.texts)))

    await run(arm, 2 * NUM_CONNECTIONS, talks)
    before_mb = arm.child.rss_mb()
    doors = await arm.open(NUM_OPENED)
    opened_mb = arm.child.rss_mb() - before_mb
    await carry(arm.port, talks(doors), NUM_CONNECTIONS)
    called_mb = arm.child.rss_mb() - before_mb
    await arm.close(doors)
    bench.note("opened", {
        "idle_gateway_mb": before_mb,
        "sessions_mb": opened_mb,
        "after_one_call_mb": called_mb,
    })  # fmt: skip


async def long(bench: Bench) -> None:
    """What a turn costs at 400 turns of history, and at 40."""
    arm = bench.new_gateway("tokens")
    doors = await arm.open(NUM_CONNECTIONS)
    talkers = [shapes.Conversation(door, bench.texts) for door in doors]
    await _turns(arm, talkers, EARLY - WINDOW // 2)
    early_us = await _turns(arm, talkers, WINDOW)
    await _turns(arm, talkers, LATE - EARLY - WINDOW)
    late_us = await _turns(arm, talkers, WINDOW)
    bench.note("long", {
        "turn_40_cpu_us": early_us,
        "turn_400_cpu_us": late_us,
        "turn_400_vs_40": late_us / early_us,
        "rss_mb": arm.child.rss_mb(),
    })  # fmt: skip
    await arm.close(doors)


async def _turns(arm: Arm, talkers: Sequence[shapes.Conversation], num_turns: int) -> float:
    """Go on with each conversation; the server's CPU per call in us."""
    cpu_s = arm.child.cpu_s()
    talks = [talker.turns(num_turns, shapes.SHORT_CHARS) for talker in talkers]
    await carry(arm.port, talks, NUM_CONNECTIONS)
    return 1e6 * (arm.child.cpu_s() - cpu_s) / (num_turns * len(talkers))


async def fifty(bench: Bench) -> None:
    """32 sessions of 50 turns, as miles' session server publishes them."""
    arm = bench.new_gateway("tokens")

    def talks(doors: list[Door]) -> Iterator[Talk]:
        for door in doors:
            yield shapes.Conversation(door, bench.texts).turns(NUM_TURNS, shapes.GROWING_CHARS)

    done = await run(arm, NUM_CONNECTIONS, talks)
    bench.note("fifty", {
        "turns_per_s": done.calls_per_s,
        "p50_ms": done.timings.percentile_ms(50),
        "p99_ms": done.timings.percentile_ms(99),
        "rss_mb": arm.child.rss_mb(),
    })  # fmt: skip
