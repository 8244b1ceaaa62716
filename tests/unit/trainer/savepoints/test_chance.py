"""Random generators go on as if nothing had been."""

import random

import numpy as np
import pytest
import torch

from rollmesh.core.errors import SavepointError
from rollmesh.trainer.savepoints.chance import chance_now, restore_chance


def draw() -> list[float]:
    """From each generator; normal numbers come in pairs, so one is left over."""
    ours = [random.random(), random.gauss(0, 1)]
    numpys = [float(np.random.random()), float(np.random.standard_normal())]
    return [*ours, *numpys, *torch.rand(3).tolist(), *torch.randn(3).tolist()]


@pytest.mark.parametrize("num_before", [0, 1, 2])
def test_all_generators_draw_what_they_drew_next(num_before: int) -> None:
    for _ in range(num_before):
        draw()
    states = chance_now()
    expected = [draw() for _ in range(3)]
    assert [draw() for _ in range(3)] != expected
    restore_chance(states)
    assert [draw() for _ in range(3)] == expected


def test_to_look_changes_nothing() -> None:
    states = chance_now()
    assert chance_now() == states
    expected = draw()
    restore_chance(states)
    chance_now()
    assert draw() == expected


def test_what_is_no_state_is_refused_in_one_line() -> None:
    for data in (b"", b"junk" * 99, chance_now()[:-1]):
        with pytest.raises(SavepointError, match="no states of random generators") as caught:
            restore_chance(data)
        assert "\n" not in str(caught.value)
