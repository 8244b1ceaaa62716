"""Owners take turns, however many items one of them has in the queue."""

from rollmesh.core.fair_queue import FairQueue


def filled(*owners: str) -> FairQueue[str]:
    queue = FairQueue[str]()
    for number, owner in enumerate(owners):
        queue.put(owner, f"{owner}{number}")
    return queue


def taken(queue: FairQueue[str]) -> list[str]:
    found = []
    while (item := queue.take()) is not None:
        found.append(item)
    assert not queue
    return found


def test_owners_take_turns_and_each_in_its_own_order() -> None:
    queue = filled(*"aaaabbc")
    assert len(queue) == 7
    assert taken(queue) == ["a0", "b4", "c6", "a1", "b5", "a2", "a3"]


def test_an_owner_that_comes_late_waits_for_one_item_of_each_other() -> None:
    queue = filled(*"aaaa")
    assert queue.take() == "a0"
    queue.put("b", "late")
    assert taken(queue) == ["a1", "late", "a2", "a3"]


def test_an_owner_that_comes_back_starts_behind_the_others() -> None:
    queue = filled(*"abb")
    assert queue.take() == "a0"
    queue.put("a", "again")
    assert taken(queue) == ["b1", "again", "b2"]


def test_an_item_that_leaves_delays_no_other() -> None:
    queue = filled(*"aab")
    queue.remove("a0")
    queue.remove("a1")
    queue.remove("never there")
    assert taken(queue) == ["b2"]
