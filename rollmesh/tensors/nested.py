"""Walks of nested values: mappings, lists, tuples, structs and dataclasses, as batches are made of.

Owns what counts as a container, and how one is made anew with other parts. Invariants: a container
keeps its type; one that holds nothing to change comes back itself, and none is changed in place;
what stands at two places, a leaf or a container, is one thing and stays one. A value that holds
itself is none of these, and ends in RecursionError. Pure; driven by plane.py, and by whoever asks
what a batch holds.
"""

import copy
import dataclasses
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import msgspec

from rollmesh.tensors.handles import RTensor

_Leaf = TypeVar("_Leaf")
_Parts = Sequence[object] | dict[Any, object]

_SCALARS = frozenset({int, float, bool, str, bytes, type(None)})
"""Passed over before anything is asked: batches hold token ids as plain lists, too."""


def collect(nested: object, kind: type[_Leaf]) -> list[_Leaf]:
    """Every leaf of `kind` in the order of the walk, the same object once."""
    return list(_Walk(nested, kind).leaves.values())


def transform(
    nested: Any, kind: type[_Leaf], change: Callable[[list[_Leaf]], Sequence[object]]
) -> Any:
    """`nested` with every leaf of `kind` changed; `change` gets them all at once, as `collect`
    gives them, and is not called where there is none."""
    walk = _Walk(nested, kind)
    if not walk.leaves:
        return nested
    changed = change(list(walk.leaves.values()))
    return walk.rebuilt(nested, dict(zip(walk.leaves, changed, strict=True)))


class _Walk(Generic[_Leaf]):
    """Down to the leaves, at once; and up again, with others in their places.

    The parts of a container are asked for once, since a mapping may make them as it is asked; they
    are kept, since everything is known by its id().
    """

    def __init__(self, nested: object, kind: type[_Leaf]) -> None:
        self.leaves: dict[int, _Leaf] = {}
        self._kind = kind
        self._parts: dict[int, _Parts] = {}
        self._descend(nested)

    def _descend(self, value: object) -> None:
        if isinstance(value, self._kind):
            self.leaves[id(value)] = value
        elif id(value) not in self._parts:
            parts = self._parts[id(value)] = _parts(value)
            for part in parts.values() if isinstance(parts, dict) else parts:
                if type(part) not in _SCALARS:
                    self._descend(part)

    def rebuilt(self, value: object, done: dict[int, object]) -> object:
        """`value`, with what `done` has in place of what is known by that id()."""
        if type(value) in _SCALARS:
            return value
        if id(value) not in done:
            parts = self._parts[id(value)]
            done[id(value)] = (
                self._rebuilt_record(value, parts, done)
                if isinstance(parts, dict)
                else self._rebuilt_sequence(value, parts, done)
            )
        return done[id(value)]

    def _rebuilt_record(
        self, value: object, parts: dict[Any, object], done: dict[int, object]
    ) -> object:
        news = ((key, self.rebuilt(part, done)) for key, part in parts.items())
        changes = {key: new for key, new in news if new is not parts[key]}
        return _with(value, changes) if changes else value

    def _rebuilt_sequence(
        self, value: object, parts: Sequence[object], done: dict[int, object]
    ) -> object:
        news = [self.rebuilt(part, done) for part in parts]
        has_changed = any(map(operator.is_not, news, parts))
        return _sequence(value, news) if has_changed else value


def _parts(value: object) -> _Parts:
    """What a container holds, by name where it has names; nothing, where it is none."""
    if isinstance(value, list | tuple):
        return value
    if isinstance(value, Mapping):
        return dict(value.items())
    return {name: getattr(value, name) for name in _field_names(value)}


def _field_names(value: object) -> Sequence[str]:
    if isinstance(value, RTensor):
        return ()
    if isinstance(value, msgspec.Struct):
        return value.__struct_fields__
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [field.name for field in dataclasses.fields(value)]
    return ()


def _sequence(old: Any, parts: list[object]) -> object:
    if type(old) is list:
        return parts
    if type(old) is tuple:
        return tuple(parts)
    if isinstance(old, list):
        new = copy.copy(old)
        new[:] = parts
        return new
    make = getattr(type(old), "_make", type(old))  # a namedtuple takes its fields one by one
    return make(parts)


def _with(old: Any, changes: dict[Any, object]) -> object:
    if type(old) is dict:
        return old | changes
    if isinstance(old, Mapping):
        return _mapping(old, changes)
    if isinstance(old, msgspec.Struct):
        return msgspec.structs.replace(old, **changes)
    return dataclasses.replace(old, **changes)


def _mapping(old: Mapping[Any, object], changes: dict[Any, object]) -> Mapping[Any, object]:
    try:
        new: Any = copy.copy(old)
        for key, value in changes.items():
            new[key] = value
    except TypeError:
        # It cannot be copied, or takes no items: we cannot make one.
        return dict(old) | changes
    else:
        return new  # type: ignore[no-any-return]  # its type is the old one's
