"""The cost of the interception server beside a bare proxy, the engine alone, and its peers.

    python -m benchmarks.interception [--only CASE,...] [--quick] [--json] [--check]

The servers have one core, the load and a canned engine the other; each case runs all its servers
in turns. `<case>.<server>.calls_per_s` is by the wall, `.cpu_us` the server's CPU per call;
`<case>.<server>_vs_bare` is the ratio of calls/s, `_vs_bare.by_cpu` the ratio by CPU, which other
work on the machine disturbs less.

    repeated, distinct, siblings, growing    plain calls
    peers        the same calls through other gateways, where `make bench-peers` has installed them
    sessions     memory of 10,000 sessions before and after their first call; long histories
    paced        32 streams of 200 events/s: CPU per event, time to the first event
    saturated    32 streams as fast as the server takes them: events per second of its CPU
    kept         a journal that lets sessions outlive their gateway, and its restart

- All servers of a case get the same shape of calls in the same rounds.
- Servers keep no journal, as in a worker, except in the cases `kept` and `recovered`.
- No goal is easier or absent under --quick; `--only` judges the goals of its cases.
"""

import gc
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack
from statistics import median

import uvloop

from benchmarks.lib import rounds
from benchmarks.lib.canned_engine import Pace
from benchmarks.lib.corpus import STREAM_TOKENS
from benchmarks.lib.http_load import Talk, carry, percentile
from benchmarks.lib.report import Goal, parser, report
from benchmarks.lib.rounds import Run, ServerBench, Talks, run
from benchmarks.lib.servers import NUM_CONNECTIONS, ChatServer, SessionEndpoint, pin_load

GROUP = 16
"""Number of siblings that share a prompt."""
NUM_TURNS = 40
PEER_CALLS = 40
"""Number of sessions; with fewer, a round of our gateway would end within 50 ms."""


async def repeated(bench: ServerBench) -> None:
    """1 KB, the same call in the same session, so that each is a sibling of the last."""
    num_calls = bench.sized(320)

    def talks(endpoints: list[SessionEndpoint]) -> Iterator[Talk]:
        for endpoint in endpoints:
            yield rounds.repeated(rounds.chat(endpoint, rounds.first(bench.texts)), num_calls)

    arms = [bench.direct, bench.bare, bench.tokens, bench.relay]
    runs = await bench.compare("repeated", arms, NUM_CONNECTIONS, talks)
    pairs = zip(runs["tokens"], runs["bare"], strict=True)
    tails = [a.timings.percentile_ms(99) / b.timings.percentile_ms(99) for a, b in pairs]
    bench.note("repeated.p99_tokens_vs_bare", {"": median(tails)})


async def logprobs(bench: ServerBench) -> None:
    """Calls as in `repeated`, with the log-probs of all tokens in the answer."""
    num_calls = bench.sized(160)

    def talks(endpoints: list[SessionEndpoint]) -> Iterator[Talk]:
        for endpoint in endpoints:
            request = rounds.chat(endpoint, rounds.first(bench.texts), b'"logprobs":true,')
            yield rounds.repeated(request, num_calls)

    await bench.compare("logprobs", [bench.bare, bench.tokens], NUM_CONNECTIONS, talks)


async def distinct(bench: ServerBench) -> None:
    """1 KB, a new prompt in a new session for each call."""

    def talks(endpoints: list[SessionEndpoint]) -> Iterator[Talk]:
        for endpoint in endpoints:
            yield rounds.once(rounds.chat(endpoint, rounds.first(bench.texts)))

    await bench.compare("distinct", [bench.bare, bench.tokens], bench.sized(6_000), talks)


async def siblings(bench: ServerBench) -> None:
    """1 KB, a new session for each call; sixteen share a prompt, as a group's rollouts do."""

    def talks(endpoints: list[SessionEndpoint]) -> Iterator[Talk]:
        for at in range(0, len(endpoints), GROUP):
            prompt = rounds.first(bench.texts)
            for endpoint in endpoints[at : at + GROUP]:
                yield rounds.once(rounds.chat(endpoint, prompt))

    await bench.compare("siblings", [bench.bare, bench.tokens], bench.sized(8_000), talks)


