"""Whose turn it is where shares are no whole bundles: earliest deadline first, by what each lacks.

Owns what a turn is. A share of 2.4 bundles is two, and of a third one a slice now and then, for two
fifths of the time. Credit is what a pipeline should have had and has not, in bundle seconds. It may
have a slice when that would not put it further ahead than it would be behind without; and among
those that may, the one that would first be a whole slice behind comes first. (Tijdeman 1980, the
chairman assignment problem: so nobody comes to lack more than one slice, where to give the next one
to whom lacks most leaves a lag that grows with their number.)

Invariant: pure; seconds in, an order out. Driven by fair.py.
"""

import math
from typing import NamedTuple

ROUNDING = 1e-2
"""Of a bundle: a share so close to a whole number is that number."""


class Turn(NamedTuple):
    """Where one pipeline stands against its share; made by turn_of."""

    share: float
    """In bundles, what it should have now."""
    credit_s: float
    """Bundle seconds that it lacks."""
    lower: int
    """Bundles that it should have at all times."""
    upper: int
    """With its slice of one more; nobody's share is so small that it never gets one."""

    def may_have(self, slice_s: float) -> bool:
        """Whether a slice is due to it at all."""
        part = self.share - self.lower
        return self.credit_s + part * slice_s > 0.0

    def deadline_s(self, slice_s: float) -> float:
        """From now, until it lacks a whole slice if it has none."""
        part = self.share - self.lower
        return (slice_s - self.credit_s) / part if part > 0.0 else math.inf

    def order(self, slice_s: float) -> tuple[bool, float]:
        """The lower, the more a slice is its own."""
        return not self.may_have(slice_s), self.deadline_s(slice_s)


def turn_of(share: float, credit_s: float) -> Turn:
    """Of who should have so much now and lacks so much."""
    upper = max(math.ceil(share - ROUNDING), 1 if share > 0.0 else 0)
    return Turn(share, credit_s, math.floor(share + ROUNDING), upper)
