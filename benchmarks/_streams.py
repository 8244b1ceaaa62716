"""The benchmark's streams: an engine's token events through bare, as they are, and through ours.

    paced       32 streams of 200 events/s, one after the other begun: CPU per event, first event
    saturated   32 streams as fast as the server takes them: events per second of its CPU

Both with events that hold their own token alone, and with cumulative ones, as SGLang sends them by
default. Invariant: bare and ours read the same bytes off the engine. Driven by interception.py.
"""

from collections.abc import Iterator, Sequence
from statistics import median

from benchmarks import _shapes as shapes
from benchmarks._arms import NUM_CONNECTIONS, Arm, Door
from benchmarks._canned import Pace
from benchmarks._corpus import STREAM_TOKENS
from benchmarks._load import Talk, percentile
from benchmarks._rounds import Bench, Run, Talks, run

EVENTS_PER_S = 200.0
STAGGER_S = STREAM_TOKENS / EVENTS_PER_S
FORMS = {"": True, "_cumulative": False}
RAW = b'{"rid":"bench","stream":true,"input_ids":[1,2,3],"sampling_params":{}}'


async def paced(bench: Bench) -> None:
    """Notes CPU per event and the time to the first event."""
    for suffix, is_incremental in FORMS.items():
        await bench.pace(Pace(is_incremental, STREAM_TOKENS, EVENTS_PER_S))
        await _paced(bench, f"paced{suffix}")


async def _paced(bench: Bench, case: str) -> None:
    arms = [bench.direct, bench.bare, bench.tokens]
    done = await _rounds(bench, arms, 3, STAGGER_S)
    for arm, runs in zip(arms, done, strict=True):
        firsts = [1e3 * first_s for each in runs for first_s in each.timings.first_events_s]
        bench.note(f"{case}.{arm.name}", {
            "cpu_us_per_event": median(cpu_us_per_event(each) for each in runs),
            "first_event_p50_ms": percentile(firsts, 50),
            "first_event_p99_ms": percentile(firsts, 99),
        })  # fmt: skip
    pairs = list(zip(done[2], done[1], strict=True))
    ratios = [cpu_us_per_event(ours) / cpu_us_per_event(bare) for ours, bare in pairs]
    over = {
        f"first_event_{which}_over_bare_ms": bench.figures[f"{case}.tokens.first_event_{which}_ms"]
        - bench.figures[f"{case}.bare.first_event_{which}_ms"]
        for which in ("p50", "p99")
    }
    bench.note(case, {"cpu_vs_bare": median(ratios), **over})


async def saturated(bench: Bench) -> None:
    """Notes events per second of the server's core."""
    for suffix, is_incremental in FORMS.items():
        await bench.pace(Pace(is_incremental, STREAM_TOKENS))
        arms = [bench.bare, bench.tokens]
        done = await _rounds(bench, arms, bench.sized(12), 0.0)
        for arm, runs in zip(arms, done, strict=True):
            per_s = median(1e6 / cpu_us_per_event(each) for each in runs)
            bench.note(f"saturated{suffix}.{arm.name}", {"events_per_core_s": per_s})


def cpu_us_per_event(done: Run) -> float:
    """The server's, per event of the engine."""
    return 1e6 * done.cpu_s / (STREAM_TOKENS * len(done.timings.calls_s))


async def _rounds(
    bench: Bench, arms: Sequence[Arm], num_streams: int, stagger_s: float
) -> list[list[Run]]:
    """So many streams on each of 32 connections; the first round is not counted."""
    runs: list[list[Run]] = [[] for _ in arms]
    for _ in range(1 + bench.sized(4)):
        for arm, done in zip(arms, runs, strict=True):
            talks = _talks(bench, arm, num_streams)
            done.append(await run(arm, NUM_CONNECTIONS, talks, stagger_s))
    return [done[1:] for done in runs]


def _talks(bench: Bench, arm: Arm, num_streams: int) -> Talks:
    """Chats, or the engine's own events where a server passes bytes on."""

    def talks(doors: list[Door]) -> Iterator[Talk]:
        for door in doors * num_streams:
            if arm in (bench.direct, bench.bare):
                yield shapes.once(shapes.post(Door(b"/generate", b"none"), RAW))
            else:
                messages = shapes.first(bench.texts)
                yield shapes.once(shapes.chat(door, messages, b'"stream":true,'))

    return talks
