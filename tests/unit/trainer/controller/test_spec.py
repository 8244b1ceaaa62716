"""Topology: ranks divide into groups of one head each, or are refused. Each rank has a device."""

import pytest

from rollmesh.core.errors import ConfigError
from rollmesh.trainer.controller.spec import Topology, rank_device


@pytest.mark.parametrize(
    ("num_ranks", "width", "heads"), [(1, 1, [0]), (4, 1, [0, 1, 2, 3]), (6, 2, [0, 2, 4])]
)
def test_the_first_of_each_group_is_its_head(num_ranks: int, width: int, heads: list[int]) -> None:
    assert list(Topology(num_ranks, width).heads()) == heads


@pytest.mark.parametrize(("num_ranks", "width"), [(0, 1), (3, 2), (2, 0)])
def test_ranks_that_do_not_divide_are_refused(num_ranks: int, width: int) -> None:
    with pytest.raises(ConfigError, match="do not divide"):
        Topology(num_ranks, width)


@pytest.mark.parametrize(
    ("device", "local_rank", "num_visible", "num_sharing", "expected"),
    [
        ("cpu", 3, 0, 4, "cpu"),
        ("cpu", 3, 8, 4, "cpu"),
        ("cuda", 0, 1, 1, "cuda:0"),
        ("cuda", 3, 8, 4, "cuda:3"),
        ("cuda", 3, 1, 1, "cuda:0"),  # the scheduler lets each process see its own
        ("cuda", 3, 8, 1, "cuda:3"),
        ("cuda:1", 0, 2, 1, "cuda:1"),
    ],
)
def test_each_rank_of_a_host_has_a_device_of_its_own(
    device: str, local_rank: int, num_visible: int, num_sharing: int, expected: str
) -> None:
    assert rank_device(device, local_rank, num_visible, num_sharing) == expected


@pytest.mark.parametrize(
    ("device", "local_rank", "num_visible", "num_sharing", "why"),
    [
        ("cuda", 0, 0, 1, "has no GPU: torch finds 0"),
        ("cuda", 1, 1, 2, "rank 1 of this host has no GPU: torch finds 1"),
        ("cuda", 3, 2, 1, "has no GPU: torch finds 2"),
        ("cuda:1", 0, 2, 2, 'is one GPU for 2 ranks; write "cuda"'),
    ],
)
def test_a_rank_without_a_device_of_its_own_is_refused(
    device: str, local_rank: int, num_visible: int, num_sharing: int, why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        rank_device(device, local_rank, num_visible, num_sharing)
