"""The prefix tree: longest match, exact splits, and eviction of unreferenced nodes."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmesh.engine.embedded.prefix_tree import PrefixNode, PrefixTree, Slots


def ids(*tokens: int) -> bytes:
    return np.array(tokens, dtype=np.int32).tobytes()


def slots(*numbers: int) -> Slots:
    return np.array(numbers, dtype=np.int64)


def match(tree: PrefixTree, *tokens: int, extra_key: str = "") -> list[int]:
    found: list[int] = tree.match(ids(*tokens), extra_key)[0].tolist()
    return found


def insert(tree: PrefixTree, tokens: list[int], numbers: list[int]) -> PrefixNode:
    return tree.insert(ids(*tokens), slots(*numbers), "")[1]


def test_longest_known_prefix_is_found() -> None:
    tree = PrefixTree()
    insert(tree, [1, 2, 3, 4], [10, 11, 12, 13])
    insert(tree, [1, 2, 9], [10, 11, 20])
    assert match(tree, 1, 2, 3, 4, 5) == [10, 11, 12, 13]
    assert match(tree, 1, 2, 9) == [10, 11, 20]
    assert match(tree, 1, 2, 7) == [10, 11]
    assert match(tree, 2, 1) == []


def test_insert_returns_the_number_of_known_tokens_and_keeps_their_slots() -> None:
    tree = PrefixTree()
    insert(tree, [1, 2, 3], [10, 11, 12])
    num_known, _ = tree.insert(ids(1, 2, 8, 9), slots(30, 31, 32, 33), "")
    assert num_known == 2
    assert match(tree, 1, 2, 8, 9) == [10, 11, 32, 33]


def test_extra_keys_share_nothing() -> None:
    tree = PrefixTree()
    tree.insert(ids(1, 2), slots(10, 11), "v1")
    assert match(tree, 1, 2, extra_key="v2") == []
    assert match(tree, 1, 2, extra_key="v1") == [10, 11]


def test_eviction_takes_the_least_recently_used_and_spares_held_nodes() -> None:
    tree = PrefixTree()
    held = insert(tree, [1, 2], [10, 11])
    insert(tree, [3, 4], [20, 21])
    insert(tree, [5, 6], [30, 31])
    tree.pin(held)
    match(tree, 3, 4)
    assert tree.num_evictable == 4
    assert [part.tolist() for part in tree.evict(1)] == [[30, 31]]
    assert [part.tolist() for part in tree.evict(99)] == [[20, 21]]
    assert tree.num_evictable == 0
    assert match(tree, 1, 2) == [10, 11]
    tree.unpin(held)
    assert [part.tolist() for part in tree.evict(99)] == [[10, 11]]


def test_a_parent_is_evicted_after_its_children() -> None:
    tree = PrefixTree()
    insert(tree, [1, 2, 3], [10, 11, 12])
    insert(tree, [1, 2, 4], [10, 11, 13])
    freed = [part.tolist() for part in tree.evict(4)]
    assert freed == [[12], [13], [10, 11]]


def test_a_node_that_is_split_while_held_stays_held_above_and_below() -> None:
    tree = PrefixTree()
    held = insert(tree, [1, 2, 3, 4], [10, 11, 12, 13])
    tree.pin(held)
    insert(tree, [1, 2, 9], [10, 11, 20])
    assert tree.num_evictable == 1
    assert sum(len(part) for part in tree.evict(99)) == 1
    tree.unpin(held)
    assert tree.num_evictable == 4


sequences = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=8), min_size=1, max_size=12)


@given(sequences, st.lists(st.integers(0, 3), min_size=1, max_size=9))
@settings(max_examples=150, deadline=None)
def test_matches_are_those_of_a_plain_dictionary(known: list[list[int]], wanted: list[int]) -> None:
    tree = PrefixTree()
    slot_of: dict[tuple[int, ...], int] = {}
    fresh = iter(range(1000))
    for tokens in known:
        numbers = [next(fresh) for _ in tokens]
        num_known, _ = tree.insert(ids(*tokens), slots(*numbers), "")
        prefixes = [tuple(tokens[: at + 1]) for at in range(len(tokens))]
        assert num_known == sum(prefix in slot_of for prefix in prefixes)
        for prefix, number in zip(prefixes, numbers, strict=True):
            slot_of.setdefault(prefix, number)
    expected = []
    for at in range(len(wanted)):
        if tuple(wanted[: at + 1]) not in slot_of:
            break
        expected.append(slot_of[tuple(wanted[: at + 1])])
    assert match(tree, *wanted) == expected
    assert tree.num_evictable == len(slot_of)
    assert sorted(np.concatenate(tree.evict(10**6)).tolist()) == sorted(slot_of.values())
