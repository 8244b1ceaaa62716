"""A worker's load, and the choice among workers."""

import pytest

from rollmesh.core.ids import GroupId
from rollmesh.serve.router.groups import Group
from rollmesh.serve.router.workers import WorkerEntry, WorkerHealth, WorkerTable
from tests.unit.serve.router.story import beat, hello


def seated(seq: int, num_samples: int) -> Group:
    return Group(GroupId("r1", seq), "guess", num_samples, "tcp://sink", "c")


@pytest.fixture
def worker() -> WorkerEntry:
    return WorkerEntry(hello("w0"), b"w0", 0.0)


def test_before_the_first_beat_the_load_is_what_was_given(worker: WorkerEntry) -> None:
    worker.occupy(seated(1, 5))
    assert worker.load == 5


def test_the_load_is_what_runs_once_the_beats_show_it(worker: WorkerEntry) -> None:
    worker.occupy(seated(1, 6))
    worker.take_beat(beat("w0", num_running=0), 1.0)
    assert worker.load == 6, "this beat may have left before the group came"
    worker.take_beat(beat("w0", num_running=2), 2.0)
    assert worker.load == 2


def test_the_load_is_never_more_than_what_was_given(worker: WorkerEntry) -> None:
    worker.occupy(seated(1, 2))
    worker.take_beat(beat("w0", num_running=50), 1.0)
    assert worker.load == 2


def test_a_group_that_left_weighs_nothing(worker: WorkerEntry) -> None:
    group = seated(1, 5)
    worker.occupy(group)
    worker.vacate(group)
    worker.vacate(group)
    assert worker.load == 0


@pytest.mark.parametrize(
    ("num_seated", "num_samples", "fits"), [(0, 8, True), (4, 4, True), (4, 5, False), (0, 9, True)]
)
def test_a_group_fits_into_free_slots_or_an_idle_worker(
    worker: WorkerEntry, num_seated: int, num_samples: int, fits: bool
) -> None:
    if num_seated:
        worker.occupy(seated(1, num_seated))
    assert worker.can_take(num_samples) is fits


def test_a_lost_worker_takes_nothing(worker: WorkerEntry) -> None:
    worker.state = WorkerHealth.LOST
    assert not worker.can_take(1)


def test_a_worker_is_found_by_its_newest_route(worker: WorkerEntry) -> None:
    workers = WorkerTable(slow_lag_s=1.0)
    workers.add(worker)
    workers.move(worker, b"other")
    assert workers.at(b"other") is worker
    assert workers.at(b"w0") is None
    workers.remove(worker)
    assert (workers.at(b"other"), workers.get("w0"), len(workers)) == (None, None, 0)


def test_an_environment_is_served_by_live_workers_only(worker: WorkerEntry) -> None:
    workers = WorkerTable(slow_lag_s=1.0)
    workers.add(worker)
    assert workers.serve("guess")
    assert not workers.serve("echo")
    worker.state = WorkerHealth.LOST
    assert not workers.serve("guess")
