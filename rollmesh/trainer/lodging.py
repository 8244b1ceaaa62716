"""What computes on GPUs that are others' in between: there while they are held, and else not.

    built there -> THERE <-> AWAY (its weights and its optimiser are on the host)

Invariant: nothing is decided here, so that who trains and who asks for GPUs see each other through
it alone. Kept by the policy; driven by tenancy.py.
"""

from typing import Protocol


class Lodger(Protocol):
    """See the module."""

    def vacate(self) -> None:
        """Nothing of it is there any more; it may still be saved."""

    def occupy(self) -> None:
        """It computes there again."""
