"""Comparison of policies on a trace, and the commands that print and draw it.

    rollmesh scheduler simulate [TRACE.json] [--policy P ...] [--json] [--out FOLDER]
    rollmesh scheduler gantt JOURNAL [--out FOLDER]
    FOLDER   gantt.html  gantt.png (matplotlib)  perfetto.json (ui.perfetto.dev)
             and, of simulate, trace.json

- Every policy gets the same trace. `static` gets a partition in which no GPU is shared; `bound` is
  an upper bound that no policy can exceed.

    steps_per_h_gpu  steps of all, per hour from the first arrival to the last end, and per GPU
    utilisation      GPU seconds that rollouts and phases need at full workers, of those available
    slowdown         from arrival to end, relative to the same alone on the whole fleet; mean, worst
    jain             (sum x)^2 / (n sum x^2) over the slowdowns of a trace's pipelines; 1: all equal
    wait             from a step's demand to the first engine that serves; wait_next excludes each
                     pipeline's first step, which cannot be predicted
    evictions        sleeps of workers with running rollouts
    switch_share     GPU seconds of workers that wake or go to sleep, of all
    bound            the same steps in no less than the fleet's time for the work at full workers,
                     and than the slowest pipeline needs alone with free switches
"""

import argparse
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rollmesh.core.errors import UserError
from rollmesh.core.process import OK
from rollmesh.scheduler.planning.policies import BASELINE_POLICY, make_policy, policy_names
from rollmesh.scheduler.simulator.charts import (
    Chart,
    html_page,
    journal_chart,
    perfetto_trace,
    png_picture,
)
from rollmesh.scheduler.simulator.run import SimulatedRun, simulate_trace
from rollmesh.scheduler.simulator.trace import (
    SHAPES,
    SwitchCosts,
    Trace,
    TracePipeline,
    generate_trace,
    read_trace,
)

Bundle = tuple[int, ...]


