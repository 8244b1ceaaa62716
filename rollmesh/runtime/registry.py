"""The scopes of a worker or a gateway, and how their runtime is put together.

A scope that has ended leaves nothing here but, for a while, its name.
"""

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from rollmesh.core.clock import Clock, SystemClock
from rollmesh.core.config import Config
from rollmesh.core.errors import TrajectoryEnded
from rollmesh.core.ids import GroupId, RolloutId
from rollmesh.core.types import SamplingPolicy
from rollmesh.engine.view import FleetView
from rollmesh.runtime.chat import compile_rotating
from rollmesh.runtime.families import choose_family
from rollmesh.runtime.images import images
from rollmesh.runtime.prompts import Prompts
from rollmesh.runtime.restore import StoredSession
from rollmesh.runtime.sampler import Sampler, SamplerParts
from rollmesh.runtime.sampling import GenerationSettings
from rollmesh.runtime.scopes import Loan, OpenSession, Scope, ScopeState
from rollmesh.runtime.session import Session
from rollmesh.runtime.session_deps import AnySampler, SessionDeps, SessionKeys, Totals
from rollmesh.runtime.shared_prefixes import SharedPrefixes
from rollmesh.runtime.tokenizer import load_tokenizer
from rollmesh.runtime.tool_calls import StopStrings
from rollmesh.wire.fleet import EngineFaulted

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
        self.deps = SessionDeps(
            sampler,
            prompts,
            clock or SystemClock(),
            max_context_tokens,
            self._totals,
            SharedPrefixes(),
            rotating,
            max_session_bytes=max_session_bytes,
            max_turns_at_once=max_turns_at_once,
        )
        self._session_keys: SessionKeys[Session] = SessionKeys()
        self.on_sealed = self.deps.on_sealed
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
        kept: StoredSession | None = None,
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
            scope = Scope(rollout_id, self.deps, self._session_keys, is_grouped)
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
        return self._session_keys.find(secret)

    def entries(self) -> dict[str, int]:
        """How long each table is; nothing is in them while no rollout is here."""
        scopes = self._scopes.values()
        return {
            "scopes": len(self._scopes),
            "groups": len(self._groups),
            "doors": len(self._session_keys),
            "loans": sum([scope.num_loans for scope in scopes]),
        }

    def cache_entries(self) -> dict[str, int]:
        """What is kept within bounds though no rollout is here."""
        return {
            "ended_rollouts": len(self._ended),
            "openings": self.deps.shared_prefixes.num_openings,
        }

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


GC_THRESHOLDS = (10_000, 100, 50)
"""Collections of young objects now and then, while the cache still has them: ten thousand cost
under 1 ms, fifty thousand 14. Cycles are rare here, so of older ones hardly ever."""


def new_runtime(
    config: Config, view: FleetView, report: Callable[[EngineFaulted], None]
) -> tuple[Runtime, Sampler]:
    """A runtime, and the sampler to close when it ends; faults of engines go to `report`.

    ModelError or ConfigError in one line where the model's folder or renderer is none.
    """
    folder = Path(config.model.path)
    tokenizer = load_tokenizer(folder)
    prompts = Prompts(choose_family(folder, config.model.renderer, tokenizer), tokenizer)
    parts = SamplerParts(
        view=view,
        vocab_size=tokenizer.vocab_size,
        report=report,
        new_matcher=lambda stops: StopStrings(stops, tokenizer.stream()),
        max_inflight=config.engine.max_inflight,
    )
    generation = GenerationSettings(
        retry_window_s=config.interception.retry_window_s,
        engine_wait_s=config.interception.engine_wait_s,
        answer_timeout_s=config.engine.answer_timeout_s,
    )
    sampler = Sampler(parts, generation)
    images.allow_hosts(config.interception.image_hosts)
    lines = config.interception.rotating_lines
    runtime = Runtime(
        sampler,
        prompts,
        config.model.max_context_tokens,
        rotating_lines=lines,
        max_session_bytes=config.interception.max_session_bytes,
        max_turns_at_once=config.interception.max_turns_at_once,
    )
    return runtime, sampler
