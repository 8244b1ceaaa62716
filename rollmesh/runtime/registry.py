"""The scopes of a worker: which groups are running, and the session of each of their rollouts.

Owns every live Session and the doors that lead to it. Invariant: scopes and only scopes; when a
group's scope ends nothing of it is left here. Driven by the worker or the gateway, which open and
end scopes, and by the HTTP edge, which finds sessions.
"""

from collections.abc import Sequence

import msgspec

from rollmesh.core.clock import Clock, SystemClock
from rollmesh.core.ids import GroupId, RolloutId, new_id
from rollmesh.core.types import SamplingPolicy
from rollmesh.runtime.chat import compile_rotating
from rollmesh.runtime.doors import Doors, Locks
from rollmesh.runtime.kit import AnySampler, SessionAsk, SessionKit, Totals
from rollmesh.runtime.openings import Openings
from rollmesh.runtime.prompts import Prompts
from rollmesh.runtime.session import Session


class OpenSession(msgspec.Struct, frozen=True):
    """How an agent reaches its session; the secrets are nowhere else."""

    session: Session
    api_key: str
    path_secret: str

    @property
    def session_id(self) -> str:
        return self.session.session_id


class Runtime:
    """One per worker."""

    def __init__(
        self,
        sampler: AnySampler,
        prompts: Prompts,
        max_context_tokens: int,
        clock: Clock | None = None,
        rotating_lines: Sequence[str] = (),
    ) -> None:
        """`rotating_lines`: see InterceptionConfig; ConfigError where one is no pattern."""
        self._totals = Totals()
        rotating = compile_rotating(rotating_lines)
        self._kit = SessionKit(
            sampler,
            prompts,
            clock or SystemClock(),
            max_context_tokens,
            self._totals,
            Openings(),
            rotating,
        )
        self._doors: Doors[Session] = Doors()
        self._groups: dict[GroupId, list[tuple[Session, Locks]]] = {}

    def open_session(
        self, rollout_id: RolloutId, sampling: SamplingPolicy, seed: int
    ) -> OpenSession:
        """A new session in the scope of its group; a rollout that is run again gets another."""
        session = Session(SessionAsk(new_id("s", 6), rollout_id, sampling, seed), self._kit)
        doors = self._doors.make(session)
        self._groups.setdefault(rollout_id.group_id, []).append((session, doors.locks))
        return OpenSession(session, doors.api_key, doors.path_secret)

    def find(self, secret: str) -> Session:
        """The session of a secret; SessionError 401 if there is none."""
        return self._doors.find(secret)

    def end_group(self, group_id: GroupId) -> None:
        """Seal and evict every session of the group, finished or not. Idempotent."""
        for session, locks in self._groups.pop(group_id, []):
            session.seal("its group has ended")
            session.forget()
            self._doors.close(locks)

    @property
    def num_calls(self) -> int:
        """Generations started since the start."""
        return self._totals.num_calls

    @property
    def num_tokens(self) -> int:
        """Sampled tokens since the start."""
        return self._totals.num_tokens

    @property
    def held_bytes(self) -> int:
        """Of all sessions: tokens, log-probs and messages."""
        return sum(entry[0].held_bytes for group in self._groups.values() for entry in group)
