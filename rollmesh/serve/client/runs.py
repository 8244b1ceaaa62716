"""Where a sample's trained tokens come from: engine, policy version, dialect and fork, run by run.

Owns SampledRun, and how runs are read off a rollout's node table. Invariants: the runs of a sample
are of its trained tokens alone, in their order, each token in one; neighbours differ. A token's
fork is the nearest one at or above its node. Pure; driven by samples.py.
"""

from collections.abc import Sequence

import msgspec

from rollmesh.core.types import DialectName, RolloutRecord
from rollmesh.runtime.samples import Claim


class SampledRun(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive trained tokens of a sample that have all this in common."""

    num_tokens: int
    policy_version: int
    engine: str = ""
    """Its address; '' where nobody wrote it down, as in records of before."""
    dialect: DialectName = ""
    cause: str = ""
    """Of the fork that its prompt stands behind (ForkRow); '' where there is none."""

    @property
    def origin(self) -> tuple[int, str, str, str]:
        """(policy version, engine, dialect, cause)"""
        return self.policy_version, self.engine, self.dialect, self.cause


def causes_of(rollout: RolloutRecord) -> list[str]:
    """For each row of its table the cause of the nearest fork at or above it, or ''."""
    forked = {fork.node: fork.cause for fork in rollout.forks}
    causes: list[str] = []
    for row, node in enumerate(rollout.nodes):
        above = causes[node.parent] if node.parent >= 0 else ""
        causes.append(forked.get(row, above))
    return causes


def runs_of(rollout: RolloutRecord, causes: Sequence[str], claim: Claim) -> tuple[SampledRun, ...]:
    """The runs of a claim's trained tokens; `causes` are those of the rollout's rows."""
    runs: list[SampledRun] = []
    for row in claim.path:
        node = rollout.nodes[row]
        for run in node.policy_versions if row in claim.trained else ():
            engine = rollout.engines[run.engine] if run.engine >= 0 else ""
            origin = run.policy_version, engine, node.dialect, causes[row]
            if runs and runs[-1].origin == origin:
                runs[-1] = SampledRun(runs[-1].num_tokens + run.num_tokens, *origin)
            elif run.num_tokens:
                runs.append(SampledRun(run.num_tokens, *origin))
    return tuple(runs)
