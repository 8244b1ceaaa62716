"""What simulated rollouts record, in a form that proves itself.

Since the next token is a function of weights and context (engine.py), `is_exact` can tell whether a
turn lost, doubled or mislabelled a token on its way over legs, updates and crashes. Plain values.
"""

import msgspec

from rollmesh.core.types import VersionRun
from rollmesh.testing.mesh_sim.engine import next_token


class Turn(msgspec.Struct, frozen=True, array_like=True):
    """One committed generation."""

    context: tuple[int, ...]
    token_ids: tuple[int, ...]
    policy_versions: tuple[VersionRun, ...]
    finish: str
    engines: tuple[str, ...]

    @property
    def index(self) -> int:
        """Of its rollout, which begins every context."""
        return self.context[1]

    def is_exact(self) -> bool:
        """Whether every token is what its version's weights sample after what stands before.

        And was sampled somewhere.
        """
        if not all(0 <= run.engine < len(self.engines) for run in self.policy_versions):
            return False
        versions = [
            run.policy_version for run in self.policy_versions for _ in range(run.num_tokens)
        ]
        if len(versions) != len(self.token_ids) or versions != sorted(versions):
            return False
        context = list(self.context)
        for token, policy_version in zip(self.token_ids, versions, strict=True):
            if token != next_token(policy_version, context):
                return False
            context.append(token)
        return True


class GroupTurns(msgspec.Struct, frozen=True):
    """The body of a simulated GroupFinished."""

    turns: tuple[Turn, ...] = ()
    reason: str = ""
    """Why there are no turns."""
    failed: tuple[int, ...] = ()
    """Rollouts of which nothing trains, by their index."""

    def are_exact(self) -> bool:
        """Whether all turns are, and no session has seen older weights after newer ones."""
        if not all(turn.is_exact() for turn in self.turns):
            return False
        seen: dict[tuple[int, ...], int] = {}
        for turn in self.turns:
            session = turn.context[:2]
            versions = [run.policy_version for run in turn.policy_versions]
            if versions and versions[0] < seen.get(session, 0):
                return False
            seen[session] = max(versions, default=seen.get(session, 0))
        return True

    def rollouts(self) -> tuple[frozenset[int], ...]:
        """The policy versions of the tokens of each rollout that may train."""
        versions: dict[int, set[int]] = {}
        for turn in self.turns:
            known = versions.setdefault(turn.index, set())
            known |= {run.policy_version for run in turn.policy_versions}
        kept = (each for at, each in sorted(versions.items()) if at not in self.failed)
        return tuple(map(frozenset, kept))