async def growing(bench: ServerBench) -> None:
    """Conversations of 40 turns that grow to 60 KB."""

    def talks(endpoints: list[SessionEndpoint]) -> Iterator[Talk]:
        for endpoint in endpoints:
            yield rounds.GrowingChat(endpoint, bench.texts).turns(NUM_TURNS, rounds.GROWING_CHARS)

    arms = [bench.bare, bench.tokens, bench.relay]
    await bench.compare("growing", arms, bench.sized(4 * NUM_CONNECTIONS), talks)


async def peers(bench: ServerBench) -> None:
    """1 KB, repeated, through our gateway and the installed peers."""
    installed = bench.new_peers()
    if not installed:
        print("peers: none is installed; `make bench-peers` does", file=sys.stderr)
        return

    def talks(endpoints: list[SessionEndpoint]) -> Iterator[Talk]:
        for endpoint in endpoints:
            yield rounds.repeated(rounds.chat(endpoint, rounds.first(bench.texts)), PEER_CALLS)

    arms = [bench.bare, bench.tokens, *installed]
    await bench.compare("peers", arms, NUM_CONNECTIONS, talks)
    rates = {arm.name: bench.figures[f"peers.{arm.name}.calls_per_s"] for arm in arms[1:]}
    ours = rates.pop("tokens")
    bench.note("peers.tokens_vs_fastest", {"": ours / max(rates.values())})


NUM_OPENED = 10_000
EARLY, LATE = 40, 400
"""Turns whose costs are compared, each with the turns around it."""
WINDOW = 16
NUM_HISTORY_TURNS = 50


async def opened(bench: ServerBench) -> None:
    """10,000 sessions, before and after one 1 KB call each."""
    arm = bench.new_gateway("tokens")

    def talks(endpoints: list[SessionEndpoint]) -> Iterator[Talk]:
        for endpoint in endpoints:
            yield rounds.once(rounds.chat(endpoint, rounds.first(bench.texts)))

    await run(arm, 2 * NUM_CONNECTIONS, talks)
    before_mb = arm.child.rss_mb()
    endpoints = await arm.open(NUM_OPENED)
    opened_mb = arm.child.rss_mb() - before_mb
    await carry(arm.port, talks(endpoints), NUM_CONNECTIONS)
    called_mb = arm.child.rss_mb() - before_mb
    await arm.close(endpoints)
    bench.note("opened", {
        "idle_gateway_mb": before_mb,
        "sessions_mb": opened_mb,
        "after_one_call_mb": called_mb,
    })  # fmt: skip


async def long(bench: ServerBench) -> None:
    """Compare the cost of a turn after 400 turns of history with one after 40."""
    arm = bench.new_gateway("tokens")
    endpoints = await arm.open(NUM_CONNECTIONS)
    talkers = [rounds.GrowingChat(endpoint, bench.texts) for endpoint in endpoints]
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
    await arm.close(endpoints)


async def _turns(arm: ChatServer, talkers: Sequence[rounds.GrowingChat], num_turns: int) -> float:
    """Continue each conversation; return the server's CPU per call in us."""
    cpu_s = arm.child.cpu_s()
    talks = [talker.turns(num_turns, rounds.SHORT_CHARS) for talker in talkers]
    await carry(arm.port, talks, NUM_CONNECTIONS)
    return 1e6 * (arm.child.cpu_s() - cpu_s) / (num_turns * len(talkers))


async def fifty(bench: ServerBench) -> None:
    """32 sessions of 50 turns, the workload that miles published for its session server."""
    arm = bench.new_gateway("tokens")

    def talks(endpoints: list[SessionEndpoint]) -> Iterator[Talk]:
        for endpoint in endpoints:
            yield rounds.GrowingChat(endpoint, bench.texts).turns(
                NUM_HISTORY_TURNS, rounds.GROWING_CHARS
            )

    done = await run(arm, NUM_CONNECTIONS, talks)
    bench.note("fifty", {
        "turns_per_s": done.calls_per_s,
        "p50_ms": done.timings.percentile_ms(50),
        "p99_ms": done.timings.percentile_ms(99),
        "rss_mb": arm.child.rss_mb(),
    })  # fmt: skip


