"""A data loader forks the process that trains: its workers read tensors, and may not fetch
handles.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from rollmesh.core.clock import SystemClock
from rollmesh.core.errors import TensorError
from rollmesh.tensors.fetch_buffer import FetchBuffer
from rollmesh.tensors.handles import Content, RTensor
from rollmesh.tensors.peers import Peers
from rollmesh.tensors.plane import Plane
from rollmesh.tensors.server import TensorServer
from rollmesh.tensors.store import OwnerStore, StoreSettings

MAX_BYTES = 2**20
REFUSED = "made before a fork is the parent's"


class Slow(Peers):
    """A backend whose fetch ends when the test allows it."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = threading.Event()
        self.may_end = threading.Event()

    def fetch(self, owner: str, handles: list[RTensor]) -> list[Content]:
        self.begun.set()
        self.may_end.wait()
        return super().fetch(owner, handles)


@pytest.fixture
def owner() -> Iterator[Plane]:
    store = OwnerStore(StoreSettings(max_bytes=MAX_BYTES), SystemClock())
    server = TensorServer(store, "tcp://127.0.0.1:0")
    server.start()
    yield Plane(store)
    server.stop()
    store.close()


def loaded(rows: list[Any], collate: Callable[[list[Any]], Any] | None = None) -> list[Any]:
    """The rows that a data loader's worker returns."""
    loader: Any = DataLoader(rows, collate_fn=collate, num_workers=1, timeout=60)  # type: ignore[arg-type]
    return list(loader)


def refusals(*planes: Plane) -> Callable[[list[Any]], list[str]]:
    """A collate function that returns each plane's error for handles in a worker."""

    def localize(handles: list[Any]) -> list[str]:
        errors = []
        for plane in planes:
            try:
                plane.localize(handles)
            except TensorError as error:
                errors.append(str(error))
        return errors

    return localize


def test_a_worker_reads_tensors_that_were_localized_before(owner: Plane) -> None:
    rows = owner.localize(owner.remotize([torch.full((3,), float(n)) for n in range(4)]))
    assert [float(batch.sum()) for batch in loaded(rows)] == [0, 3, 6, 9]


def test_a_worker_that_localizes_is_refused(owner: Plane) -> None:
    handles = owner.remotize([torch.ones(3)])
    with closing(Peers()) as peers:
        consumer = Plane(None, FetchBuffer(MAX_BYTES), peers)
        consumer.localize(handles)
        (errors,) = loaded(handles, refusals(owner, consumer))
    assert [REFUSED in each for each in errors] == [True, True]


def test_a_worker_does_not_wait_for_a_fetch_of_its_parents_thread(owner: Plane) -> None:
    handles = owner.remotize([torch.ones(3)])
    slow = Slow()
    with closing(slow), ThreadPoolExecutor(1) as pool:
        consumer = Plane(None, FetchBuffer(MAX_BYTES), slow)
        fetching = pool.submit(consumer.localize, handles)
        slow.begun.wait()
        try:
            ((error,),) = loaded(handles, refusals(consumer))
            assert REFUSED in error
        finally:
            slow.may_end.set()
        assert fetching.result()[0].tolist() == [1, 1, 1]
