"""Rows dealt over data-parallel heads: whole groups, as even in length as rounds can make them.

    groups, the longest first, in rounds of one per head: in each the longest goes to whom has least
    groups in several parts (minibatches, say): one part after the other, each in rounds of its own

Invariants: every row is at exactly one head, and rows of a group stand together there in their
order; all heads have the same number of groups, of every part; the lengths of two heads, padding
counted, differ by no more than the groups of some one round do, so never by more than the longest
group from the shortest (of two heads the one behind gets the longer group, so a round narrows their
distance, or turns it and then it is within that round's own spread). The same input is dealt alike
everywhere. Pure; driven by dispatch.py.

A call's arguments for each data-parallel head: lists of handles are cut, all else is copied.

    list that holds an RTensor    its items are the call's rows, dealt by shares.py
    dict, tuple, struct           walked, for such lists
    anything else                 goes to every head as it is, a tensor that stands alone too

All lists of rows of one call are as long as each other, and are cut alike: they are columns. How
long a row is, its handles say (by its token ids, masks and the like), so no tensor is opened here.

Invariants: those of shares.py; what is not cut is the same object at every head. Which heads do
what is decided by nothing but the arguments and the rule. Pure; driven by controller.py.
"""

import math
from collections.abc import Hashable, Sequence
from typing import Any, Literal

import msgspec

from rollmesh.core.errors import DispatchError
from rollmesh.tensors.handles import RTensor
from rollmesh.tensors.nested import collect, transform

Uneven = Literal["refuse", "pad"]
"""What becomes of groups whose number no head count divides."""


class HeadShare(msgspec.Struct, frozen=True):
    """What one head gets."""

    rows: tuple[int, ...]
    """Which rows, group by group; then padding, which repeats rows that some head has."""
    num_real: int
    """How many of them are no padding."""

    def row_weights(self) -> list[float]:
        """1 for each row of its own, 0 for padding."""
        return [1.0] * self.num_real + [0.0] * (len(self.rows) - self.num_real)


def deal_rows(
    lengths: Sequence[int],
    groups: Sequence[Hashable],
    num_heads: int,
    uneven: Uneven,
    parts: Sequence[Hashable] | None = None,
) -> tuple[HeadShare, ...]:
    """The share of each head; the rest says of each row how long it is, whose, and of which part.

    `pad` fills the last round of a part with its shortest group again, whole, so that what reads
    rows in pairs still finds pairs. DispatchError where there are no rows, or `refuse` has reason
    to.
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
    hands = [_Hand(at) for at in range(num_heads)]
    for sums in by_part.values():
        if uneven == "refuse" and len(sums) % num_heads:
            what = "rows" if len(by_group) == len(groups) else "groups"
            raise DispatchError(
                f"{len(sums)} {what} do not divide by {num_heads} heads: choose another number, "
                "or uneven='pad', which fills up with rows of weight 0"
            )
        _deal_part(sums, hands)
    return tuple([hand.share() for hand in sorted(hands, key=_by_place)])


def _deal_part(sums: list[tuple[int, list[int]]], hands: list["_Hand"]) -> None:
    sums.sort(key=_longest_first)
    for start in range(0, len(sums), len(hands)):
        hands.sort(key=_least_first)
        dealt = sums[start : start + len(hands)]
        for hand, (length, rows) in zip(hands, dealt, strict=False):
            hand.length += length
            hand.groups.append(rows)
        shortest, rows = sums[-1]
        for hand in hands[len(dealt) :]:
            hand.length += shortest
            hand.padding += rows


class _Hand:
    """What a head has been dealt so far."""

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


def _least_first(hand: _Hand) -> tuple[int, int]:
    return hand.length, hand.place


def _by_place(hand: _Hand) -> int:
    return hand.place


ROW_WEIGHTS = "row_weights"
"""The keyword by which a padded call tells each head what its rows weigh."""

Column = list[Any]


class DispatchRule(msgspec.Struct, frozen=True, kw_only=True):
    """How rows are dealt."""

    group_size: int = 1
    """So many rows, one after the other, stay at one head: 2 for pairs."""
    groups: Sequence[Hashable] | None = None
    """Or: whose each row is."""
    parts: Sequence[Hashable] | None = None
    """Of which part each row's group is, where every head is to have as many groups of each."""
    lengths: Sequence[int] | None = None
    """How long each row is, where its handles do not say it well."""
    uneven: Uneven = "refuse"
    """`pad`: each head is told `row_weights`, of which padding's are 0."""


class Arguments(msgspec.Struct, frozen=True):
    """Of a call."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}


class Dispatch(msgspec.Struct, frozen=True):
    """A call, cut."""

    parts: tuple[Arguments, ...]
    """One for each head."""
    shares: tuple[HeadShare, ...] | None
    """None where the call has no rows."""


def split_call(arguments: Arguments, num_heads: int, rule: DispatchRule) -> Dispatch:
    """What each head gets; DispatchError where the rows cannot be dealt."""
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
    """The longest of a row's one-dimensional tensors; the elements of its largest, if none is."""
    shapes = [each.shape for each in collect(row, RTensor)]
    flat = [shape[0] for shape in shapes if len(shape) == 1]
    return max(flat) if flat else max(map(math.prod, shapes), default=0)


def _check_unweighed(arguments: Arguments) -> None:
    if ROW_WEIGHTS in arguments.kwargs:
        raise DispatchError(f"{ROW_WEIGHTS} is what a padded call adds: name yours otherwise")


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
    """What a head gets of them; `places` are the columns', by id()."""

    def chosen(lists: list[Column]) -> list[Column]:
        return [[each[row] for row in share.rows] if id(each) in places else each for each in lists]

    args, kwargs = transform((arguments.args, arguments.kwargs), list, chosen)
    return Arguments(args, {**kwargs})


def _rows(columns: list[tuple[str, Column]]) -> list[tuple[Any, ...]]:
    if len({len(column) for _, column in columns}) > 1:
        said = ", ".join(f"{len(column)} in {name}" for name, column in columns)
        raise DispatchError(
            f"the call's lists of tensors differ in length: {said}; a list has one entry per row, "
            "what has not is put into a tuple"
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
