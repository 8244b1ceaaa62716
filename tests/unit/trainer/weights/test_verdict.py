"""Whether scores are those of the weights that an engine was brought."""

from rollmesh.trainer.weights.events import Probe
from rollmesh.trainer.weights.verdict import mean_gap, why_not


def test_small_step_that_the_tolerance_hides_is_found_out_by_the_last_probe() -> None:
    before, now = Probe((1, 2), (-1.0,)), Probe((1, 2), (-1.01,))
    assert "version before" in why_not((-1.0,), now, before, 0.1)
    assert why_not((-1.0,), now, None, 0.1) == ""
    assert why_not((-1.0,), now, Probe((3, 4), (-1.0,)), 0.1) == ""
    assert why_not((-1.01,), now, before, 0.1) == ""
    assert "differ" in why_not((-1.2,), now, before, 0.1)
    assert "differ" in why_not((float("nan"),), now, before, 0.1)
    assert "scored 2 tokens" in why_not((-1.0, -1.0), now, before, 0.1)


def test_mean_gap_is_the_mean_of_absolute_differences() -> None:
    assert mean_gap((1.0, -1.0), (0.0, 1.0)) == 1.5
