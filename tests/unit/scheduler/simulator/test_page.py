"""Charts as an HTML page."""

import json
import re

from rollmesh.scheduler.simulator.chart import Chart
from rollmesh.scheduler.simulator.page import page
from rollmesh.scheduler.simulator.spans import Span, Use


def _data(html: str) -> dict[str, object]:
    found = re.search(r"^const data = (.*);$", html, re.MULTILINE)
    assert found
    said: dict[str, object] = json.loads(found[1])
    return said


def test_the_page_holds_the_spans_and_asks_nobody_for_more() -> None:
    spans = [
        Span(4, "b", "engine 1", Use.SERVE, 12.0, 15.5),
        Span(7, "a", "actor_train", Use.FIXED, 11.0, 20.0),
    ]
    html = page([Chart(title="x", gpus=(4, 7), spans=spans, start_s=10.0, end_s=20.0)])
    said = _data(html)
    assert said["pipelines"] == ["a", "b"]
    assert said["charts"] == [
        {
            "title": "x",
            "gpus": [4, 7],
            "length_s": 10.0,
            "labels": ["actor_train", "engine 1"],
            "spans": [[0, 1, 1, 1, 2.0, 5.5], [1, 0, 0, 3, 1.0, 10.0]],
        }
    ]
    assert not re.search(r"\b(src|href)\s*=|https?://|@import|fetch\(", html)


def test_no_name_ends_the_script() -> None:
    spans = [Span(0, "</script><b>", "engine 0", Use.SERVE, 0.0, 1.0)]
    html = page([Chart(title="<!--", gpus=(0,), spans=spans, end_s=1.0)])
    assert html.count("</script>") == 1
    assert _data(html)["pipelines"] == ["</script><b>"]
