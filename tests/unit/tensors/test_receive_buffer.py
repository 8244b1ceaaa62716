"""Received memory is reused only after its last view is gone; each loan is returned once."""

import gc
import random
import threading
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import structlog
from numpy.typing import NDArray

from rollmesh.tensors.receive_buffer import ArrayLoans, ReceiveBuffer

SIZES = [64, 0, 100, 4096]
MAX_BYTES = 2**16


def filling(number: int) -> Callable[[Sequence[memoryview]], None]:
    """Return a function that fills memory with a number."""

    def fill(views: Sequence[memoryview]) -> None:
        for view in views:
            view[:] = bytes([number]) * view.nbytes

    return fill


def places(arrays: Sequence[np.ndarray]) -> list[int]:
    return [array.ctypes.data for array in arrays if array.nbytes]


@pytest.mark.parametrize("max_bytes", [0, 100, MAX_BYTES])
def test_arrays_have_their_sizes_and_bytes_and_are_read_only(max_bytes: int) -> None:
    arrays = ReceiveBuffer(max_bytes).receive(SIZES, filling(7))
    assert [array.nbytes for array in arrays] == SIZES
    assert all((array == 7).all() for array in arrays)
    assert not any(array.flags.writeable for array in arrays)


def test_bytes_are_received_in_order() -> None:
    buffer = ReceiveBuffer(MAX_BYTES)
    content = np.random.default_rng(0).integers(0, 256, sum(SIZES), np.uint8)

    def fill(views: Sequence[memoryview]) -> None:
        at = 0
        for view in views:
            view[:] = content[at : at + view.nbytes].data
            at += view.nbytes
        assert at == sum(SIZES)

    assert np.array_equal(np.concatenate(buffer.receive(SIZES, fill)), content)


def test_memory_is_reused_once_no_view_is_left() -> None:
    buffer = ReceiveBuffer(MAX_BYTES)
    first = buffer.receive(SIZES, filling(1))
    used = places(first)
    view = first[3][5:7]
    del first
    second = buffer.receive(SIZES, filling(2))
    assert used[:2] == places(second)[:2]
    assert used[2] not in places(second)
    assert bytes(view) == b"\1\1"
    del view, second
    assert places(buffer.receive(SIZES, filling(3))) == used


def test_adjacent_shards_are_received_as_one() -> None:
    seen: list[int] = []
    buffer = ReceiveBuffer(MAX_BYTES)
    buffer.receive([64, 128, 0, 192], lambda views: seen.append(len(views)))
    assert seen == [1]


def test_arrays_that_do_not_fit_are_allocated_elsewhere() -> None:
    buffer = ReceiveBuffer(MAX_BYTES)
    kept = [buffer.receive([MAX_BYTES // 4], filling(number))[0] for number in range(8)]
    assert [int(array[0]) for array in kept] == list(range(8))
    assert len(set(places(kept))) == 8
    del kept
    buffer.receive([MAX_BYTES], filling(9))


def test_without_address_space_the_buffer_logs_once_and_allocates_elsewhere() -> None:
    buffer = ReceiveBuffer(2**46)
    with structlog.testing.capture_logs() as logs:
        for number in (1, 2):
            arrays = buffer.receive(SIZES, filling(number))
            assert [set(array.tolist()) for array in arrays] == [
                {number},
                set(),
                {number},
                {number},
            ]
    (entry,) = logs
    assert entry["event"] == "receive_buffer.none"
    assert "ulimit -v" in entry["why"]


def test_a_failed_fetch_takes_no_room() -> None:
    buffer = ReceiveBuffer(MAX_BYTES)
    used = places(buffer.receive([MAX_BYTES], filling(1)))
    for _ in range(3):
        with pytest.raises(ConnectionResetError):
            buffer.receive([MAX_BYTES], hang_up)
    assert places(buffer.receive([MAX_BYTES], filling(2))) == used


def hang_up(_: Sequence[memoryview]) -> None:
    raise ConnectionResetError("hung up")


def test_concurrent_threads_receive_only_their_own_bytes() -> None:
    buffer = ReceiveBuffer(MAX_BYTES)
    wrong: list[int] = []

    def receive(number: int) -> None:
        rng = random.Random(number)
        kept = []
        for _ in range(200):
            kept += buffer.receive([rng.randrange(4000) for _ in range(3)], filling(number))
            wrong.extend(number for array in kept if not (array == number).all())
            rng.shuffle(kept)
            del kept[rng.randrange(10) :]

    threads = [threading.Thread(target=receive, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


MEMORY = np.arange(1024, dtype=np.uint8).tobytes()
"""An owner's segment. It is no array, so that views refer to the lent array."""


def array(offset: int = 0, num_bytes: int = 64) -> NDArray[np.uint8]:
    return np.frombuffer(MEMORY, np.uint8, num_bytes, offset)


class CallCounter:
    """Counts its calls."""

    def __init__(self) -> None:
        self.num_calls = 0

    def call(self) -> None:
        self.num_calls += 1


def test_a_loan_ends_with_the_last_view_of_its_array() -> None:
    counter = CallCounter()
    loans: ArrayLoans[int] = ArrayLoans(counter.call)
    lent = array()
    loans.lend([7], [lent])
    views = [lent[3:9], lent.view(np.int32)[2:], lent.data[8:]]
    del lent
    while views:
        assert len(loans) == 1
        assert loans.take_ended(9) == []
        assert counter.num_calls == 0
        views.pop()
    assert len(loans) == 0
    assert counter.num_calls == 1
    assert loans.take_ended(9) == [7]
    assert loans.take_ended(9) == []


def test_a_shard_that_was_lent_twice_is_returned_twice() -> None:
    loans: ArrayLoans[int] = ArrayLoans(CallCounter().call)
    first, second = array(), array()
    loans.lend([7, 7], [first, second])
    del first
    assert loans.take_ended(9) == [7]
    del second
    assert loans.take_ended(9) == [7]


def test_no_more_is_returned_at_a_time_than_a_message_holds() -> None:
    loans: ArrayLoans[int] = ArrayLoans(CallCounter().call)
    loans.give_back(range(10))
    assert [loans.take_ended(4) for _ in range(4)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9], []]


def test_loans_that_end_in_many_threads_are_all_returned_once() -> None:
    loans: ArrayLoans[int] = ArrayLoans(CallCounter().call)
    rng = random.Random(3)
    shards: list[list[NDArray[np.uint8]]] = [[] for _ in range(8)]
    for shard_id in range(4000):
        lent = array(rng.randrange(900))
        loans.lend([shard_id], [lent])
        rng.choice(shards).append(lent)
    del lent
    together = threading.Barrier(len(shards))
    ended: list[int] = []

    def forget(some: list[NDArray[np.uint8]]) -> None:
        together.wait()
        while some:
            some.pop()
            ended.extend(loans.take_ended(3))

    threads = [threading.Thread(target=forget, args=(some,)) for some in shards]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ended += loans.take_ended(4000)
    assert sorted(ended) == list(range(4000))
    assert len(loans) == 0


def test_loans_end_by_reference_counts_without_the_collector() -> None:
    loans: ArrayLoans[int] = ArrayLoans(CallCounter().call)
    lent = array()
    loans.lend([7], [lent])
    gc.collect()
    gc.disable()
    try:
        counted = np.frombuffer(MEMORY, np.uint8, 1)
        loans.lend([8], [counted])
        del counted
        assert loans.take_ended(9) == [8]  # by reference counts, without the collector
    finally:
        gc.enable()
    assert len(loans) == 1
