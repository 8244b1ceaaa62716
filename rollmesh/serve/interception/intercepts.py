"""The requests of agents that are in flight, by their rollouts.

    register --> here --discard_request, at whatever end--> gone

Owns the table and nothing of what an exchange holds. Invariants: an exchange is here from the
moment that its session is known until it has ended, however it ends; when its session is sealed it
is woken, whatever it waits for: the rest of its body, the engine, or a client that takes nothing.
Driven by exchange.py, and by sessions through the runtime.
"""

from typing import Protocol

from rollmesh.core.ids import RolloutId
from rollmesh.runtime.session import Session, SessionState


class Intercepted(Protocol):
    """An exchange, as the table sees it."""

    def wake(self) -> None:
        """Its session is over: end now."""


class Intercepts:
    """One table per edge."""

    def __init__(self) -> None:
        self._in_flight: dict[int, tuple[Session, Intercepted]] = {}
        self._of_rollout: dict[RolloutId, dict[int, None]] = {}
        self._num_registered = 0

    def __len__(self) -> int:
        """How many are in flight."""
        return len(self._in_flight)

    def register(self, session: Session, exchange: Intercepted) -> int:
        """One more is in flight; the id to discard it by."""
        self._num_registered = request_id = self._num_registered + 1
        self._in_flight[request_id] = session, exchange
        self._of_rollout.setdefault(session.rollout_id, {})[request_id] = None
        return request_id

    def discard_request(self, request_id: int) -> None:
        """It has ended, well or not. Idempotent."""
        found = self._in_flight.pop(request_id, None)
        if found is None:
            return
        rollout_id = found[0].rollout_id
        others = self._of_rollout[rollout_id]
        del others[request_id]
        if not others:
            del self._of_rollout[rollout_id]

    def unregister_rollout(self, rollout_id: RolloutId) -> None:
        """Wake its requests, which end by that; those of a session that goes on are let be.

        Idempotent.
        """
        for request_id in list(self._of_rollout.get(rollout_id, ())):
            session, exchange = self._in_flight[request_id]
            if session.state is SessionState.SEALED:
                exchange.wake()
