"""What is drawn: one fleet's spans over one stretch of time, and the colours of its pipelines.

Owns the chart and its colours. Invariant: a pipeline has the same colour in all charts that are
drawn together. Driven by page.py, picture.py and perfetto.py.
"""

from collections.abc import Iterable

import msgspec

from rollmesh.scheduler.simulator.spans import Span, Use

Colour = tuple[int, int, int]

COLOURS: tuple[Colour, ...] = (
    (31, 119, 180),
    (255, 127, 14),
    (44, 160, 44),
    (214, 39, 40),
    (148, 103, 189),
    (140, 86, 75),
    (227, 119, 194),
    (23, 190, 207),
    (188, 189, 34),
    (86, 86, 86),
)
"""In turns; told apart by most eyes."""
SHADES = {Use.SERVE: 1.0, Use.FIXED: 0.55, Use.WAKE: 1.0, Use.SLEEP: 1.0, Use.LOST: 0.2}
"""Of black in it: a fixed cluster is darker, what is lost nearly black."""
TINTS = {Use.SERVE: 0.0, Use.FIXED: 0.0, Use.WAKE: 0.65, Use.SLEEP: 0.65, Use.LOST: 0.0}
"""Of white: who is on its way is paler."""


class Chart(msgspec.Struct, frozen=True, kw_only=True):
    """See the module."""

    title: str
    gpus: tuple[int, ...]
    spans: list[Span]
    end_s: float
    start_s: float = 0.0


def names(charts: Iterable[Chart]) -> list[str]:
    """The pipelines in them, in an order that is theirs alone."""
    return sorted({span.pipeline_id for chart in charts for span in chart.spans})


def colour(number: int, use: Use) -> Colour:
    """Of the pipeline with that number in `names`."""
    shade, tint = SHADES[use], TINTS[use]
    red, green, blue = (
        round((part * shade) * (1 - tint) + 255 * tint) for part in COLOURS[number % len(COLOURS)]
    )
    return red, green, blue