EVENTS_PER_S = 200.0
STAGGER_S = STREAM_TOKENS / EVENTS_PER_S
FORMS = {"": True, "_cumulative": False}
RAW = b'{"rid":"bench","stream":true,"input_ids":[1,2,3],"sampling_params":{}}'


async def paced(bench: ServerBench) -> None:
    """Measure CPU per event and the time to the first event."""
    for suffix, is_incremental in FORMS.items():
        await bench.pace(Pace(is_incremental, STREAM_TOKENS, EVENTS_PER_S))
        await _paced(bench, f"paced{suffix}")


async def _paced(bench: ServerBench, case: str) -> None:
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


async def saturated(bench: ServerBench) -> None:
    """Measure events per second of the server's core."""
    for suffix, is_incremental in FORMS.items():
        await bench.pace(Pace(is_incremental, STREAM_TOKENS))
        arms = [bench.bare, bench.tokens]
        done = await _rounds(bench, arms, bench.sized(12), 0.0)
        for arm, runs in zip(arms, done, strict=True):
            per_s = median(1e6 / cpu_us_per_event(each) for each in runs)
            bench.note(f"saturated{suffix}.{arm.name}", {"events_per_core_s": per_s})


def cpu_us_per_event(done: Run) -> float:
    """The server's CPU per event of the engine."""
    return 1e6 * done.cpu_s / (STREAM_TOKENS * len(done.timings.calls_s))


async def _rounds(
    bench: ServerBench, arms: Sequence[ChatServer], num_streams: int, stagger_s: float
) -> list[list[Run]]:
    """Run rounds with `num_streams` streams on each of 32 connections; the first is not counted."""
    runs: list[list[Run]] = [[] for _ in arms]
    for _ in range(1 + bench.sized(4)):
        for arm, done in zip(arms, runs, strict=True):
            talks = _talks(bench, arm, num_streams)
            done.append(await run(arm, NUM_CONNECTIONS, talks, stagger_s))
    return [done[1:] for done in runs]


def _talks(bench: ServerBench, arm: ChatServer, num_streams: int) -> Talks:
    """Open chats, or the engine's own event streams where a server only forwards bytes."""

    def talks(endpoints: list[SessionEndpoint]) -> Iterator[Talk]:
        for endpoint in endpoints * num_streams:
            if arm in (bench.direct, bench.bare):
                yield rounds.once(rounds.post(SessionEndpoint(b"/generate", b"none"), RAW))
            else:
                messages = rounds.first(bench.texts)
                yield rounds.once(rounds.chat(endpoint, messages, b'"stream":true,'))

    return talks


NUM_KEPT_TURNS = 20
NUM_SESSIONS = 1000


async def kept(bench: ServerBench) -> None:
    """Conversations of 20 turns that grow to 30 KB, and new prompts in new sessions, with a
    journal.
    """

    def growing(endpoints: list[SessionEndpoint]) -> Iterator[Talk]:
        for endpoint in endpoints:
            yield rounds.GrowingChat(endpoint, bench.texts).turns(
                NUM_KEPT_TURNS, rounds.GROWING_CHARS
            )

    def distinct(endpoints: list[SessionEndpoint]) -> Iterator[Talk]:
        for endpoint in endpoints:
            yield rounds.once(rounds.chat(endpoint, rounds.first(bench.texts)))

    for capture, without in ("tokens", bench.tokens), ("relay", bench.relay):
        arm = bench.new_gateway(capture, journal=capture)
        num = bench.sized(8 * NUM_CONNECTIONS)
        await _compare(bench, f"kept.growing_{capture}", [arm, without], num, growing)
        if capture == "tokens":
            await _compare(
                bench, "kept.distinct_tokens", [arm, without], bench.sized(6000), distinct
            )


