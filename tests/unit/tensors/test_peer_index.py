"""Consumers of one machine are sent to one of them, and never wait in a circle."""

import hypothesis
from hypothesis import strategies as st

from rollmesh.tensors.relay import PeerIndex


def test_the_smallest_address_fetches_for_the_others() -> None:
    neighbours = PeerIndex()
    for address in "cab":
        neighbours.add("here", address)
    assert [neighbours.preferred("here", each) for each in "abc"] == ["", "a", "a"]


def test_a_peer_that_lends_nothing_is_sent_to_one_that_does() -> None:
    neighbours = PeerIndex()
    assert neighbours.preferred("here", "") == ""
    neighbours.add("here", "b")
    assert neighbours.preferred("here", "") == "b"


def test_another_machine_is_another_matter() -> None:
    neighbours = PeerIndex()
    neighbours.add("addresses", "a")
    assert neighbours.preferred("here", "b") == ""


def test_a_peer_that_has_left_is_no_neighbour() -> None:
    neighbours = PeerIndex()
    neighbours.add("here", "a")
    neighbours.add("here", "a")  # connected anew before the old end was noticed
    neighbours.remove("here", "a")
    assert neighbours.preferred("here", "b") == "a"
    neighbours.remove("here", "a")
    assert neighbours.preferred("here", "b") == ""


@hypothesis.given(st.lists(st.tuples(st.sampled_from("ab"), st.text("xyz", min_size=1))))
def test_no_peer_is_sent_to_one_that_may_wait_for_it(
    turns: list[tuple[str, str]],
) -> None:
    neighbours, addresses = PeerIndex(), set[tuple[str, str]]()
    for memory, address in turns:
        if (memory, address) in addresses:
            neighbours.remove(memory, address)
        else:
            neighbours.add(memory, address)
        addresses ^= {(memory, address)}
        for each in addresses:
            asked = neighbours.preferred(*each)
            assert not asked or (asked < each[1] and (each[0], asked) in addresses)
