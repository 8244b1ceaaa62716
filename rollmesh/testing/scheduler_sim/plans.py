"""What a simulated pipeline does, step by step: its size, its lengths, and the order of its asks.

Invariants: a plan is a value, drawn once from a seed; lengths are drawn anew for each step.
Driven by fleet.py; carried out by tenant.py.
"""

import enum
import random

import msgspec

from rollmesh.wire.scheduling import GpuPriority, PipelineSpec

SIGMA = 0.8
"""Of the logarithm of lengths: the longest of sixteen takes some five times the middle one."""


class Boundary(enum.StrEnum):
    """How a pipeline goes from its rollouts to its training and back."""

    CLEARS = "clears"
    """Its progress ends and that closes the demand; each cluster is asked for and given back."""
    CHAINS = "chains"
    """It gives one thing up for the next at once, all around."""
    SIGNALS = "signals"
    """It keeps its engines while it trains, and says before each step what is to come."""


class TenantPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One pipeline."""

    spec: PipelineSpec
    num_steps: int = 3
    num_rollouts: int = 8
    median_s: float = 1.5
    """Of a rollout."""
    per_engine: int = 4
    """Rollouts that one engine samples at a time."""
    phases: tuple[tuple[str, GpuPriority, float], ...] = ()
    """Of training: cluster, priority, seconds."""
    boundary: Boundary = Boundary.CLEARS
    says_estimate: bool = True
    starts_s: float = 0.0
    leaves: bool = True
    """It is unregistered when it has done all."""

    def lengths(self, rng: random.Random) -> list[float]:
        """Seconds of each rollout of a step."""
        return [
            self.median_s * rng.lognormvariate(0.0, SIGMA)  # long tails
            for _ in range(self.num_rollouts)
        ]
