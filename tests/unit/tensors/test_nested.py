"""Containers keep their types, shared objects stay shared, and nothing is changed in place."""

import dataclasses
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmesh.tensors.handles import RTensor, collect, transform


class Leaf:
    """The leaf that the walk looks for."""

    def __init__(self, name: str = "") -> None:
        self.name = name


class Pair(NamedTuple):
    left: object
    right: object


class Frozen(msgspec.Struct, frozen=True):
    content: object
    name: str = "frozen"


class Open(msgspec.Struct):
    content: object
    name: str = "open"


@dataclasses.dataclass(frozen=True)
class Record:
    content: object
    name: str = "record"


class Fresh(Mapping[str, Any]):
    """Make its values on access."""

    def __getitem__(self, key: str) -> Any:
        return [Leaf(key)]

    def __iter__(self) -> Iterator[str]:
        return iter("abc")

    def __len__(self) -> int:
        return 3


class Tagged(list[object]):
    """A list with an attribute."""

    tag = ""


def named(leaves: list[Leaf]) -> list[str]:
    return [leaf.name for leaf in leaves]


def test_leaves_are_found_in_order_and_each_once() -> None:
    a, b, c = Leaf("a"), Leaf("b"), Leaf("c")
    nested = {"x": [a, (b, 1)], "y": Frozen(Open(Record(c))), "z": [b, None, "b", 1.0]}
    assert collect(nested, Leaf) == [a, b, c]


@pytest.mark.parametrize("nested", [Leaf("a"), 1, None, [], {}, (), "text", [[1, 2], {"a": "b"}]])
def test_a_bare_leaf_is_found_and_other_values_have_none(nested: object) -> None:
    assert collect(nested, Leaf) == ([nested] if isinstance(nested, Leaf) else [])


@pytest.mark.parametrize(
    ("nested", "wanted"),
    [
        ([Leaf("a"), 1], ["a", 1]),
        ((Leaf("a"), 1), ("a", 1)),
        ({"k": Leaf("a"), "n": 1}, {"k": "a", "n": 1}),
        (Pair(Leaf("a"), 1), Pair("a", 1)),
        (Frozen(Leaf("a")), Frozen("a")),
        (Open(Leaf("a")), Open("a")),
        (Record(Leaf("a")), Record("a")),
        (OrderedDict(k=Leaf("a")), OrderedDict(k="a")),
        (UserDict(k=Leaf("a")), UserDict(k="a")),
        (defaultdict(None, k=Leaf("a")), defaultdict(None, k="a")),
        (Tagged([Leaf("a")]), Tagged(["a"])),
        (Leaf("a"), "a"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_container_keeps_its_type(nested: object, wanted: object) -> None:
    changed = transform(nested, Leaf, named)
    assert changed == wanted
    assert type(changed) is type(wanted)
    assert collect(nested, Leaf), "it was changed in place"


def test_other_attributes_of_a_container_are_kept() -> None:
    nested: defaultdict[str, Any] = defaultdict(list, k=Leaf("a"))
    assert transform(nested, Leaf, named)["other"] == []
    tagged = Tagged([Leaf("a")])
    tagged.tag = "kept"
    assert transform(tagged, Leaf, named).tag == "kept"


def test_a_mapping_that_cannot_be_constructed_becomes_a_dict() -> None:
    assert transform(MappingProxyType({"k": Leaf("a"), "n": 1}), Leaf, named) == {"k": "a", "n": 1}


def test_a_mapping_that_creates_its_values_is_read_once() -> None:
    assert transform([Fresh(), Fresh()], Leaf, named) == [{"a": ["a"], "b": ["b"], "c": ["c"]}] * 2


def test_a_value_without_leaves_is_returned_itself() -> None:
    kept = {"ids": [1, 2, 3], "meta": Open([])}
    nested = {"kept": kept, "leaf": Leaf("a")}
    changed = transform(nested, Leaf, named)
    assert changed["kept"] is kept
    assert changed is not nested
    assert transform(kept, Leaf, named) is kept


def test_one_leaf_at_two_places_is_changed_once() -> None:
    leaf = Leaf("a")
    asked: list[list[Leaf]] = []

    def change(leaves: list[Leaf]) -> list[object]:
        asked.append(leaves)
        return [object() for _ in leaves]

    changed = transform({"x": leaf, "y": [leaf]}, Leaf, change)
    assert asked == [[leaf]]
    assert changed["x"] is changed["y"][0]


def test_one_container_at_two_places_stays_one() -> None:
    shared = [Leaf("a")]
    changed = transform({"x": shared, "y": (shared,)}, Leaf, named)
    assert changed["x"] is changed["y"][0]
    assert changed["x"] == ["a"]


def test_many_paths_to_one_leaf_are_walked_once() -> None:
    nested: object = Leaf("a")
    for _ in range(100):
        nested = [nested, nested]
    changed = transform(nested, Leaf, named)
    for _ in range(100):
        assert changed[0] is changed[1]
        changed = changed[0]
    assert changed == "a"


def test_a_handle_is_a_leaf_and_no_container() -> None:
    handle = RTensor(1 << 32, "tcp://h:1", 0, "int32", (4,), 16)
    assert collect([handle, {"k": handle}], RTensor) == [handle]
    assert collect([handle], tuple) == []


def test_a_value_that_holds_itself_is_refused() -> None:
    nested: list[object] = [Leaf("a")]
    nested.append(nested)
    with pytest.raises(RecursionError):
        transform(nested, Leaf, named)


def test_too_few_changes_are_no_changes() -> None:
    with pytest.raises(ValueError, match="shorter"):
        transform([Leaf("a"), Leaf("b")], Leaf, lambda leaves: leaves[:1])


NESTS = st.recursive(
    st.one_of(st.none(), st.integers(), st.text(max_size=3), st.binary(max_size=3), st.booleans()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.text(max_size=2), inner, max_size=4),
        st.builds(Pair, inner, inner),
        st.builds(Frozen, inner),
        st.builds(Record, inner),
    ),
    max_leaves=20,
)


def in_leaves(value: Any) -> Any:
    """Replace each text in a nest by a Leaf: written out by hand, for each kind."""
    match value:
        case str():
            return Leaf(value)
        case list():
            return [in_leaves(each) for each in value]
        case Pair(left, right):
            return Pair(in_leaves(left), in_leaves(right))
        case tuple():
            return tuple(in_leaves(each) for each in value)
        case dict():
            return {key: in_leaves(each) for key, each in value.items()}
        case Frozen() | Record():
            return type(value)(in_leaves(value.content), value.name)
        case _:
            return value


@given(NESTS)
def test_every_nest_is_restored_from_its_leaves(nested: object) -> None:
    assert transform(in_leaves(nested), Leaf, named) == nested
