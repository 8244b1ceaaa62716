"""The scopes of a worker: which rollouts are here, and the session of each of them.

Owns every Scope and the doors that lead to sessions. Invariant: scopes and only scopes; when one
has ended nothing of it is left here but, for a while, its name. Driven by the worker or the
gateway, which register and clean up, and by the HTTP edge, which finds sessions.
"""

import sys
from collections import Counter
from collections.abc import Sequence
from functools import partial

from rollmesh.core.clock import Clock, SystemClock
from rollmesh.core.errors import TrajectoryEnded
from rollmesh.core.ids import GroupId, RolloutId
from rollmesh.core.types import SamplingPolicy
from rollmesh.runtime.chat import compile_rotating
from rollmesh.runtime.doors import Doors
from rollmesh.runtime.kit import AnySampler, SessionKit, Totals
from rollmesh.runtime.loans import Loan
from rollmesh.runtime.openings import Openings
from rollmesh.runtime.prompts import Prompts
from rollmesh.runtime.redo import KeptSession
from rollmesh.runtime.scopes import OpenSession, Scope, ScopeState
from rollmesh.runtime.session import Session

MAX_REMEMBERED = 1024
"""Rollouts that have ended, by name: who asks for one is told so."""


class Runtime:
    """One per worker."""

    def __init__(
        self,
        sampler: AnySampler,
        prompts: Prompts,
        max_context_tokens: int,
        clock: Clock | None = None,
        rotating_lines: Sequence[str] = (),
        max_session_bytes: int = sys.maxsize,
        max_turns_at_once: int = sys.maxsize,
    ) -> None:
        """`rotating_lines`: see InterceptionConfig; ConfigError where one is no pattern."""
        self.prompts = prompts
        self._totals = Totals()
        rotating = compile_rotating(rotating_lines)
        self.kit = SessionKit(
            sampler,
            prompts,
            clock or SystemClock(),
            max_context_tokens,
            self._totals,
            Openings(),
            rotating,
            max_session_bytes=max_session_bytes,
            max_turns_at_once=max_turns_at_once,
        )
        self._doors: Doors[Session] = Doors()
        self.on_sealed = self.kit.on_sealed
        """Who is told of each session that is sealed, by its rollout."""
        self._scopes: dict[RolloutId, Scope] = {}
        self._groups: dict[GroupId, list[Scope]] = {}
        """Those that end together."""
        self._ended: dict[RolloutId, None] = {}

    def register_trajectory(
        self,
        rollout_id: RolloutId,
        sampling: SamplingPolicy,
        seed: int,
        *,
        is_grouped: bool = True,
        kept: KeptSession | None = None,
        min_policy_version: int = -1,
    ) -> OpenSession:
        """Open a session for the rollout's agent; a rollout that is run again gets another.

        Its first call waits for weights of `min_policy_version` or newer.
        """
        scope = self._scopes.get(rollout_id)
        if scope is not None and scope.state is ScopeState.LENT:
            scope.give_up("the rollout is run again")
            scope = None
        if scope is None:
            scope = Scope(rollout_id, self.kit, self._doors, is_grouped)
            self._scopes[rollout_id] = scope
            scope.on_end(partial(self._forget, rollout_id))
            if is_grouped:
                self._groups.setdefault(rollout_id.group_id, []).append(scope)
        return scope.begin(sampling, seed, kept, min_policy_version)

    def resolve_trajectory(self, rollout_id: RolloutId) -> Session:
        """The session of the rollout's newest run; TrajectoryEnded once its scope has ended."""
        session = self._scope(rollout_id).session
        assert session is not None
        return session

    def lend(self, rollout_id: RolloutId, borrower: str, *, appends: bool) -> Loan:
        """A key for a child task, to go on from the rollout's transcript, or to the model alone.

        Its scope lives until the loan is released. TrajectoryEnded where that has ended, or waits
        for borrowers to let go.
        """
        return self._scope(rollout_id).lend(borrower, appends=appends)

    def call_in(self, rollout_id: RolloutId) -> None:
        """No child appends to the rollout's transcript any more: it is to be recorded."""
        self._scope(rollout_id).call_in()

    def cleanup_rollout(self, rollout_id: RolloutId) -> None:
        """Its agent has ended, well or not: so does its scope, unless that is its group's.

        Idempotent.
        """
        scope = self._scopes.get(rollout_id)
        if scope is not None:
            scope.close()
            if not scope.is_grouped:
                scope.end()

    def cleanup_group(self, group_id: GroupId) -> None:
        """End the scopes of the group's rollouts, whatever their states. Idempotent."""
        for scope in self._groups.pop(group_id, []):
            scope.end()

    def look_for_leaks(self) -> None:
        """End what waits for borrowers that will not let go; to be called now and then."""
        for scope in [each for each in self._scopes.values() if each.state is ScopeState.LENT]:
            scope.look()

    def find(self, secret: str) -> Session:
        """The session of a secret; SessionError 401 if there is none, 410 if its time is over."""
        return self._doors.find(secret)

    def entries(self) -> dict[str, int]:
        """How long each table is; nothing is in them while no rollout is here."""
        scopes = self._scopes.values()
        return {
            "scopes": len(self._scopes),
            "groups": len(self._groups),
            "doors": len(self._doors),
            "loans": sum([scope.num_loans for scope in scopes]),
        }

    def cache_entries(self) -> dict[str, int]:
        """What is kept within bounds though no rollout is here."""
        return {"ended_rollouts": len(self._ended), "openings": self.kit.openings.num_openings}

    def held(self) -> dict[str, int]:
        """Bytes of all sessions, by what they are."""
        held: Counter[str] = Counter()
        for scope in self._scopes.values():
            for session in scope.sessions():
                held.update(session.held())
        return held

    @property
    def num_calls(self) -> int:
        """Generations started since the start."""
        return self._totals.num_calls

    @property
    def num_tokens(self) -> int:
        """Sampled tokens since the start."""
        return self._totals.num_tokens

    def _scope(self, rollout_id: RolloutId) -> Scope:
        scope = self._scopes.get(rollout_id)
        if scope is None:
            raise TrajectoryEnded(str(rollout_id), was_here=rollout_id in self._ended)
        return scope

    def _forget(self, rollout_id: RolloutId) -> None:
        del self._scopes[rollout_id]
        self._ended[rollout_id] = None
        if len(self._ended) > MAX_REMEMBERED:
            del self._ended[next(iter(self._ended))]
