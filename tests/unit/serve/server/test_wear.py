"""Wear: a worker leaves past its memory, its age or what it could not end, and says which."""

import pytest

from rollmesh.core.config import WorkerConfig
from rollmesh.serve.server.wear import MAX_LEFT_BEHIND, Wear, worn_out

LIMITED = WorkerConfig(max_rss_bytes=1000, recycle_rollouts=10)
FRESH = Wear(rss_bytes=1000, num_rollouts=9, num_left_behind=MAX_LEFT_BEHIND - 1)


def test_worker_within_its_limits_stays() -> None:
    assert worn_out(LIMITED, FRESH) == ""


def test_worker_without_limits_stays_for_ever() -> None:
    assert worn_out(WorkerConfig(), Wear(2**50, 2**50, 0)) == ""


@pytest.mark.parametrize(
    ("wear", "told"),
    [
        (Wear(1001, 0, 0), "1001 bytes of memory, worker.max_rss_bytes = 1000"),
        (Wear(0, 10, 0), "10 rollouts, worker.recycle_rollouts = 10"),
        (Wear(0, 0, MAX_LEFT_BEHIND), "100 calls of its environment never ended"),
    ],
)
def test_reason_names_the_limit_that_was_passed(wear: Wear, told: str) -> None:
    assert worn_out(LIMITED, wear) == told
