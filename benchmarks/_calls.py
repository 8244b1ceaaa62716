"""The benchmark's cases of plain calls: repeated, distinct, siblings, growing, and beside peers.

Each notes `<case>.<server>.{calls_per_s,cpu_us,p50_ms,p99_ms}` and the ratios to the bare proxy.
Invariant: all servers of a case get the same shape of calls in the same rounds. Driven by
interception.py.
"""

import sys
from collections.abc import Iterator
from statistics import median

from benchmarks import _shapes as shapes
from benchmarks._arms import NUM_CONNECTIONS, Door
from benchmarks._load import Talk
from benchmarks._rounds import Bench

GROUP = 16
"""Siblings of one prompt."""
NUM_TURNS = 40
PEER_CALLS = 40
"""In each of its sessions: of fewer, our own round would be over in 50 ms."""


async def repeated(bench: Bench) -> None:
    """1 KB, the same call in the same session: a sibling each time."""
    num_calls = bench.sized(320)

    def talks(doors: list[Door]) -> Iterator[Talk]:
        for door in doors:
            yield shapes.repeated(shapes.chat(door, shapes.first(bench.texts)), num_calls)

    arms = [bench.direct, bench.bare, bench.tokens, bench.relay]
    runs = await bench.compare("repeated", arms, NUM_CONNECTIONS, talks)
    pairs = zip(runs["tokens"], runs["bare"], strict=True)
    tails = [a.timings.percentile_ms(99) / b.timings.percentile_ms(99) for a, b in pairs]
    bench.note("repeated.p99_tokens_vs_bare", {"": median(tails)})


async def logprobs(bench: Bench) -> None:
    """The same with the log-probs of all tokens in the answer."""
    num_calls = bench.sized(160)

    def talks(doors: list[Door]) -> Iterator[Talk]:
        for door in doors:
            request = shapes.chat(door, shapes.first(bench.texts), b'"logprobs":true,')
            yield shapes.repeated(request, num_calls)

    await bench.compare("logprobs", [bench.bare, bench.tokens], NUM_CONNECTIONS, talks)


async def distinct(bench: Bench) -> None:
    """1 KB, a new prompt in a new session each time."""

    def talks(doors: list[Door]) -> Iterator[Talk]:
        for door in doors:
            yield shapes.once(shapes.chat(door, shapes.first(bench.texts)))

    await bench.compare("distinct", [bench.bare, bench.tokens], bench.sized(6_000), talks)


async def siblings(bench: Bench) -> None:
    """1 KB, a new session each time; sixteen have the same prompt, as a group's rollouts do."""

    def talks(doors: list[Door]) -> Iterator[Talk]:
        for at in range(0, len(doors), GROUP):
            prompt = shapes.first(bench.texts)
            for door in doors[at : at + GROUP]:
                yield shapes.once(shapes.chat(door, prompt))

    await bench.compare("siblings", [bench.bare, bench.tokens], bench.sized(8_000), talks)


async def growing(bench: Bench) -> None:
    """Conversations of 40 turns that grow to 60 KB."""

    def talks(doors: list[Door]) -> Iterator[Talk]:
        for door in doors:
            yield shapes.Conversation(door, bench.texts).turns(NUM_TURNS, shapes.GROWING_CHARS)

    arms = [bench.bare, bench.tokens, bench.relay]
    await bench.compare("growing", arms, bench.sized(4 * NUM_CONNECTIONS), talks)


async def peers(bench: Bench) -> None:
    """1 KB, repeated, as the peers that are installed do it, beside ours."""
    installed = bench.new_peers()
    if not installed:
        print("peers: none is installed; `make bench-peers` does", file=sys.stderr)
        return

    def talks(doors: list[Door]) -> Iterator[Talk]:
        for door in doors:
            yield shapes.repeated(shapes.chat(door, shapes.first(bench.texts)), PEER_CALLS)

    arms = [bench.bare, bench.tokens, *installed]
    await bench.compare("peers", arms, NUM_CONNECTIONS, talks)
    rates = {arm.name: bench.figures[f"peers.{arm.name}.calls_per_s"] for arm in arms[1:]}
    ours = rates.pop("tokens")
    bench.note("peers.tokens_vs_fastest", {"": ours / max(rates.values())})
