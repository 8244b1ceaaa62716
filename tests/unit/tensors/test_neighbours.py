"""Neighbours: those of one machine are sent to one of them, and nobody waits in a circle."""

import hypothesis
from hypothesis import strategies as st

from rollmesh.tensors.neighbours import Neighbours


def test_the_smallest_address_fetches_for_the_others() -> None:
    neighbours = Neighbours()
    for address in "cab":
        neighbours.enter("here", address)
    assert [neighbours.nearest("here", each) for each in "abc"] == ["", "a", "a"]


def test_one_that_lends_nothing_is_sent_to_who_does() -> None:
    neighbours = Neighbours()
    assert neighbours.nearest("here", "") == ""
    neighbours.enter("here", "b")
    assert neighbours.nearest("here", "") == "b"


def test_another_machine_is_another_matter() -> None:
    neighbours = Neighbours()
    neighbours.enter("there", "a")
    assert neighbours.nearest("here", "b") == ""


def test_who_has_left_is_nobodys_neighbour() -> None:
    neighbours = Neighbours()
    neighbours.enter("here", "a")
    neighbours.enter("here", "a")  # connected anew before the old end was noticed
    neighbours.leave("here", "a")
    assert neighbours.nearest("here", "b") == "a"
    neighbours.leave("here", "a")
    assert neighbours.nearest("here", "b") == ""


@hypothesis.given(st.lists(st.tuples(st.sampled_from("ab"), st.text("xyz", min_size=1))))
def test_whoever_comes_and_goes_nobody_is_sent_to_one_who_may_wait_for_him(
    turns: list[tuple[str, str]],
) -> None:
    neighbours, there = Neighbours(), set[tuple[str, str]]()
    for memory, address in turns:
        if (memory, address) in there:
            neighbours.leave(memory, address)
        else:
            neighbours.enter(memory, address)
        there ^= {(memory, address)}
        for each in there:
            asked = neighbours.nearest(*each)
            assert not asked or (asked < each[1] and (each[0], asked) in there)
