"""`rollmesh scheduler simulate` and `rollmesh scheduler gantt`.

simulate [TRACE.json] [--policy P ...] [--json] [--out FOLDER]
gantt JOURNAL [--out FOLDER]

FOLDER   gantt.html  gantt.png (matplotlib)  perfetto.json (ui.perfetto.dev)
         and, of simulate, trace.json
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from rollmesh.core.errors import UserError
from rollmesh.core.process import OK
from rollmesh.scheduler.simulator.charts import (
    Chart,
    html_page,
    journal_chart,
    perfetto_trace,
    png_picture,
)
from rollmesh.scheduler.simulator.comparison import (
    Comparison,
    TraceResult,
    compared_policies,
    summarise,
    table_lines,
)
from rollmesh.scheduler.simulator.run import SimulatedRun
from rollmesh.scheduler.simulator.trace import SHAPES, Trace, generate_trace, read_trace


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
