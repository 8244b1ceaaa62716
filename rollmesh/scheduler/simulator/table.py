"""A comparison as lines of text: a column for each policy, a row for each figure.

Owns how figures are written; comparison.py says what they mean. Invariant: every figure is there,
also where the default policy loses. Driven by command.py and by benchmarks/_scheduler_results.py.
"""

from collections.abc import Iterator, Mapping

import msgspec

from rollmesh.scheduler.simulator.comparison import BOUND, Figures

FORMATS = {
    "steps_per_h_gpu": "{:.3f}",
    "utilisation": "{:.1%}",
    "jain": "{:.3f}",
    "jain_worst": "{:.3f}",
    "wait_p50_s": "{:.1f}",
    "wait_p99_s": "{:.1f}",
    "wait_next_p99_s": "{:.1f}",
    "evictions": "{:.0f}",
    "resizes": "{:.0f}",
    "switch_share": "{:.1%}",
}
"""Of the others: two digits."""


def lines(by_policy: Mapping[str, Figures], bound: float) -> Iterator[str]:
    """A Markdown table."""
    yield _row(["", *by_policy, BOUND])
    yield _row(["---", *("---:" for _ in by_policy), "---:"])
    for name in Figures.__struct_fields__:
        form = FORMATS.get(name, "{:.2f}")
        values = [msgspec.structs.asdict(each)[name] for each in by_policy.values()]
        last = form.format(bound) if name == "steps_per_h_gpu" else ""
        yield _row([name, *(form.format(value) for value in values), last])


def _row(cells: list[str]) -> str:
    first, *others = cells
    return f"| {first:<16} | " + " | ".join(f"{each:>10}" for each in others) + " |"
