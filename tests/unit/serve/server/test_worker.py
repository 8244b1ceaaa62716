"""A worker leaves when it exceeds its memory, age or abandoned calls, and names the reason."""

import pytest

from rollmesh.core.config import WorkerConfig
from rollmesh.envs.spawning import ENDED
from rollmesh.serve.server.worker import MAX_LEFT_BEHIND, Wear, is_urgent, worn_out

LIMITED = WorkerConfig(max_rss_bytes=1000, recycle_rollouts=10)
FRESH = Wear(rss_bytes=1000, num_rollouts=9, num_left_behind=MAX_LEFT_BEHIND - 1)


def test_a_worker_within_its_limits_stays() -> None:
    assert worn_out(LIMITED, FRESH) == ""


def test_a_worker_without_limits_stays_forever() -> None:
    assert worn_out(WorkerConfig(), Wear(2**50, 2**50, 0)) == ""


@pytest.mark.parametrize(
    ("wear", "reason"),
    [
        (Wear(1001, 0, 0), "1001 bytes of memory, worker.max_rss_bytes = 1000"),
        (Wear(0, 10, 0), "10 rollouts, worker.recycle_rollouts = 10"),
        (Wear(0, 0, MAX_LEFT_BEHIND), "100 calls of its environment never ended"),
        (Wear(0, 0, 0, 0.9), "90% of the files that it may hold open are (ulimit -n)"),
        (Wear(0, 0, 0, has_lost_spawner=True), ENDED),
    ],
)
def test_the_reason_names_the_exceeded_limit(wear: Wear, reason: str) -> None:
    assert worn_out(LIMITED, wear) == reason


@pytest.mark.parametrize(
    ("rss_bytes", "urgent"), [(1001, False), (1250, False), (1251, True), (2**50, True)]
)
def test_memory_far_past_its_limit_is_urgent(rss_bytes: int, urgent: bool) -> None:
    assert is_urgent(LIMITED, Wear(rss_bytes, 0, 0)) is urgent
    assert not is_urgent(WorkerConfig(), Wear(rss_bytes, 0, 0))


@pytest.mark.parametrize(("share", "urgent"), [(0.9, False), (0.97, True), (1.0, True)])
def test_a_worker_without_file_descriptors_leaves_at_once(share: float, urgent: bool) -> None:
    assert is_urgent(WorkerConfig(), Wear(0, 0, 0, share)) is urgent


def test_a_worker_that_cannot_start_programs_leaves_at_once() -> None:
    assert is_urgent(WorkerConfig(), Wear(0, 0, 0, has_lost_spawner=True))
