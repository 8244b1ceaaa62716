"""A call's arguments, and its answers, as one message body: plain values, and handles.

    body = msgpack [layout, packed handles, values]     a handle in the values is its place in the
                                                        pack, a tuple is told from a list

Dicts, lists, tuples, text, bytes, numbers and None arrive as they were sent; a struct arrives as
the dict of its fields, since a receiver makes nothing of types that it was not started with.
Invariants: no tensor travels here; what cannot travel is refused where it is sent, and what arrives
is values or a WireError. Driven by controller.py and rank.py.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from rollmesh.core.errors import DECODE_ERRORS, WireError
from rollmesh.tensors.handles import RTensor, pack, unpack
from rollmesh.tensors.nested import collect, transform
from rollmesh.wire.frames import Buffer

LAYOUT = 1
_HANDLE, _TUPLE = 1, 2
_PLAIN = frozenset({int, float, bool, str, bytes, type(None)})


class _Body(msgspec.Struct, frozen=True, array_like=True, gc=False):
    layout: int
    handles: bytes
    values: msgspec.Raw


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Body)


def encode(value: Any) -> bytes:
    """The body; WireError in one line for what cannot travel."""
    packing = _Packing()
    try:
        values = _encoder.encode(packing.of(value, ""))
    except (OverflowError, TypeError, ValueError, RecursionError) as error:
        raise WireError(f"a call's values cannot travel: {error}") from None
    handles = pack(packing.handles)
    return _encoder.encode(_Body(LAYOUT, handles, msgspec.Raw(values)))


def decode(body: Buffer) -> Any:
    """The inverse of `encode`; WireError in one line on anything else."""
    try:
        told = _decoder.decode(body)
        if told.layout != LAYOUT:
            raise WireError(f"a call's values are in layout {told.layout}, we read {LAYOUT}")
        return _Unpacking(unpack(told.handles)).of(told.values)
    except (*DECODE_ERRORS, TypeError, IndexError) as error:
        raise WireError(f"not a call's values: {error}") from None


def handles_of(values: Any) -> list[RTensor]:
    """Of each shard in `values` one handle, in the order of their places."""
    return list({each.shard_id: each for each in collect(values, RTensor)}.values())


def fill(values: Any, contents: Sequence[Any]) -> Any:
    """`values` with what stands for each of `handles_of` in the handles' places."""
    known = dict(zip([each.shard_id for each in handles_of(values)], contents, strict=True))
    return transform(values, RTensor, lambda handles: [known[each.shard_id] for each in handles])


class _Packing:
    """One body on its way out."""

    def __init__(self) -> None:
        self.handles: list[RTensor] = []
        self._places: dict[tuple[int, int], msgspec.msgpack.Ext] = {}

    def of(self, value: Any, path: str) -> Any:
        if type(value) in _PLAIN:
            return value
        match value:
            case RTensor():
                return self._handle(value)
            case list():
                return [self.of(each, f"{path}[{at}]") for at, each in enumerate(value)]
            case tuple():
                inner = [self.of(each, f"{path}[{at}]") for at, each in enumerate(value)]
                return msgspec.msgpack.Ext(_TUPLE, _encoder.encode(inner))
            case Mapping():
                return {key: self.of(each, f"{path}.{key}") for key, each in value.items()}
            case msgspec.Struct():
                names = value.__struct_fields__
                return {name: self.of(getattr(value, name), f"{path}.{name}") for name in names}
        remedy = "store tensors first (Plane.remotize), and send the handles"
        raise TypeError(f"{path or 'it'} is a {type(value).__name__}; {remedy}")

    def _handle(self, handle: RTensor) -> msgspec.msgpack.Ext:
        key = (handle.shard_id, handle.step)
        known = self._places.get(key)
        if known is None:
            place = len(self.handles).to_bytes(4, "little")
            known = self._places[key] = msgspec.msgpack.Ext(_HANDLE, place)
            self.handles.append(handle)
        return known


class _Unpacking:
    """One body that arrived."""

    def __init__(self, handles: list[RTensor]) -> None:
        self._handles = handles

    def of(self, values: Buffer | msgspec.Raw) -> Any:
        return msgspec.msgpack.decode(values, ext_hook=self._extended)

    def _extended(self, code: int, data: memoryview) -> Any:
        if code == _HANDLE:
            return self._handles[int.from_bytes(data, "little")]
        if code == _TUPLE:
            return tuple(self.of(data))
        raise TypeError(f"a value of kind {code}")
