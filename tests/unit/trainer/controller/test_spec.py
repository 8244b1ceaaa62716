"""Topology: ranks divide into groups of one head each, or are refused."""

import pytest

from rollmesh.core.errors import ConfigError
from rollmesh.trainer.controller.spec import Topology


@pytest.mark.parametrize(
    ("num_ranks", "width", "heads"), [(1, 1, [0]), (4, 1, [0, 1, 2, 3]), (6, 2, [0, 2, 4])]
)
def test_the_first_of_each_group_is_its_head(num_ranks: int, width: int, heads: list[int]) -> None:
    assert list(Topology(num_ranks, width).heads()) == heads


@pytest.mark.parametrize(("num_ranks", "width"), [(0, 1), (3, 2), (2, 0)])
def test_ranks_that_do_not_divide_are_refused(num_ranks: int, width: int) -> None:
    with pytest.raises(ConfigError, match="do not divide"):
        Topology(num_ranks, width)
