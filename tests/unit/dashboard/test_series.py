"""A series keeps its size and the truth about the mean."""

from rollmesh.dashboard.series import Series


def test_rows_stand_as_they_came_while_there_is_room() -> None:
    series = Series(max_rows=4)
    assert series.append({"x": 1.0}) == {"x": 1.0}
    series.append({"x": 2.0, "y": 5.0})
    assert series.rows() == [{"x": 1.0}, {"x": 2.0, "y": 5.0}]
    assert series.num_thinnings == 0


def test_a_full_series_joins_neighbours_into_means() -> None:
    series = Series(max_rows=4)
    for x in range(4):
        series.append({"x": float(x)})
    assert series.rows() == [{"x": 0.5}, {"x": 2.5}]
    assert series.num_thinnings == 1
    assert series.append({"x": 4.0}) is None
    assert series.append({"x": 5.0}) == {"x": 4.5}


def test_a_series_never_outgrows_its_bounds() -> None:
    series = Series(max_rows=8, max_names=3)
    for x in range(5000):
        series.append({"x": float(x), f"role-{x}": 1.0})
    assert len(series.rows()) < 8
    assert {name for row in series.rows() for name in row} <= {"x", "role-0", "role-1"}
    joined = [row["x"] for row in series.rows()]
    assert joined == sorted(joined)
    assert joined[-1] > 3000


def test_a_name_that_some_rows_lack_is_averaged_over_the_others() -> None:
    series = Series(max_rows=2)
    series.append({"x": 0.0})
    series.append({"x": 2.0, "y": 7.0})
    assert series.rows() == [{"x": 1.0, "y": 7.0}]
