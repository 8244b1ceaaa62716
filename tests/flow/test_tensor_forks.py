"""A data loader forks the process that trains: workers take tensors, and are refused handles."""

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
    """Whose fetch has begun, and ends when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = threading.Event()
        self.goes_on = threading.Event()

    def fetch(self, owner: str, handles: list[RTensor]) -> list[Content]:
        self.begun.set()
        self.goes_on.wait()
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
    """By a worker."""
    loader: Any = DataLoader(rows, collate_fn=collate, num_workers=1, timeout=60)  # type: ignore[arg-type]
    return list(loader)


def refusals(*planes: Plane) -> Callable[[list[Any]], list[str]]:
    """For a worker: what each plane says to handles."""

    def localize(handles: list[Any]) -> list[str]:
        said = []
        for plane in planes:
            try:
                plane.localize(handles)
            except TensorError as error:
                said.append(str(error))
        return said

    return localize


def test_a_worker_reads_what_was_localized_before(owner: Plane) -> None:
    rows = owner.localize(owner.remotize([torch.full((3,), float(n)) for n in range(4)]))
    assert [float(batch.sum()) for batch in loaded(rows)] == [0, 3, 6, 9]


def test_a_worker_that_localizes_is_refused(owner: Plane) -> None:
    handles = owner.remotize([torch.ones(3)])
    with closing(Peers()) as peers:
        consumer = Plane(None, FetchBuffer(MAX_BYTES), peers)
        consumer.localize(handles)
        (said,) = loaded(handles, refusals(owner, consumer))
    assert [REFUSED in each for each in said] == [True, True]


def test_a_worker_does_not_wait_for_what_a_thread_of_its_parent_fetches(owner: Plane) -> None:
    handles = owner.remotize([torch.ones(3)])
    slow = Slow()
    with closing(slow), ThreadPoolExecutor(1) as pool:
        consumer = Plane(None, FetchBuffer(MAX_BYTES), slow)
        fetching = pool.submit(consumer.localize, handles)
        slow.begun.wait()
        try:
            ((said,),) = loaded(handles, refusals(consumer))
            assert REFUSED in said
        finally:
            slow.goes_on.set()
        assert fetching.result()[0].tolist() == [1, 1, 1]
