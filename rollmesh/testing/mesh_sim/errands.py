"""Groups that need no engine: they take a while, and some kill the worker that runs them.

Owns the bodies by which a worker knows them. Invariant: an errand ends once, by its time, by an
abort, or with its worker. Driven by worker.py.
"""

from collections.abc import Callable

from rollmesh.core.ids import GroupId
from rollmesh.testing.mesh_sim.kernel import Kernel, Node

PLAIN = b"plain"
POISON = b"poison"
"""Bodies of asks; any other is a task for rollouts."""
LONGEST_S = 0.6


class Errands:
    """Those of one worker."""

    def __init__(
        self,
        kernel: Kernel,
        worker: Node,
        on_end: Callable[[GroupId], None],
        on_kill: Callable[[GroupId], None],
    ) -> None:
        self._kernel = kernel
        self._worker = worker
        self._on_end = on_end
        self._on_kill = on_kill
        self._bodies: dict[GroupId, bytes] = {}

    def __len__(self) -> int:
        return len(self._bodies)

    def begin(self, group_id: GroupId, body: bytes) -> None:
        """Run it; `on_end` or `on_kill` follows, unless it is aborted."""
        self._bodies[group_id] = body
        # The body is an object of its own in each run, and so tells this run from the next.
        delay_s = self._kernel.rng.uniform(0.01, LONGEST_S)
        self._kernel.after(delay_s, lambda: self._is_over(group_id, body), self._worker)

    def abort(self, group_id: GroupId) -> bool:
        """End it now, without a word; False if it does not run here."""
        return self._bodies.pop(group_id, None) is not None

    def _is_over(self, group_id: GroupId, body: bytes) -> None:
        if self._bodies.get(group_id) is not body:
            return
        if body == POISON:
            self._on_kill(group_id)
        else:
            del self._bodies[group_id]
            self._on_end(group_id)
