"""Charts as one PNG."""

from rollmesh.scheduler.simulator.chart import Chart, colour
from rollmesh.scheduler.simulator.picture import LEFT, LEGEND, PLOT_WIDTH, TOP, picture
from rollmesh.scheduler.simulator.spans import Span, Use
from tests.unit.scheduler.simulator.test_pixels import decode


def _chart(start_s: float, end_s: float, *spans: Span) -> Chart:
    return Chart(title="x", gpus=(3, 5), spans=list(spans), start_s=start_s, end_s=end_s)


def test_a_span_is_in_its_row_from_its_start_to_its_end() -> None:
    chart = _chart(100.0, 300.0, Span(5, "a", "engine 0", Use.SERVE, 150.0, 200.0))
    _, _, rows = decode(picture([chart]))
    line = rows[LEGEND + TOP + 28 + 10]

    def at(seconds: float) -> tuple[int, ...]:
        x = round(LEFT + PLOT_WIDTH * (seconds - 100.0) / 200.0)
        return tuple(line[3 * x : 3 * x + 3])

    assert at(151.0) == at(199.0) == colour(0, Use.SERVE)
    assert colour(0, Use.SERVE) not in (at(149.0), at(201.0))
    above = rows[LEGEND + TOP + 10]
    assert bytes(colour(0, Use.SERVE)) not in {above[x : x + 3] for x in range(0, len(above), 3)}


def test_charts_have_one_scale_and_stand_below_each_other() -> None:
    span = Span(3, "a", "actor_train", Use.FIXED, 0.0, 100.0)
    _, height, rows = decode(picture([_chart(0.0, 100.0, span), _chart(0.0, 200.0, span)]))
    dark = bytes(colour(0, Use.FIXED))

    def width(line: bytes) -> int:
        return sum(line[x : x + 3] == dark for x in range(0, len(line), 3))

    drawn = [width(row) for row in rows[LEGEND:] if width(row) > 100]
    assert height > 2 * 2 * 28
    assert len(drawn) == 2 * 27
    assert set(drawn) == {PLOT_WIDTH // 2}
