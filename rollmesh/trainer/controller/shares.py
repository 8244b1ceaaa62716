"""Rows dealt over data-parallel heads: whole groups, as even in length as rounds can make them.

    groups, the longest first, in rounds of one per head: in each the longest goes to whom has least
    groups in several parts (minibatches, say): one part after the other, each in rounds of its own

Invariants: every row is at exactly one head, and rows of a group stand together there in their
order; all heads have the same number of groups, of every part; the lengths of two heads, padding
counted, differ by no more than the groups of some one round do, so never by more than the longest
group from the shortest (of two heads the one behind gets the longer group, so a round narrows their
distance, or turns it and then it is within that round's own spread). The same input is dealt alike
everywhere. Pure; driven by dispatch.py.
"""

from collections.abc import Hashable, Sequence
from typing import Literal

import msgspec

from rollmesh.core.errors import DispatchError

Uneven = Literal["refuse", "pad"]
"""What becomes of groups whose number no head count divides."""


class Share(msgspec.Struct, frozen=True):
    """What one head gets."""

    rows: tuple[int, ...]
    """Which rows, group by group; then padding, which repeats rows that some head has."""
    num_real: int
    """How many of them are no padding."""

    def row_weights(self) -> list[float]:
        """1 for each row of its own, 0 for padding."""
        return [1.0] * self.num_real + [0.0] * (len(self.rows) - self.num_real)


def deal(
    lengths: Sequence[int],
    groups: Sequence[Hashable],
    num_heads: int,
    uneven: Uneven,
    parts: Sequence[Hashable] | None = None,
) -> tuple[Share, ...]:
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

    def share(self) -> Share:
        real = [row for rows in sorted(self.groups) for row in rows]
        return Share((*real, *self.padding), len(real))


def _longest_first(group: tuple[int, list[int]]) -> tuple[int, int]:
    length, rows = group
    return -length, rows[0]


def _least_first(hand: _Hand) -> tuple[int, int]:
    return hand.length, hand.place


def _by_place(hand: _Hand) -> int:
    return hand.place
