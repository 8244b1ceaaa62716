"""Charts as Chrome trace events."""

import json

from rollmesh.scheduler.simulator.chart import Chart
from rollmesh.scheduler.simulator.perfetto import perfetto
from rollmesh.scheduler.simulator.spans import Span, Use


def test_a_gpu_is_a_thread_and_a_span_an_event_in_microseconds() -> None:
    spans = [Span(2, "a", "engine 1", Use.WAKE, 11.5, 13.0)]
    chart = Chart(title="fair", gpus=(2,), spans=spans, start_s=10.0, end_s=20.0)
    said = json.loads(perfetto([chart, chart]))
    assert len(said["traceEvents"]) == 6
    process, thread, event = said["traceEvents"][:3]
    assert (process["ph"], process["args"]["name"]) == ("M", "fair")
    assert (thread["tid"], thread["args"]["name"]) == (2, "GPU 2")
    assert (event["ph"], event["ts"], event["dur"]) == ("X", 1_500_000, 1_500_000)
    assert (event["name"], event["cat"]) == ("a engine 1", "wake")
    assert {each["pid"] for each in said["traceEvents"]} == {1, 2}
