"""Colours of what is drawn."""

import itertools

from rollmesh.scheduler.simulator.chart import COLOURS, Chart, colour, names
from rollmesh.scheduler.simulator.spans import Span, Use


def _chart(*pipelines: str) -> Chart:
    spans = [Span(0, name, "engine 0", Use.SERVE, 0.0, 1.0) for name in pipelines]
    return Chart(title="x", gpus=(0,), spans=spans, end_s=1.0)


def test_a_pipeline_has_the_same_number_in_all_charts_of_a_page() -> None:
    assert names([_chart("b", "a"), _chart("c", "b")]) == ["a", "b", "c"]


def test_uses_of_a_pipeline_and_pipelines_are_told_apart() -> None:
    uses = (Use.SERVE, Use.FIXED, Use.WAKE, Use.LOST)
    seen = {colour(number, use) for number, use in itertools.product(range(len(COLOURS)), uses)}
    assert len(seen) == len(COLOURS) * len(uses)
    assert colour(0, Use.SERVE) == colour(len(COLOURS), Use.SERVE)
