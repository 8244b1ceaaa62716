"""How long the whole fleet has been able to serve nobody, through no fault of whoever waits.

Owns a sum of seconds: those in which no engine was READY and one was asleep, while its GPUs were
another pipeline's, or was being updated. Invariant: it never runs back. What a rollout may take is
counted without them. Driven by the view's changes; read by rollouts.py.
"""

from rollmesh.core.clock import Clock
from rollmesh.engine.member import UNVERSIONED
from rollmesh.engine.view import FleetView


class FleetPauses:
    """See the module."""

    def __init__(self, view: FleetView, clock: Clock) -> None:
        self._view = view
        self._clock = clock
        self._sum_s = 0.0
        self._since_s: float | None = None
        """Of the pause that is now."""
        view.listeners.append(self._on_table)

    def paused_s(self) -> float:
        """So far, with the pause that is now."""
        now_s = self._clock.now_s()
        return self._sum_s + (0.0 if self._since_s is None else now_s - self._since_s)

    def _on_table(self) -> None:
        self._sum_s = self.paused_s()
        is_paused = self._view.is_paused(UNVERSIONED)
        self._since_s = self._clock.now_s() if is_paused else None
