"""RTensor, the handle of a tensor stored elsewhere; Content, its bytes; packs and nested values.

- A handle has all that a controller needs to route a batch. A pack stores handles by column, with
  each owner and each (dtype, shape, size) once: about 14 bytes a handle.
- A shard's id is unique in a mesh, since its upper half is random for each start of an owner.
- `unpack` gives handles or raises WireError, whatever arrives.
- Nested values are mappings, lists, tuples, structs and dataclasses. A container keeps its type;
  one without a change is returned itself, and none is changed in place. An object at two places
  stays one object. A value that contains itself ends in RecursionError.
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
"""The step of shards that no step has taken."""
PACK_LAYOUT = 1
NUMBER_BITS = 32
INCARNATION_BITS = 31
"""Ids fit into 63 bits, for languages and databases without unsigned integers."""

_Value = TypeVar("_Value", bound=Hashable)
_Count = Annotated[int, msgspec.Meta(ge=0)]
_Step = Annotated[int, msgspec.Meta(ge=UNTAGGED)]


class RTensor(msgspec.Struct, frozen=True, gc=False):
    """The handle of one tensor: where it is stored, and its type.

    >>> RTensor(7 << 32 | 1, "tcp://10.0.0.4:7000", 3, "bfloat16", (8, 1024), 16384).incarnation
    7
    """

    shard_id: int
    """64 bits: the owner's incarnation, then a number."""
    owner: str
    """tcp://host:port of the process that holds the bytes; '' if that serves no other process."""
    step: int
    """The train step that took it, or UNTAGGED."""
    dtype: str
    """torch's name of the dtype: bfloat16, float8_e4m3fn, int32, bool."""
    shape: tuple[int, ...]
    num_bytes: int

    @property
    def incarnation(self) -> int:
        """The incarnation of the owner that stored it."""
        return self.shard_id >> NUMBER_BITS

    def tagged(self, step: int) -> "RTensor":
        """Return the same handle with `step`; the owner learns it by its store's `take`."""
        return RTensor(self.shard_id, self.owner, step, self.dtype, self.shape, self.num_bytes)

    def to_local(self) -> "ReadOnlyTensor":
        """Return the tensor, read-only, by this process's plane; TensorError if it cannot be
        fetched."""
        # The plane depends on handles; the reverse is a convenience for callers.
        from rollmesh.tensors.plane import current  # noqa: PLC0415 - circular import

        local: ReadOnlyTensor = current().localize(self)
        return local


class Content(msgspec.Struct, frozen=True, eq=False, gc=False):
    """The bytes of one shard in this process."""

    dtype: str
    shape: tuple[int, ...]
    data: np.ndarray
    """uint8 [num_bytes], contiguous. Its memory is kept as long as this very array exists: arrays
    derived from it refer to it."""


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
    """Return a random number for a new owner; never 0."""
    return secrets.randbelow((1 << INCARNATION_BITS) - 1) + 1


def pack(handles: Sequence[RTensor]) -> bytes:
    """Encode handles as one message, in order."""
    owners, owner_of = _numbered([each.owner for each in handles])
    kinds, kind_of = _numbered([(each.dtype, each.shape, each.num_bytes) for each in handles])
    shard_ids = [each.shard_id for each in handles]
    steps = [each.step for each in handles]
    return _encoder.encode(_Pack(PACK_LAYOUT, owners, kinds, shard_ids, steps, owner_of, kind_of))


def unpack(buffer: bytes | bytearray | memoryview) -> list[RTensor]:
    """Decode `pack`; WireError for anything else."""
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
    """Return the distinct values in order of appearance, and for each value its index."""
    places: dict[_Value, int] = {}
    numbers = [places.setdefault(value, len(places)) for value in values]
    return list(places), numbers


_Leaf = TypeVar("_Leaf")
_Parts = Sequence[object] | dict[Any, object]

_SCALARS = frozenset({int, float, bool, str, bytes, type(None)})
"""Skipped early: batches also hold token ids as plain lists."""


def collect(nested: object, kind: type[_Leaf]) -> list[_Leaf]:
    """Return every leaf of `kind`, in the order of traversal, each object once."""
    return list(_Traversal(nested, kind).leaves.values())


def collect_shards(nested: object) -> dict[str, list[int]]:
    """Return the ids of all shards that `nested` has handles of, by owner, each once."""
    by_owner: dict[str, dict[int, None]] = {}
    for handle in collect(nested, RTensor):
        by_owner.setdefault(handle.owner, {})[handle.shard_id] = None
    return {owner: list(ids) for owner, ids in by_owner.items()}


def transform(
    nested: Any, kind: type[_Leaf], change: Callable[[list[_Leaf]], Sequence[object]]
) -> Any:
    """Replace every leaf of `kind` in `nested`; `change` gets all of them at once, as from
    `collect`, and is not called if there are none."""
    walk = _Traversal(nested, kind)
    if not walk.leaves:
        return nested
    changed = change(list(walk.leaves.values()))
    return walk.rebuilt(nested, dict(zip(walk.leaves, changed, strict=True)))


class _Traversal(Generic[_Leaf]):
    """Traverse down to the leaves at once, and rebuild with replaced leaves.

    A container's parts are read once, since a mapping may create them on access, and kept, since
    everything is identified by id().
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
        """Return `value` with known parts replaced, by id(), from `done`."""
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
    """Return the parts of a container, by name if it has names; empty if it is none."""
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
        # It cannot be copied, or does not accept items.
        return dict(old) | changes
    else:
        return new  # type: ignore[no-any-return]  # its type is the old one's
