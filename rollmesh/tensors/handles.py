"""RTensor, the handle of a tensor that lies elsewhere; Content, its bytes; and packs of handles.

A handle says all that a controller needs to route a batch: where the bytes are, of which step, and
how many. A pack holds handles by column, with each owner and each kind (dtype, shape, size) written
once: some 14 bytes a handle. Invariants: a shard's id is unique in a mesh, since its upper half is
drawn anew whenever an owner starts; whatever arrives, `unpack` gives handles or raises WireError.
Driven by every process that sends a batch or receives one.

Walks of nested values: mappings, lists, tuples, structs and dataclasses, as batches are made of.

Owns what counts as a container, and how one is made anew with other parts. Invariants: a container
keeps its type; one that holds nothing to change comes back itself, and none is changed in place;
what stands at two places, a leaf or a container, is one thing and stays one. A value that holds
itself is none of these, and ends in RecursionError. Pure; driven by plane.py, and by whoever asks
what a batch holds.
"""

import copy
import dataclasses
import operator
import secrets
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Generic, TypeVar

import msgspec
import numpy as np

from rollmesh.core.errors import DECODE_ERRORS, WireError

if TYPE_CHECKING:
    from rollmesh.tensors.torch_bridge import ReadOnlyTensor

UNTAGGED = -1
"""The step of what no batch has taken."""
PACK_LAYOUT = 1
NUMBER_BITS = 32
INCARNATION_BITS = 31
"""So that an id fits into 63 bits: languages and databases without unsigned ones can hold it."""

_Value = TypeVar("_Value", bound=Hashable)
_Count = Annotated[int, msgspec.Meta(ge=0)]
_Step = Annotated[int, msgspec.Meta(ge=UNTAGGED)]


class RTensor(msgspec.Struct, frozen=True, gc=False):
    """Where one tensor lies, and what it is.

    >>> RTensor(7 << 32 | 1, "tcp://10.0.0.4:7000", 3, "bfloat16", (8, 1024), 16384).incarnation
    7
    """

    shard_id: int
    """64 bits: the owner's incarnation, then the number it gave."""
    owner: str
    """tcp://host:port of the process that holds the bytes; '' while that serves nobody."""
    step: int
    """The train step that took it, or UNTAGGED."""
    dtype: str
    """torch's name for it: bfloat16, float8_e4m3fn, int32, bool."""
    shape: tuple[int, ...]
    num_bytes: int

    @property
    def incarnation(self) -> int:
        """Which life of its owner stored it."""
        return self.shard_id >> NUMBER_BITS

    def tagged(self, step: int) -> "RTensor":
        """The same shard, taken by `step`; the owner is told by its store's `take`."""
        return RTensor(self.shard_id, self.owner, step, self.dtype, self.shape, self.num_bytes)

    def to_local(self) -> "ReadOnlyTensor":
        """The tensor, read-only, by way of this process's plane; TensorError where it is not to
        be had."""
        # The plane knows handles; that a handle knows the way to the plane is a convenience.
        from rollmesh.tensors.plane import current  # noqa: PLC0415 - would import in a circle

        local: ReadOnlyTensor = current().localize(self)
        return local


class Content(msgspec.Struct, frozen=True, eq=False, gc=False):
    """The bytes of one shard in this process, whoever owns it."""

    dtype: str
    shape: tuple[int, ...]
    data: np.ndarray
    """uint8 [num_bytes], contiguous. While this very array lives, its memory stays: what is made
    from it refers to it, and never to an array further down."""


class _Pack(msgspec.Struct, frozen=True, array_like=True, gc=False):
    layout: int
    owners: list[str]
    kinds: list[tuple[str, tuple[_Count, ...], _Count]]
    """(dtype, shape, num_bytes)"""
    shard_ids: list[_Count]
    steps: list[_Step]
    owner_of: list[_Count]
    kind_of: list[_Count]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Pack)


def new_incarnation() -> int:
    """A fresh number for an owner that starts; never 0."""
    return secrets.randbelow((1 << INCARNATION_BITS) - 1) + 1


def pack(handles: Sequence[RTensor]) -> bytes:
    """The handles as one message, in their order."""
    owners, owner_of = _numbered([each.owner for each in handles])
    kinds, kind_of = _numbered([(each.dtype, each.shape, each.num_bytes) for each in handles])
    shard_ids = [each.shard_id for each in handles]
    steps = [each.step for each in handles]
    return _encoder.encode(_Pack(PACK_LAYOUT, owners, kinds, shard_ids, steps, owner_of, kind_of))


def unpack(buffer: bytes | bytearray | memoryview) -> list[RTensor]:
    """The inverse of `pack`; WireError in one line on anything else."""
    try:
        packed = _decoder.decode(buffer)
    except DECODE_ERRORS as error:
        raise WireError(f"not a pack of handles: {error}") from None
    if packed.layout != PACK_LAYOUT:
        raise WireError(f"handles are packed in layout {packed.layout}, we read {PACK_LAYOUT}")
    owners, kinds = packed.owners, packed.kinds
    columns = (packed.shard_ids, packed.owner_of, packed.steps, packed.kind_of)
    try:
        return [
            RTensor(shard_id, owners[owner], step, *kinds[kind])
            for shard_id, owner, step, kind in zip(*columns, strict=True)
        ]
    except (ValueError, IndexError):
        raise WireError("a pack of handles whose columns do not fit each other") from None


def _numbered(values: Iterable[_Value]) -> tuple[list[_Value], list[int]]:
    """The distinct values in order of appearance, and for each value the place of its like."""
    places: dict[_Value, int] = {}
    numbers = [places.setdefault(value, len(places)) for value in values]
    return list(places), numbers


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
