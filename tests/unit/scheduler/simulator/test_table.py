"""The table of a comparison."""

import msgspec

from rollmesh.scheduler.simulator.comparison import Figures
from rollmesh.scheduler.simulator.table import lines


def test_every_figure_has_a_row_and_every_policy_a_column() -> None:
    values = dict.fromkeys(Figures.__struct_fields__, 0.5)
    figures = Figures(**values)
    other = msgspec.structs.replace(figures, wait_p99_s=20.0)
    rows = list(lines({"static": figures, "fair": other}, 0.75))
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert cells[0] == ["", "static", "fair", "bound"]
    assert [row[0] for row in cells[2:]] == list(Figures.__struct_fields__)
    by_name = {row[0]: row[1:] for row in cells}
    assert by_name["steps_per_h_gpu"] == ["0.500", "0.500", "0.750"]
    assert by_name["utilisation"] == ["50.0%", "50.0%", ""]
    assert by_name["wait_p99_s"] == ["0.5", "20.0", ""]
