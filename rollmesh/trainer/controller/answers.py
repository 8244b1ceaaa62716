"""The values of a call on the wire, and the answers of all heads merged into one.

    body = msgpack [layout, packed handles, values]     a handle is its index in the pack

Dicts, lists, tuples, text, bytes, numbers and None arrive unchanged; a struct arrives as the dict
of its fields. No tensor is sent; a value that cannot be sent is refused by the sender.

    list              of a call with rows: one entry per row, in the order of the rows (padding is
                      removed at the rank); of any other call: merged as a tuple is
    dict, tuple       merged by element; the same shape at all heads
    number            reduced over all heads as the caller states
    text, None        the same at all heads

- Every head counts: values that differ without a rule are a DispatchError that names them.
- `mean` is weighted by the number that `Reduce.by` names in each answer, or by the head's rows
  without padding. A head with weight 0 is ignored; if all have, the mean is NaN.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

import msgspec

from rollmesh.core.errors import DECODE_ERRORS, DispatchError, WireError
from rollmesh.tensors.handles import RTensor, collect, pack, transform, unpack
from rollmesh.trainer.controller.dispatch import HeadShare
from rollmesh.wire.frames import Buffer

LAYOUT = 1
_HANDLE, _TUPLE = 1, 2
_PLAIN = frozenset({int, float, bool, str, bytes, type(None)})


class _CallBody(msgspec.Struct, frozen=True, array_like=True, gc=False):
    layout: int
    handles: bytes
    values: msgspec.Raw


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_CallBody)


def encode_values(value: Any) -> bytes:
    """Encode values; raise WireError, one line, for a value that cannot be sent."""
    encoder = _ValueEncoder()
    try:
        values = _encoder.encode(encoder.of(value, ""))
    except (OverflowError, TypeError, ValueError, RecursionError) as error:
        raise WireError(f"a call's values cannot be sent: {error}") from None
    handles = pack(encoder.handles)
    return _encoder.encode(_CallBody(LAYOUT, handles, msgspec.Raw(values)))


def decode_values(body: Buffer) -> Any:
    """Decode what `encode_values` returned; raise WireError, one line, on anything else."""
    try:
        decoded = _decoder.decode(body)
        if decoded.layout != LAYOUT:
            raise WireError(f"a call's values are in layout {decoded.layout}, expected {LAYOUT}")
        return _ValueDecoder(unpack(decoded.handles)).of(decoded.values)
    except (*DECODE_ERRORS, TypeError, IndexError) as error:
        raise WireError(f"not the values of a call: {error}") from None


def handles_of(values: Any) -> list[RTensor]:
    """Return one handle for each shard in `values`, in order of occurrence."""
    return list({each.shard_id: each for each in collect(values, RTensor)}.values())


def fill_handles(values: Any, contents: Sequence[Any]) -> Any:
    """Return `values` with handles replaced; `contents` are in the order of `handles_of`."""
    known = dict(zip([each.shard_id for each in handles_of(values)], contents, strict=True))
    return transform(values, RTensor, lambda handles: [known[each.shard_id] for each in handles])


class _ValueEncoder:
    """Encodes one body."""

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


class _ValueDecoder:
    """Decodes one body."""

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


_Value = TypeVar("_Value")

Reduction = Literal["same", "sum", "mean", "max", "min"]


class Reduce(msgspec.Struct, frozen=True, kw_only=True):
    """How the numbers of answers are reduced over heads."""

    rules: Mapping[str, Reduction] = {}
    """Rules by path: `loss`, `stats.num_tokens`, or '' for an answer that is a number."""
    default: Reduction = "same"
    """Rule of all other numbers."""
    by: str = ""
    """Path of each answer's weight in means; empty: the number of its rows."""


def merge_answers(
    answers: Sequence[Any], shares: Sequence[HeadShare] | None, reduce: Reduce
) -> Any:
    """Return one answer for all heads; `shares` are those of the call, None if it had no rows."""
    merge = _Merge(shares, reduce, _weights(answers, shares, reduce.by))
    whole = merge.of(answers, "")
    unmet = reduce.rules.keys() - merge.used
    if unmet:
        raise DispatchError(f"there is no number at {', '.join(sorted(unmet))} in the answers")
    return whole


def without_padding(answer: Any, num_rows: int, num_real: int, path: str = "") -> Any:
    """Return a head's answer without the padding after the first `num_real` rows.

    Raises DispatchError for a list without exactly one entry per row.
    """
    match answer:
        case list():
            if len(answer) != num_rows:
                raise DispatchError(_uneven(_named(path), answer, num_rows))
            return answer[:num_real]
        case tuple():
            inner = (
                without_padding(e, num_rows, num_real, _below(path, at))
                for at, e in enumerate(answer)
            )
            return tuple(inner)
        case dict():
            return {
                k: without_padding(e, num_rows, num_real, _below(path, k))
                for k, e in answer.items()
            }
    return answer


