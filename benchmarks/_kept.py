"""What it costs that sessions outlive their gateway: while they run, and when it starts again.

`kept.<shape>_<capture>_vs_unkept` is the ratio of calls/s, `.by_cpu` that of CPU, which other work
on the machine disturbs less; Invariant: both
gateways get the same talks, one right behind the other. Driven by
interception.py.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median

from benchmarks import _shapes as shapes
from benchmarks._arms import NUM_CONNECTIONS, Arm, Door
from benchmarks._load import Talk, carry
from benchmarks._rounds import Bench, Talks

NUM_TURNS = 20
NUM_SESSIONS = 1000


async def kept(bench: Bench) -> None:
    """Conversations of 20 turns that grow to 30 KB, and new prompts in new sessions."""

    def growing(doors: list[Door]) -> Iterator[Talk]:
        for door in doors:
            yield shapes.Conversation(door, bench.texts).turns(NUM_TURNS, shapes.GROWING_CHARS)

    def distinct(doors: list[Door]) -> Iterator[Talk]:
        for door in doors:
            yield shapes.once(shapes.chat(door, shapes.first(bench.texts)))

    for capture, without in ("tokens", bench.tokens), ("relay", bench.relay):
        arm = bench.new_gateway(capture, journal=capture)
        num = bench.sized(8 * NUM_CONNECTIONS)
        await _compare(bench, f"kept.growing_{capture}", [arm, without], num, growing)
        if capture == "tokens":
            await _compare(
                bench, "kept.distinct_tokens", [arm, without], bench.sized(6000), distinct
            )


async def recovered(bench: Bench) -> None:
    """A gateway that ends with 1,000 open sessions of 20 turns, and how long the next one takes."""
    empty_s = _timed(lambda: bench.new_gateway("tokens", journal="empty"))[1]
    arm = bench.new_gateway("tokens", journal="recovered")
    doors = await arm.open(bench.sized(NUM_SESSIONS))
    talks = (
        shapes.Conversation(door, bench.texts).turns(NUM_TURNS, shapes.GROWING_CHARS)
        for door in doors
    )
    await carry(arm.port, talks, NUM_CONNECTIONS)
    arm.child.end()
    size = sum(file.stat().st_size for file in bench.journal("recovered").glob("*.journal"))
    again, start_s = _timed(lambda: bench.new_gateway("tokens", journal="recovered"))
    num_calls = len(doors) * NUM_TURNS
    bench.note("recovered", {
        "num_sessions": len(doors),
        "start_s": start_s,
        "empty_start_s": empty_s,
        "us_per_call": 1e6 * (start_s - empty_s) / num_calls,
        "journal_bytes_per_call": size / num_calls,
        "rss_mb": again.child.rss_mb(),
    })  # fmt: skip
    await again.close(doors)


def _timed(start: Callable[[], Arm]) -> tuple[Arm, float]:
    begun_s = time.monotonic()
    arm = start()
    return arm, time.monotonic() - begun_s


async def _compare(
    bench: Bench, name: str, arms: Sequence[Arm], num_sessions: int, talks: Talks
) -> None:
    done = await bench.rounds(arms, num_sessions, talks)
    pairs = list(zip(*done, strict=True))
    for arm, mine in zip(("with", "without"), done, strict=True):
        bench.note(f"{name}.{arm}", {
            "calls_per_s": median(each.calls_per_s for each in mine),
            "cpu_us": median(each.cpu_us for each in mine),
            "p99_ms": median(each.timings.percentile_ms(99) for each in mine),
        })  # fmt: skip
    bench.note(f"{name}_vs_unkept", {
        "": median(a.calls_per_s / b.calls_per_s for a, b in pairs),
        "by_cpu": median(b.cpu_us / a.cpu_us for a, b in pairs),
    })  # fmt: skip
