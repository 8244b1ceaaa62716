"""Each measure against growth, taken away: what the soak's ablations put in its place.

Invariant: a function here reverts one measure and nothing else, by replacing one thing of ours
before the process begins; the code of rollmesh/ has no switch for it. Driven by _soak_worker.py.
"""

from collections.abc import Callable, Sequence

MEASURES: dict[str, Callable[[], None]] = {}
HEAP = ("mallopt", "keeper")
"""The two halves of `trim`: how the heap is laid out, and that it is trimmed."""


def ablate(names: Sequence[str]) -> None:
    """Take these measures away."""
    for name in names:
        MEASURES[name]()
