"""Bytes arrive in reused memory only after its last view is gone."""

import random
import threading
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import structlog

from rollmesh.tensors.receive_buffer import ReceiveBuffer

SIZES = [64, 0, 100, 4096]
MAX_BYTES = 2**16


def filling(number: int) -> Callable[[Sequence[memoryview]], None]:
    """Fill with a number."""

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
    landing = ReceiveBuffer(MAX_BYTES)
    content = np.random.default_rng(0).integers(0, 256, sum(SIZES), np.uint8)

    def fill(views: Sequence[memoryview]) -> None:
        at = 0
        for view in views:
            view[:] = content[at : at + view.nbytes].data
            at += view.nbytes
        assert at == sum(SIZES)

    assert np.array_equal(np.concatenate(landing.receive(SIZES, fill)), content)


def test_memory_is_reused_once_no_view_is_left() -> None:
    landing = ReceiveBuffer(MAX_BYTES)
    first = landing.receive(SIZES, filling(1))
    used = places(first)
    view = first[3][5:7]
    del first
    second = landing.receive(SIZES, filling(2))
    assert used[:2] == places(second)[:2]
    assert used[2] not in places(second)
    assert bytes(view) == b"\1\1"
    del view, second
    assert places(landing.receive(SIZES, filling(3))) == used


def test_shards_that_lie_side_by_side_are_received_as_one() -> None:
    seen: list[int] = []
    landing = ReceiveBuffer(MAX_BYTES)
    landing.receive([64, 128, 0, 192], lambda views: seen.append(len(views)))
    assert seen == [1]


def test_arrays_that_do_not_fit_are_allocated_elsewhere() -> None:
    landing = ReceiveBuffer(MAX_BYTES)
    kept = [landing.receive([MAX_BYTES // 4], filling(number))[0] for number in range(8)]
    assert [int(array[0]) for array in kept] == list(range(8))
    assert len(set(places(kept))) == 8
    del kept
    landing.receive([MAX_BYTES], filling(9))


def test_where_the_system_has_no_addresses_for_it_it_says_so_once_and_goes_without() -> None:
    landing = ReceiveBuffer(2**46)
    with structlog.testing.capture_logs() as logs:
        for number in (1, 2):
            arrays = landing.receive(SIZES, filling(number))
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
    landing = ReceiveBuffer(MAX_BYTES)
    used = places(landing.receive([MAX_BYTES], filling(1)))
    for _ in range(3):
        with pytest.raises(ConnectionResetError):
            landing.receive([MAX_BYTES], hang_up)
    assert places(landing.receive([MAX_BYTES], filling(2))) == used


def hang_up(_: Sequence[memoryview]) -> None:
    raise ConnectionResetError("hung up")


def test_threads_that_receive_side_by_side_see_their_own_bytes_only() -> None:
    landing = ReceiveBuffer(MAX_BYTES)
    wrong: list[int] = []

    def receive(number: int) -> None:
        rng = random.Random(number)
        kept = []
        for _ in range(200):
            kept += landing.receive([rng.randrange(4000) for _ in range(3)], filling(number))
            wrong.extend(number for array in kept if not (array == number).all())
            rng.shuffle(kept)
            del kept[rng.randrange(10) :]

    threads = [threading.Thread(target=receive, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
