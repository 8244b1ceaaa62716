"""Charts as Chrome trace events, which ui.perfetto.dev and chrome://tracing open.

Owns the mapping: a chart is a process, a GPU a thread, a span a complete event ("X"), its times in
microseconds (Trace Event Format, Google 2016). Driven by command.py.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from rollmesh.scheduler.simulator.chart import Chart


def perfetto(charts: Sequence[Chart]) -> bytes:
    """The file."""
    events = [event for number, chart in enumerate(charts, 1) for event in _events(number, chart)]
    return msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms"})


def _events(process: int, chart: Chart) -> Iterator[dict[str, Any]]:
    yield _named("process_name", process, 0, chart.title)
    for gpu in chart.gpus:
        yield _named("thread_name", process, gpu, f"GPU {gpu}")
    for span in chart.spans:
        yield {
            "ph": "X",
            "pid": process,
            "tid": span.gpu,
            "ts": round((span.start_s - chart.start_s) * 1e6),
            "dur": round((span.end_s - span.start_s) * 1e6),
            "name": f"{span.pipeline_id} {span.label}",
            "cat": span.use,
            "args": {"pipeline": span.pipeline_id, "use": span.use},
        }


def _named(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": process, "tid": thread, "name": what, "args": {"name": name}}
