"""Charts as one HTML page that needs nothing else: zoom by wheel, move by drag, read by pointing.

Owns what is put into gantt.html, its template. Invariant: nothing in a name can end the script that
it is put into. Driven by command.py.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from rollmesh.scheduler.simulator.chart import Chart, colour, names
from rollmesh.scheduler.simulator.spans import Use

TEMPLATE = Path(__file__).with_name("gantt.html")
MARK = "/* charts */ null"


def page(charts: Sequence[Chart]) -> str:
    """The page."""
    pipelines = names(charts)
    numbers = {name: number for number, name in enumerate(pipelines)}
    uses = list(Use)
    colours = {use: [_css(colour(number, use)) for number in numbers.values()] for use in uses}
    said = {
        "pipelines": pipelines,
        "uses": uses,
        "colours": colours,
        "charts": [_chart(chart, numbers, uses) for chart in charts],
    }
    # JSON may hold `</script>` in a string; with its `<` escaped it is the same JSON, and no tag.
    data = msgspec.json.encode(said).decode().replace("<", "\\u003c")
    return TEMPLATE.read_text(encoding="ascii").replace(MARK, data)


def _chart(chart: Chart, numbers: dict[str, int], uses: list[Use]) -> dict[str, Any]:
    places = {gpu: number for number, gpu in enumerate(chart.gpus)}
    labels = sorted({span.label for span in chart.spans})
    label_of = {label: number for number, label in enumerate(labels)}
    return {
        "title": chart.title,
        "gpus": chart.gpus,
        "length_s": chart.end_s - chart.start_s,
        "labels": labels,
        "spans": [
            (
                places[span.gpu],
                numbers[span.pipeline_id],
                label_of[span.label],
                uses.index(span.use),
                round(span.start_s - chart.start_s, 3),
                round(span.end_s - chart.start_s, 3),
            )
            for span in chart.spans
        ],
    }


def _css(parts: tuple[int, int, int]) -> str:
    return "#" + "".join(f"{part:02x}" for part in parts)
