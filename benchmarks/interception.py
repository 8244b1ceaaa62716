"""What the interception server costs, beside a bare proxy, the engine alone, and its peers.

    python -m benchmarks.interception [--only CASE,...] [--quick] [--json] [--check]

The servers have one core, the load and a canned engine the other; each case runs all its servers
in turns. `<case>.<server>.calls_per_s` is by the wall, `.cpu_us` the server's CPU per call;
`<case>.<server>_vs_bare` is the ratio of calls/s, `_vs_bare.by_cpu` the ratio by CPU, which other
work on the machine disturbs less. Servers keep no journal, as in a worker, but for the cases `kept`
and `recovered`. The shapes are in _shapes.py, the cases in _calls.py, _streams.py, _sessions.py and
_kept.py. Invariant: no goal is easier or absent under --quick; `--only` judges the goals of
the cases that it names. Driven by `make bench`.
"""

import gc
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack

import uvloop

from benchmarks import _calls, _kept, _sessions, _streams
from benchmarks._arms import pin_load
from benchmarks._rounds import Bench
from benchmarks.lib.report import Goal, parser, report

CASES: dict[str, Callable[[Bench], Awaitable[None]]] = {
    "repeated": _calls.repeated,
    "logprobs": _calls.logprobs,
    "distinct": _calls.distinct,
    "siblings": _calls.siblings,
    "growing": _calls.growing,
    "paced": _streams.paced,
    "saturated": _streams.saturated,
    "opened": _sessions.opened,
    "long": _sessions.long,
    "fifty": _sessions.fifty,
    "kept": _kept.kept,
    "recovered": _kept.recovered,
    "peers": _calls.peers,
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


async def measure(bench: Bench, cases: Sequence[str]) -> None:
    """Run the cases, one after the other."""
    gc.disable()
    for name in cases:
        await CASES[name](bench)


def judged(cases: Sequence[str], figures: dict[str, float]) -> list[Goal]:
    """The goals of these cases; those beside peers only where `make bench-peers` was run."""
    wanted = set(cases) - ({"peers"} if PEER_GOAL.figure not in figures else set())
    return [goal for goal in [*GOALS, PEER_GOAL] if _case_of(goal) in wanted]


def _case_of(goal: Goal) -> str:
    """`paced_cumulative.cpu_vs_bare` is of the case `paced`."""
    return goal.figure.partition(".")[0].partition("_")[0]


def main() -> None:
    """Measure and report."""
    options = parser("interception", CASES).parse_args()
    cases = options.only or [*CASES]
    pin_load()
    with ExitStack() as stack:
        bench = Bench(options, stack)
        uvloop.run(measure(bench, cases))
        report(options, bench.figures, judged(cases, bench.figures))


if __name__ == "__main__":
    main()