async def recovered(bench: ServerBench) -> None:
    """End a gateway with 1,000 open sessions of 20 turns; time the start of its successor."""
    empty_s = _timed(lambda: bench.new_gateway("tokens", journal="empty"))[1]
    arm = bench.new_gateway("tokens", journal="recovered")
    endpoints = await arm.open(bench.sized(NUM_SESSIONS))
    talks = (
        rounds.GrowingChat(endpoint, bench.texts).turns(NUM_KEPT_TURNS, rounds.GROWING_CHARS)
        for endpoint in endpoints
    )
    await carry(arm.port, talks, NUM_CONNECTIONS)
    arm.child.end()
    size = sum(file.stat().st_size for file in bench.journal("recovered").glob("*.journal"))
    again, start_s = _timed(lambda: bench.new_gateway("tokens", journal="recovered"))
    num_calls = len(endpoints) * NUM_KEPT_TURNS
    bench.note("recovered", {
        "num_sessions": len(endpoints),
        "start_s": start_s,
        "empty_start_s": empty_s,
        "us_per_call": 1e6 * (start_s - empty_s) / num_calls,
        "journal_bytes_per_call": size / num_calls,
        "rss_mb": again.child.rss_mb(),
    })  # fmt: skip
    await again.close(endpoints)


def _timed(start: Callable[[], ChatServer]) -> tuple[ChatServer, float]:
    begun_s = time.monotonic()
    arm = start()
    return arm, time.monotonic() - begun_s


async def _compare(
    bench: ServerBench, name: str, arms: Sequence[ChatServer], num_sessions: int, talks: Talks
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


CASES: dict[str, Callable[[ServerBench], Awaitable[None]]] = {
    "repeated": repeated,
    "logprobs": logprobs,
    "distinct": distinct,
    "siblings": siblings,
    "growing": growing,
    "paced": paced,
    "saturated": saturated,
    "opened": opened,
    "long": long,
    "fifty": fifty,
    "kept": kept,
    "recovered": recovered,
    "peers": peers,
}

GOALS = [
    Goal("repeated.tokens_vs_bare", ">=", 1.0),
    Goal("repeated.p99_tokens_vs_bare", "<=", 1.0),
    Goal("distinct.tokens_vs_bare", ">=", 0.4),
    Goal("siblings.tokens_vs_bare", ">=", 0.9),
    Goal("growing.tokens_vs_bare", ">=", 0.35),
    Goal("repeated.relay_vs_bare", ">=", 1.5),
    Goal("growing.relay_vs_bare.by_cpu", ">=", 0.9),
    Goal("paced.cpu_vs_bare", "<=", 2.0),
    Goal("paced.first_event_p50_over_bare_ms", "<=", 0.5),
    Goal("paced.first_event_p99_over_bare_ms", "<=", 5.0),
    Goal("paced_cumulative.cpu_vs_bare", "<=", 2.0),
    Goal("saturated.tokens.events_per_core_s", ">=", 14_000.0),
    Goal("saturated_cumulative.tokens.events_per_core_s", ">=", 14_000.0),
    Goal("opened.sessions_mb", "<=", 60.0),
    Goal("opened.after_one_call_mb", "<=", 120.0),
    Goal("long.turn_400_vs_40", "<=", 3.0),
    Goal("kept.growing_tokens_vs_unkept", ">=", 0.9),
    Goal("kept.growing_relay_vs_unkept", ">=", 0.9),
    Goal("kept.distinct_tokens_vs_unkept", ">=", 0.9),
    Goal("recovered.us_per_call", "<=", 500.0),
]
PEER_GOAL = Goal("peers.tokens_vs_fastest", ">=", 15.0)


async def measure(bench: ServerBench, cases: Sequence[str]) -> None:
    """Run the cases, one after the other."""
    gc.disable()
    for name in cases:
        await CASES[name](bench)


def judged(cases: Sequence[str], figures: dict[str, float]) -> list[Goal]:
    """Return the goals of these cases; goals against peers only if peers are installed."""
    wanted = set(cases) - ({"peers"} if PEER_GOAL.figure not in figures else set())
    return [goal for goal in [*GOALS, PEER_GOAL] if _case_of(goal) in wanted]


def _case_of(goal: Goal) -> str:
    """Return the case of a goal; `paced_cumulative.cpu_vs_bare` belongs to `paced`."""
    return goal.figure.partition(".")[0].partition("_")[0]


def main() -> None:
    """Measure and report."""
    options = parser("interception", CASES).parse_args()
    cases = options.only or [*CASES]
    pin_load()
    with ExitStack() as stack:
        bench = ServerBench(options, stack)
        uvloop.run(measure(bench, cases))
        report(options, bench.figures, judged(cases, bench.figures))


if __name__ == "__main__":
    main()