class _Merge:
    def __init__(
        self, shares: Sequence[HeadShare] | None, reduce: Reduce, weights: Sequence[float]
    ) -> None:
        self._shares = shares
        self._reduce = reduce
        self._weights = weights
        self.used: set[str] = set()
        """Rules that were applied."""

    def of(self, values: Sequence[Any], path: str) -> Any:
        """Merge one value of each head."""
        kind = type(values[0])
        if any(type(value) is not kind for value in values) and not all(map(_is_number, values)):
            kinds = ", ".join(type(value).__name__ for value in values)
            raise DispatchError(f"{_named(path)} is of another type at each head: {kinds}")
        match values[0]:
            case dict():
                return self._dict(values, path)
            case list() if self._shares is not None:
                return self._rows(values, self._shares, path)
            case list():
                return self._sequence(values, path)
            case tuple():
                return tuple(self._sequence(values, path))
            case bool() | int() | float():
                return self._number(values, path)
            case None | str() | bytes():
                return _same(values, path)
            case RTensor():
                raise DispatchError(
                    f"{_named(path)} is a tensor of no row; answer with a list, one per row"
                )
        raise DispatchError(f"{_named(path)} is a {kind.__name__}, which cannot be merged")

    def _dict(self, values: Sequence[Any], path: str) -> dict[Any, Any]:
        if any(value.keys() != values[0].keys() for value in values):
            raise DispatchError(f"{_named(path)} has other keys at each head")
        return {k: self.of([value[k] for value in values], _below(path, k)) for k in values[0]}

    def _sequence(self, values: Sequence[Any], path: str) -> list[Any]:
        if any(len(value) != len(values[0]) for value in values):
            raise DispatchError(f"{_named(path)} has another length at each head")
        return [
            self.of(each, _below(path, at)) for at, each in enumerate(zip(*values, strict=True))
        ]

    def _rows(self, values: Sequence[Any], shares: Sequence[HeadShare], path: str) -> list[Any]:
        whole: dict[int, Any] = {}
        for head, (value, share) in enumerate(zip(values, shares, strict=True)):
            if len(value) != share.num_real:
                raise DispatchError(
                    _uneven(f"{_named(path)} at head {head}", value, share.num_real)
                )
            whole.update(zip(share.rows, value, strict=False))
        return [whole[row] for row in range(len(whole))]

    def _number(self, values: Sequence[float], path: str) -> float:
        rule = self._reduce.rules.get(path)
        if rule:
            self.used.add(path)
        match rule or self._reduce.default:
            case "sum":
                return sum(values)
            case "mean":
                return _mean(values, self._weights)
            case "max":
                return math.nan if any(map(math.isnan, values)) else max(values)
            case "min":
                return math.nan if any(map(math.isnan, values)) else min(values)
            case "same":
                return _same(values, path)


def _weights(
    answers: Sequence[Any], shares: Sequence[HeadShare] | None, by: str
) -> Sequence[float]:
    if not by:
        return [share.num_real for share in shares] if shares else [1] * len(answers)
    weights = []
    for head, answer in enumerate(answers):
        found = answer
        for name in by.split("."):
            found = found.get(name) if isinstance(found, dict) else None
        if not _is_number(found) or not found >= 0:
            raise DispatchError(f"by = {by!r}: head {head} has no such number, or one below 0")
        weights.append(found)
    return weights


def _mean(values: Sequence[float], weights: Sequence[float]) -> float:
    total = sum(weights)
    if not total:
        return math.nan
    # A head with weight 0 may have NaN.
    return (
        sum(value * weight for value, weight in zip(values, weights, strict=True) if weight) / total
    )


def _same(values: Sequence[_Value], path: str) -> _Value:
    first = values[0]
    if any(value != first and not (value != value and first != first) for value in values):
        listed = ", ".join(map(repr, values))
        raise DispatchError(
            f"{_named(path)} differs between heads: {listed}; state how it is reduced"
        )
    return first


def _uneven(name: str, value: list[Any], num_rows: int) -> str:
    what = f"{name} has {len(value)} entries for {num_rows} rows"
    return f"{what}; a list has one for each row, anything else is a tuple"


def _is_number(value: Any) -> bool:
    return isinstance(value, bool | int | float)


def _below(path: str, name: Any) -> str:
    return f"{path}.{name}" if path else str(name)


def _named(path: str) -> str:
    return f"the answer at {path!r}" if path else "the answer"
