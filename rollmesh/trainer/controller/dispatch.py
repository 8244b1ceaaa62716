"""Arguments of a call for each data-parallel head: lists of handles are split, others copied.

    list that holds an RTensor    its items are the call's rows, split over heads
    dict, tuple, struct           searched for such lists
    anything else                 goes to every head unchanged, also a single tensor

All lists of rows of one call have the same length and are split alike: they are columns. The length
of a row is known from the shapes of its handles, so no tensor is read.

    groups, the longest first, in rounds of one per head: in each the longest goes to the head with
    the least so far; groups in several parts (minibatches, say): one part after the other

- Every row is at exactly one head, and rows of a group stay together, in their order. All heads
  have the same number of groups, of every part.
- The lengths of two heads, with padding, differ by at most the spread of one round.
"""

import math
from collections.abc import Hashable, Sequence
from typing import Any, Literal

import msgspec

from rollmesh.core.errors import DispatchError
from rollmesh.tensors.handles import RTensor, collect, transform

Uneven = Literal["refuse", "pad"]
"""Treatment of groups whose number is not a multiple of the heads."""


class HeadShare(msgspec.Struct, frozen=True):
    """The rows of one head."""

    rows: tuple[int, ...]
    """Row indices, group by group; then padding, which repeats rows of some head."""
    num_real: int
    """Number of rows without padding."""

    def row_weights(self) -> list[float]:
        """1 for each real row, 0 for padding."""
        return [1.0] * self.num_real + [0.0] * (len(self.rows) - self.num_real)


def deal_rows(
    lengths: Sequence[int],
    groups: Sequence[Hashable],
    num_heads: int,
    uneven: Uneven,
    parts: Sequence[Hashable] | None = None,
) -> tuple[HeadShare, ...]:
    """Return the share of each head; `lengths`, `groups` and `parts` have an entry for each row.

    `pad` fills the last round of a part with its shortest group again, as a whole, so that pairs of
    rows stay pairs. Raises DispatchError without rows, or for `refuse` if groups do not divide.
    """
    by_group: dict[Hashable, list[int]] = {}
    for row, group in enumerate(groups):
        by_group.setdefault(group, []).append(row)
    if not by_group:
        raise DispatchError("there are no rows to deal: the call's lists are empty")
    by_part: dict[Hashable, list[tuple[int, list[int]]]] = {}
    for rows in by_group.values():
        part = by_part.setdefault(parts[rows[0]] if parts else None, [])
        part.append((sum(lengths[row] for row in rows), rows))
    heads = [_Head(at) for at in range(num_heads)]
    for sums in by_part.values():
        if uneven == "refuse" and len(sums) % num_heads:
            what = "rows" if len(by_group) == len(groups) else "groups"
            raise DispatchError(
                f"{len(sums)} {what} do not divide by {num_heads} heads: choose another number, "
                "or uneven='pad', which fills up with rows of weight 0"
            )
        _deal_part(sums, heads)
    return tuple([head.share() for head in sorted(heads, key=_by_place)])


def _deal_part(sums: list[tuple[int, list[int]]], heads: list["_Head"]) -> None:
    sums.sort(key=_longest_first)
    for start in range(0, len(sums), len(heads)):
        heads.sort(key=_least_first)
        dealt = sums[start : start + len(heads)]
        for head, (length, rows) in zip(heads, dealt, strict=False):
            head.length += length
            head.groups.append(rows)
        shortest, rows = sums[-1]
        for head in heads[len(dealt) :]:
            head.length += shortest
            head.padding += rows


class _Head:
    """The groups that a head has so far."""

    def __init__(self, place: int) -> None:
        self.place = place
        self.length = 0
        self.groups: list[list[int]] = []
        self.padding: list[int] = []

    def share(self) -> HeadShare:
        real = [row for rows in sorted(self.groups) for row in rows]
        return HeadShare((*real, *self.padding), len(real))


def _longest_first(group: tuple[int, list[int]]) -> tuple[int, int]:
    length, rows = group
    return -length, rows[0]


def _least_first(head: _Head) -> tuple[int, int]:
    return head.length, head.place


def _by_place(head: _Head) -> int:
    return head.place


ROW_WEIGHTS = "row_weights"
"""Keyword argument with the weights of a head's rows in a padded call."""

Column = list[Any]


class DispatchRule(msgspec.Struct, frozen=True, kw_only=True):
    """How the rows of a call are split."""

    group_size: int = 1
    """Number of consecutive rows that stay at one head: 2 for pairs."""
    groups: Sequence[Hashable] | None = None
    """Or: the group of each row."""
    parts: Sequence[Hashable] | None = None
    """The part of each row's group, if every head needs as many groups of each part."""
    lengths: Sequence[int] | None = None
    """The length of each row, if its handles do not show it."""
    uneven: Uneven = "refuse"
    """`pad`: each head gets `row_weights`, which are 0 for padding."""


