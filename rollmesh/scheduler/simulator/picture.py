"""Charts as one PNG, below each other: a row for each GPU, time to the right.

Owns the layout. Invariant: all charts have the same scale, from their own start. Driven by
command.py.
"""

from collections.abc import Sequence

from rollmesh.scheduler.simulator.chart import Chart, Colour, colour, names
from rollmesh.scheduler.simulator.pixels import Pixels, text_width
from rollmesh.scheduler.simulator.spans import Use

PLOT_WIDTH = 1400
LEFT, RIGHT, TOP, GAP, LEGEND = 64, 24, 30, 34, 46
ROWS_HEIGHT = 224
"""Of one chart, about; a row is 3 to 28 pixels high."""
INK: Colour = (40, 40, 40)
GRID: Colour = (222, 222, 222)
IDLE: Colour = (246, 246, 246)
TICKS_S = (1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 86400)
MAX_TICKS = 14
KEY = ((Use.SERVE, "engine awake"), (Use.FIXED, "trains, log-probs ..."), (Use.WAKE, "on its way"))


def picture(charts: Sequence[Chart]) -> bytes:
    """The PNG."""
    heights = [_row_height(chart) * len(chart.gpus) for chart in charts]
    height = LEGEND + sum(TOP + each + GAP for each in heights)
    pixels = Pixels(LEFT + PLOT_WIDTH + RIGHT, height)
    pipelines = names(charts)
    _legend(pixels, pipelines)
    longest_s = max(max(chart.end_s - chart.start_s for chart in charts), 1e-9)
    top = LEGEND
    for chart, rows_height in zip(charts, heights, strict=True):
        _chart(pixels, chart, pipelines, top + TOP, longest_s)
        top += TOP + rows_height + GAP
    return pixels.png()


def _row_height(chart: Chart) -> int:
    return max(3, min(28, ROWS_HEIGHT // max(1, len(chart.gpus))))


def _legend(pixels: Pixels, pipelines: list[str]) -> None:
    left = LEFT
    for number, name in enumerate(pipelines):
        pixels.box(left, 10, left + 12, 22, colour(number, Use.SERVE))
        pixels.text(left + 17, 12, name, INK)
        left += 17 + text_width(name) + 18
    left = LEFT
    for use, words in KEY:
        pixels.box(left, 29, left + 12, 41, colour(0, use))
        pixels.text(left + 17, 31, words, INK)
        left += 17 + text_width(words) + 18


def _chart(pixels: Pixels, chart: Chart, pipelines: list[str], top: int, longest_s: float) -> None:
    row = _row_height(chart)
    bottom = top + row * len(chart.gpus)
    scale = PLOT_WIDTH / longest_s
    pixels.text(LEFT, top - 14, chart.title, INK)
    pixels.box(LEFT, top, LEFT + (chart.end_s - chart.start_s) * scale, bottom, IDLE)
    _ticks(pixels, top, bottom, longest_s)
    places = {gpu: number for number, gpu in enumerate(chart.gpus)}
    numbers = {name: number for number, name in enumerate(pipelines)}
    gap = 1 if row >= 5 else 0
    for span in chart.spans:
        y = top + places[span.gpu] * row
        x = LEFT + (span.start_s - chart.start_s) * scale
        right = LEFT + (span.end_s - chart.start_s) * scale
        pixels.box(x, y, right, y + row - gap, colour(numbers[span.pipeline_id], span.use))
    every = 1 if row >= 9 else 8
    for gpu, number in places.items():
        if number % every == 0:
            pixels.text(12, top + number * row + max(0, (row - 7) // 2), f"GPU {gpu}", INK)


def _ticks(pixels: Pixels, top: int, bottom: int, longest_s: float) -> None:
    tick_s = next((each for each in TICKS_S if longest_s / each <= MAX_TICKS), TICKS_S[-1])
    for number in range(int(longest_s / tick_s) + 1):
        x = LEFT + PLOT_WIDTH * number * tick_s / longest_s
        pixels.box(x, top, x + 1, bottom + 4, GRID)
        words = _moment(number * tick_s)
        pixels.text(round(x) - text_width(words) // 2, bottom + 8, words, INK)


def _moment(at_s: int) -> str:
    if at_s % 3600 == 0 and at_s:
        return f"{at_s // 3600} h"
    return f"{at_s // 60} min" if at_s % 60 == 0 and at_s else f"{at_s} s"