def partition_trace(trace: Trace) -> Trace:
    """Cut a trace into fleets of equal size: each pipeline generates on its own part only.

    No GPU is in two parts, nor in a part of one pipeline while another trains on it. A part is as
    close as possible to where its pipeline trains.
    """
    share = max(1, trace.num_gpus // max(1, len(trace.pipelines)))
    taken: set[int] = set()
    parts: dict[str, list[Bundle]] = {each.pipeline_id: [] for each in trace.pipelines}
    is_growing = True
    while is_growing:
        is_growing = False
        for pipeline in trace.pipelines:
            part = parts[pipeline.pipeline_id]
            bundle = _next(trace, pipeline, taken)
            if bundle and (not part or (len(part) + 1) * pipeline.tp <= share):
                part.append(bundle)
                taken.update(bundle)
                is_growing = True
    pipelines = tuple(_narrowed(each, parts[each.pipeline_id]) for each in trace.pipelines)
    return msgspec.structs.replace(trace, pipelines=pipelines)


def _next(trace: Trace, pipeline: TracePipeline, taken: set[int]) -> Bundle:
    own = {gpu for gpus in pipeline.clusters.values() for gpu in gpus}
    others = {gpu for each in trace.pipelines for gpus in each.clusters.values() for gpu in gpus}
    excluded = taken | (others - own)
    free = [each for each in _bundles(pipeline) if excluded.isdisjoint(each)]
    home = min(own, default=0)
    return min(
        free,
        key=lambda each: (own.isdisjoint(each), each[0] < home, abs(each[0] - home)),
        default=(),
    )


def _bundles(pipeline: TracePipeline) -> list[Bundle]:
    starts = range(0, len(pipeline.generation), pipeline.tp)
    return [pipeline.generation[start : start + pipeline.tp] for start in starts]


def _narrowed(pipeline: TracePipeline, part: list[Bundle]) -> TracePipeline:
    generation = tuple(gpu for bundle in sorted(part) for gpu in bundle)
    return msgspec.structs.replace(pipeline, generation=generation or pipeline.generation)


BOUND = "bound"
FREE = SwitchCosts(sleep_s=0.0, wake_s=0.0, reprefill_s=0.0)


def compared_policies() -> tuple[str, ...]:
    """Names of all policies, the baseline first."""
    others = [name for name in reversed(policy_names()) if name != BASELINE_POLICY]
    return (BASELINE_POLICY, *others)


class TraceResult(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of a trace under one policy."""

    policy: str
    steps_per_h_gpu: float
    utilisation: float
    slowdowns: tuple[float, ...]
    waits_s: tuple[float, ...]
    next_waits_s: tuple[float, ...]
    """Without the first of each pipeline."""
    num_evictions: int
    num_resizes: int
    switch_share: float
    num_starved: int
    """Pipelines that never finished."""

    @property
    def jain(self) -> float:
        """Fairness index of the slowdowns."""
        squares = len(self.slowdowns) * sum(each * each for each in self.slowdowns)
        total = sum(self.slowdowns)
        return total * total / squares if math.isfinite(total) else 0.0


class SummaryFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one policy over several traces: means, except waits, which cover all steps."""

    steps_per_h_gpu: float
    utilisation: float
    slowdown_mean: float
    slowdown_worst: float
    jain: float
    jain_worst: float
    wait_p50_s: float
    wait_p99_s: float
    wait_next_p99_s: float
    evictions: float
    resizes: float
    switch_share: float
    starved: float


class Comparison:
    """Comparison on one trace; the references of every policy are simulated once."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self._alone_s = [_alone_s(trace, each) for each in trace.pipelines]

    def run(self, policy: str) -> SimulatedRun:
        """Simulate the policy."""
        is_static = policy == BASELINE_POLICY
        return simulate_trace(
            partition_trace(self.trace) if is_static else self.trace, make_policy(policy)
        )

    def result(self, policy: str, done: SimulatedRun) -> TraceResult:
        """Figures of a run of the policy."""
        trace, outcomes = self.trace, done.outcomes
        pairs = zip(trace.pipelines, outcomes, strict=True)
        gpu_s = trace.num_gpus * (done.ended_s - self._first_s)
        return TraceResult(
            policy=policy,
            steps_per_h_gpu=sum(each.num_steps for each in outcomes) * 3600 / gpu_s,
            utilisation=sum(trace.work_gpu_s(each, outcome.num_steps) for each, outcome in pairs)
            / gpu_s,
            slowdowns=tuple(
                math.inf
                if outcome.ended_s is None
                else (outcome.ended_s - outcome.arrival_s) / alone_s
                for outcome, alone_s in zip(outcomes, self._alone_s, strict=True)
            ),
            waits_s=tuple(wait_s for outcome in outcomes for wait_s in outcome.waits_s),
            next_waits_s=tuple(wait_s for outcome in outcomes for wait_s in outcome.waits_s[1:]),
            num_evictions=done.num_evictions,
            num_resizes=done.num_resizes,
            switch_share=done.switch_gpu_s / gpu_s,
            num_starved=sum(outcome.ended_s is None for outcome in outcomes),
        )

    def bound(self) -> float:
        """Upper bound on steps per hour and GPU."""
        trace = self.trace
        free = msgspec.structs.replace(trace, costs=FREE)
        alone_s = max(each.arrival_s + _alone_s(free, each) for each in trace.pipelines)
        work_s = sum(trace.work_gpu_s(each, each.steps) for each in trace.pipelines)
        least_s = max(alone_s - self._first_s, work_s / trace.num_gpus)
        return sum(each.steps for each in trace.pipelines) * 3600 / (least_s * trace.num_gpus)

    @property
    def _first_s(self) -> float:
        return min(each.arrival_s for each in self.trace.pipelines)


def summarise(results: Sequence[TraceResult]) -> SummaryFigures:
    """Combine the results of one policy."""
    waits_s = sorted(wait_s for each in results for wait_s in each.waits_s)
    next_s = sorted(wait_s for each in results for wait_s in each.next_waits_s)
    return SummaryFigures(
        steps_per_h_gpu=_mean([each.steps_per_h_gpu for each in results]),
        utilisation=_mean([each.utilisation for each in results]),
        slowdown_mean=_mean([_mean(each.slowdowns) for each in results]),
        slowdown_worst=max(max(each.slowdowns) for each in results),
        jain=_mean([each.jain for each in results]),
        jain_worst=min(each.jain for each in results),
        wait_p50_s=_quantile(waits_s, 0.5),
        wait_p99_s=_quantile(waits_s, 0.99),
        wait_next_p99_s=_quantile(next_s or [0.0], 0.99),
        evictions=_mean([each.num_evictions for each in results]),
        resizes=_mean([each.num_resizes for each in results]),
        switch_share=_mean([each.switch_share for each in results]),
        starved=_mean([each.num_starved for each in results]),
    )


def _alone_s(trace: Trace, pipeline: TracePipeline) -> float:
    """From arrival to end, with the whole fleet for one pipeline."""
    alone = msgspec.structs.replace(trace, pipelines=(pipeline,))
    return simulate_trace(alone, make_policy(BASELINE_POLICY)).ended_s - pipeline.arrival_s


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _quantile(values: Sequence[float], share: float) -> float:
    """Smallest of sorted values that at least this share of the values does not exceed."""
    return values[max(0, math.ceil(share * len(values)) - 1)]


FIGURE_FORMATS = {
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
"""Other figures have two digits."""


def table_lines(by_policy: Mapping[str, SummaryFigures], bound: float) -> Iterator[str]:
    """Markdown table with a column for each policy and a row for each figure."""
    yield _row(["", *by_policy, BOUND])
    yield _row(["---", *("---:" for _ in by_policy), "---:"])
    for name in SummaryFigures.__struct_fields__:
        form = FIGURE_FORMATS.get(name, "{:.2f}")
        values = [msgspec.structs.asdict(each)[name] for each in by_policy.values()]
        last = form.format(bound) if name == "steps_per_h_gpu" else ""
        yield _row([name, *(form.format(value) for value in values), last])


def _row(cells: list[str]) -> str:
    first, *others = cells
    return f"| {first:<16} | " + " | ".join(f"{each:>10}" for each in others) + " |"


def simulate(argv: Sequence[str]) -> int:
    """Compare policies on a trace."""
    options = _simulate_options(argv)
    trace = read_trace(options.trace) if options.trace else _generated(options)
    comparison = Comparison(trace)
    policies: list[str] = options.policy or list(compared_policies())
    runs = {policy: comparison.run(policy) for policy in dict.fromkeys(policies)}
    results = {policy: comparison.result(policy, done) for policy, done in runs.items()}
    by_policy = {policy: summarise([result]) for policy, result in results.items()}
    bound = comparison.bound()
    if options.json:
        _print(msgspec.json.encode(_as_json(trace, results, bound)).decode())
    else:
        _print("\n".join([trace.name, "", *table_lines(by_policy, bound)]))
    if options.out:
        charts = [_chart(trace, policy, done) for policy, done in runs.items()]
        _write(options.out, charts, trace)
    return OK


def gantt(argv: Sequence[str]) -> int:
    """Draw the history of a journal."""
    arguments = argparse.ArgumentParser(
        prog="rollmesh scheduler gantt", description="Draw the GPU use that a journal recorded."
    )
    arguments.add_argument("journal", type=Path, help="the scheduler's journal, or its folder")
    arguments.add_argument("--out", type=Path, default=Path(), metavar="FOLDER")
    options = arguments.parse_args(argv)
    _write(options.out, [journal_chart(options.journal)], None)
    return OK


def _simulate_options(argv: Sequence[str]) -> argparse.Namespace:
    arguments = argparse.ArgumentParser(
        prog="rollmesh scheduler simulate",
        description="Compare policies on a trace, in simulated time.",
    )
    add = arguments.add_argument
    add("trace", type=Path, nargs="?", metavar="TRACE.json", help="default: a generated one")
    add(
        "--policy",
        action="append",
        choices=compared_policies(),
        help="repeatable; default: all",
    )
    add("--json", action="store_true", help="the figures as one JSON object")
    add("--out", type=Path, metavar="FOLDER", help="write the charts and the trace there")
    add("--shape", choices=SHAPES, default="mixed", help="of a generated trace")
    add("--pipelines", type=int, default=4, metavar="N", help="of a generated trace")
    add("--seed", type=int, default=0, metavar="N", help="of a generated trace")
    return arguments.parse_args(argv)


def _generated(options: argparse.Namespace) -> Trace:
    shape, num = SHAPES[options.shape], options.pipelines
    least = max(1, shape.node_gpus // shape.block_gpus)
    if num < 1 or num % least:
        raise UserError(f"--pipelines {num}: use a multiple of {least}, to fill whole nodes")
    return generate_trace(shape, num, options.seed)


def _as_json(trace: Trace, results: dict[str, TraceResult], bound: float) -> dict[str, Any]:
    names = [each.pipeline_id for each in trace.pipelines]
    policies = {
        policy: msgspec.structs.asdict(summarise([result]))
        | {"slowdowns": dict(zip(names, result.slowdowns, strict=True))}
        for policy, result in results.items()
    }
    return {"trace": trace.name, "bound_steps_per_h_gpu": bound, "policies": policies}


def _chart(trace: Trace, policy: str, done: SimulatedRun) -> Chart:
    return Chart(
        title=f"{policy}: {trace.name}",
        gpus=tuple(range(trace.num_gpus)),
        spans=done.spans,
        end_s=done.ended_s,
    )


def _write(folder: Path, charts: list[Chart], trace: Trace | None) -> None:
    files = {
        "gantt.html": html_page(charts).encode(),
        "perfetto.json": perfetto_trace(charts),
    }
    if picture := png_picture(charts):
        files["gantt.png"] = picture
    else:
        _print("no gantt.png: it needs matplotlib; pip install '.[train]' in a checkout")
    if trace:
        files["trace.json"] = msgspec.json.format(msgspec.json.encode(trace), indent=1)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in files.items():
            (folder / name).write_bytes(data)
    except OSError as error:
        raise UserError(f"cannot write into {folder}: {error.strerror}") from None
    _print(f"wrote {', '.join(files)} into {folder}")


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")
