"""Owners that are no rank of ours and hold shards of our steps: an env's, another trainer's.

    noted by a take --the newest step of it has ended there--> forgotten
    noted by a take --TRIES ends in a row were not heard--> forgotten, its leases have to do

Ranks learn of a step's end from every word of the controller; these are asked. Invariants: an end
that one did not hear is said again with the next, which is a later step and so means both; whoever
does not hear is named in a warning, and never in an exception. Driven by controller.py.
"""

from collections import Counter
from collections.abc import Iterable

from rollmesh.core.errors import AddressError, TensorError
from rollmesh.core.logs import get_logger
from rollmesh.tensors.plane import Plane

log = get_logger()

TRIES = 3


class Elsewhere:
    """See the module."""

    def __init__(self, plane: Plane) -> None:
        """`plane` knows the way to them."""
        self._plane = plane
        self._steps: dict[str, int] = {}
        """The newest that took something at each owner."""
        self._unheard = Counter[str]()

    def note(self, owners: Iterable[str], step: int) -> None:
        """`step` takes shards of these."""
        for owner in owners:
            self._steps[owner] = max(step, self._steps.get(owner, step))

    def end_step(self, step: int) -> None:
        """Tell all that hold something of ours."""
        for owner, newest in list(self._steps.items()):
            try:
                self._plane.end_step_at(owner, step)
            except (TensorError, AddressError) as error:
                self._note_unheard(owner, step, str(error))
                continue
            del self._unheard[owner]
            if newest <= step:
                del self._steps[owner]

    def _note_unheard(self, owner: str, step: int, why: str) -> None:
        self._unheard[owner] += 1
        is_last = self._unheard[owner] >= TRIES
        log.warning("tensors.not_ended", owner=owner, step=step, why=why, is_given_up=is_last)
        if is_last:
            del self._steps[owner], self._unheard[owner]
