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

    def oldest_version(self) -> int:
        """The oldest policy version of any token."""
        return min(run.policy_version for turn in self.turns for run in turn.policy_versions)