class Arguments(msgspec.Struct, frozen=True):
    """The arguments of a call."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}


class Dispatch(msgspec.Struct, frozen=True):
    """The arguments of a call for each head."""

    parts: tuple[Arguments, ...]
    """One for each head."""
    shares: tuple[HeadShare, ...] | None
    """None if the call has no rows."""


def split_call(arguments: Arguments, num_heads: int, rule: DispatchRule) -> Dispatch:
    """Return the arguments for each head; raise DispatchError if the rows cannot be split."""
    columns = _columns(arguments, RTensor)
    if not columns:
        return Dispatch((arguments,) * num_heads, None)
    rows = _rows(columns)
    lengths = [length_of(row) for row in rows] if rule.lengths is None else rule.lengths
    _check_number("lengths", lengths, len(rows))
    if rule.parts is not None:
        _check_number("parts", rule.parts, len(rows))
    shares = deal_rows(lengths, _groups(rule, len(rows)), num_heads, rule.uneven, rule.parts)
    places = {id(column) for _, column in columns}
    parts = tuple([_part(arguments, share, places) for share in shares])
    if rule.uneven == "pad":
        _check_unweighed(arguments)
        for part, share in zip(parts, shares, strict=True):
            part.kwargs[ROW_WEIGHTS] = share.row_weights()
    return Dispatch(parts, shares)


def dispatch_locally(arguments: Arguments, rule: DispatchRule, kind: type) -> tuple[Arguments, int]:
    """Return the arguments as `split_call` would give them to a single head, where lists of `kind`
    are the rows, and the number of rows; raise DispatchError as `split_call` does."""
    columns = _columns(arguments, kind)
    if not columns:
        return arguments, 0
    num_rows = len(_rows(columns))
    _groups(rule, num_rows)
    if rule.uneven != "pad":
        return arguments, num_rows
    _check_unweighed(arguments)
    weights = {ROW_WEIGHTS: [1.0] * num_rows}
    return Arguments(arguments.args, arguments.kwargs | weights), num_rows


def length_of(row: Any) -> int:
    """Length of a row's longest one-dimensional tensor, else the elements of its largest one."""
    shapes = [each.shape for each in collect(row, RTensor)]
    flat = [shape[0] for shape in shapes if len(shape) == 1]
    return max(flat) if flat else max(map(math.prod, shapes), default=0)


def _check_unweighed(arguments: Arguments) -> None:
    if ROW_WEIGHTS in arguments.kwargs:
        raise DispatchError(f"{ROW_WEIGHTS} is added by a padded call: rename your argument")


def _columns(arguments: Arguments, kind: type) -> list[tuple[str, Column]]:
    """The outermost lists that hold `kind`, each with the name of its argument."""
    named = [(f"argument {at}", value) for at, value in enumerate(arguments.args)]
    return [
        (name, found)
        for name, value in [*named, *arguments.kwargs.items()]
        for found in collect(value, list)
        if collect(found, kind)
    ]


def _part(arguments: Arguments, share: HeadShare, places: set[int]) -> Arguments:
    """The arguments of one head; `places` has the id() of each column."""

    def chosen(lists: list[Column]) -> list[Column]:
        return [[each[row] for row in share.rows] if id(each) in places else each for each in lists]

    args, kwargs = transform((arguments.args, arguments.kwargs), list, chosen)
    return Arguments(args, {**kwargs})


def _rows(columns: list[tuple[str, Column]]) -> list[tuple[Any, ...]]:
    if len({len(column) for _, column in columns}) > 1:
        listed = ", ".join(f"{len(column)} in {name}" for name, column in columns)
        raise DispatchError(
            f"the call's lists of tensors differ in length: {listed}; a list has one entry a row, "
            "use a tuple for anything else"
        )
    return list(zip(*[column for _, column in columns], strict=True))


def _groups(rule: DispatchRule, num_rows: int) -> Sequence[Hashable]:
    if rule.groups is not None:
        _check_number("groups", rule.groups, num_rows)
        return rule.groups
    if num_rows % rule.group_size:
        raise DispatchError(f"{num_rows} rows do not divide into groups of {rule.group_size}")
    return [row // rule.group_size for row in range(num_rows)]


def _check_number(name: str, given: Sequence[Any], num_rows: int) -> None:
    if len(given) != num_rows:
        raise DispatchError(f"{name}: {len(given)} are given for {num_rows} rows")
