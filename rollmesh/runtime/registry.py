"""The scopes of a worker or a gateway, and the construction of their runtime.

An ended scope leaves nothing here except its name, which is remembered for a while.
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
from rollmesh.engine.backend import backend_factory
from rollmesh.engine.view import FleetView
from rollmesh.runtime.chat import compile_rotating
from rollmesh.runtime.conversation.shared_prefixes import SharedPrefixes
from rollmesh.runtime.generation.sampler import Sampler, SamplerDeps
from rollmesh.runtime.generation.sampling import GenerationSettings
from rollmesh.runtime.images import images
from rollmesh.runtime.restore import StoredSession
from rollmesh.runtime.scopes import Loan, OpenSession, Scope, ScopeState
from rollmesh.runtime.session import Session
from rollmesh.runtime.session_deps import AnySampler, RuntimeCounters, SessionDeps, SessionKeys
from rollmesh.runtime.tokens.families import choose_family
from rollmesh.runtime.tokens.prompts import Prompts
from rollmesh.runtime.tokens.tokenizer import load_tokenizer
from rollmesh.runtime.tokens.tool_calls import StopStrings
from rollmesh.wire.fleet import EngineFaulted

MAX_REMEMBERED = 1024
"""Number of ended rollouts that are remembered by name, so that their callers get
TrajectoryEnded."""


class Runtime:
    """The scopes of one process and what their sessions share."""

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
        """`rotating_lines`: see InterceptionConfig; ConfigError for an invalid pattern."""
        self.prompts = prompts
        self._totals = RuntimeCounters()
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
        self.sessions: SessionKeys[Session] = SessionKeys()
        """Finds the session of a secret."""
        self.on_sealed = self.deps.on_sealed
        """Called with the rollout of each session that is sealed."""
        self._scopes: dict[RolloutId, Scope] = {}
        self._groups: dict[GroupId, list[Scope]] = {}
        """Scopes that end together."""
        self._ended: dict[RolloutId, None] = {}

    def register_trajectory(
        self,
        rollout_id: RolloutId,
        sampling: SamplingPolicy,
        seed: int,
        *,
        is_grouped: bool = True,
        stored: StoredSession | None = None,
        min_policy_version: int = -1,
    ) -> OpenSession:
        """Open a session for a rollout's agent; a rollout that is run again gets another one.

        Its first call waits for weights of `min_policy_version` or newer.
        """
        scope = self._scopes.get(rollout_id)
        if scope is not None and scope.state is ScopeState.LENT:
            scope.give_up("the rollout is run again")
            scope = None
        if scope is None:
            scope = Scope(rollout_id, self.deps, self.sessions, is_grouped)
            self._scopes[rollout_id] = scope
            scope.on_end(partial(self._forget, rollout_id))
            if is_grouped:
                self._groups.setdefault(rollout_id.group_id, []).append(scope)
        return scope.begin(sampling, seed, stored, min_policy_version)

    def resolve_trajectory(self, rollout_id: RolloutId) -> Session:
        """The session of the rollout's newest run; TrajectoryEnded once its scope has ended."""
        session = self._scope(rollout_id).session
        assert session is not None
        return session

    def lend(self, rollout_id: RolloutId, borrower: str, *, appends: bool) -> Loan:
        """A key with which a child task continues the rollout's transcript, or uses only the model.

        The scope is kept until the loan is released. TrajectoryEnded if the scope has ended, or
        waits for borrowers.
        """
        return self._scope(rollout_id).lend(borrower, appends=appends)

    def recall(self, rollout_id: RolloutId) -> None:
        """Recall the loans that append to the rollout's transcript, since it is about to be
        recorded."""
        self._scope(rollout_id).recall()

    def cleanup_rollout(self, rollout_id: RolloutId) -> None:
        """End the rollout's scope, unless its group ends it. Idempotent."""
        scope = self._scopes.get(rollout_id)
        if scope is not None:
            scope.close()
            if not scope.is_grouped:
                scope.end()

    def cleanup_group(self, group_id: GroupId) -> None:
        """End the scopes of the group's rollouts, in any state. Idempotent."""
        for scope in self._groups.pop(group_id, []):
            scope.end()

    def look_for_leaks(self) -> None:
        """End scopes whose borrowers did not release their loans in time; call this
        periodically."""
        for scope in [each for each in self._scopes.values() if each.state is ScopeState.LENT]:
            scope.look()

    def entries(self) -> dict[str, int]:
        """Sizes of the tables that are empty while there is no rollout."""
        scopes = self._scopes.values()
        return {
            "scopes": len(self._scopes),
            "groups": len(self._groups),
            "doors": len(self.sessions),
            "loans": sum([scope.num_loans for scope in scopes]),
        }

    def cache_entries(self) -> dict[str, int]:
        """Sizes of the bounded tables that outlive rollouts."""
        return {
            "ended_rollouts": len(self._ended),
            "openings": self.deps.shared_prefixes.num_openings,
        }

    def held(self) -> dict[str, int]:
        """Bytes of all sessions, by kind."""
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
"""Young objects are collected now and then, while they are in the CPU's cache: ten thousand cost
under 1 ms, fifty thousand 14. Cycles are rare here, so older ones are hardly ever collected."""


def new_runtime(
    config: Config, view: FleetView, report: Callable[[EngineFaulted], None]
) -> tuple[Runtime, Sampler]:
    """A runtime, and the sampler to close when it ends; engine faults are passed to `report`.

    ModelError or ConfigError in one line for an invalid model folder or renderer.
    """
    folder = Path(config.model.path)
    tokenizer = load_tokenizer(folder)
    prompts = Prompts(choose_family(folder, config.model.renderer, tokenizer), tokenizer)
    parts = SamplerDeps(
        view=view,
        vocab_size=tokenizer.vocab_size,
        report=report,
        new_matcher=lambda stops: StopStrings(stops, tokenizer.stream()),
        connect=backend_factory(config.engine.backend),
        max_inflight=config.engine.max_inflight,
    )
    generation = GenerationSettings(
        retry_window_s=config.interception.retry_window_s,
        engine_wait_s=config.interception.engine_wait_s,
        connect_timeout_s=config.engine.connect_timeout_s,
        answer_timeout_s=config.engine.answer_timeout_s,
        abort_timeout_s=config.engine.abort_timeout_s,
        avoid_s=config.engine.avoid_s,
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
