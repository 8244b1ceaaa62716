"""Each loan ends with the last view of its array, and is returned once."""

import gc
import random
import threading

import numpy as np
from numpy.typing import NDArray

from rollmesh.tensors.receive_buffer import ArrayLoans

MEMORY = np.arange(1024, dtype=np.uint8).tobytes()
"""Stands for an owner's segment: no array, so that views are of the lent array."""


def array(offset: int = 0, num_bytes: int = 64) -> NDArray[np.uint8]:
    return np.frombuffer(MEMORY, np.uint8, num_bytes, offset)


class Bell:
    """Count how often it is rung."""

    def __init__(self) -> None:
        self.num_rings = 0

    def ring(self) -> None:
        self.num_rings += 1


def test_a_loan_ends_with_the_last_view_of_its_array() -> None:
    bell = Bell()
    loans: ArrayLoans[int] = ArrayLoans(bell.ring)
    lent = array()
    loans.lend([7], [lent])
    views = [lent[3:9], lent.view(np.int32)[2:], lent.data[8:]]
    del lent
    while views:
        assert len(loans) == 1
        assert loans.take_ended(9) == []
        assert bell.num_rings == 0
        views.pop()
    assert len(loans) == 0
    assert bell.num_rings == 1
    assert loans.take_ended(9) == [7]
    assert loans.take_ended(9) == []


def test_a_shard_that_was_lent_twice_is_returned_twice() -> None:
    loans: ArrayLoans[int] = ArrayLoans(Bell().ring)
    first, second = array(), array()
    loans.lend([7, 7], [first, second])
    del first
    assert loans.take_ended(9) == [7]
    del second
    assert loans.take_ended(9) == [7]


def test_no_more_is_returned_at_a_time_than_a_message_holds() -> None:
    loans: ArrayLoans[int] = ArrayLoans(Bell().ring)
    loans.give_back(range(10))
    assert [loans.take_ended(4) for _ in range(4)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9], []]


def test_loans_that_end_in_many_threads_are_all_returned_once() -> None:
    loans: ArrayLoans[int] = ArrayLoans(Bell().ring)
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


def test_views_alone_keep_nothing_of_ours_alive() -> None:
    loans: ArrayLoans[int] = ArrayLoans(Bell().ring)
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
