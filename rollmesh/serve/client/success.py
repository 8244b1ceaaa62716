"""The rule for which rollouts succeeded, in training runs, evaluations and their displays.

    the environment reports it   metric `success` of Score, 1 or 0; a rollout without it failed
    pass_threshold is set        reward >= pass_threshold
    all rewards seen are 0 or 1  reward == 1
    otherwise                    unknown: success and pass@k are left out

- A reward above 0 is not a success: a dense reward is above 0 for most failures.
- Pure; the rewards seen are those of one environment.
"""

from collections.abc import Mapping

import msgspec

SUCCESS = "success"
"""The metric of Score by which an environment reports success."""


class SuccessRule(msgspec.Struct):
    """The rule for one environment, by what its rollouts have brought so far."""

    pass_threshold: float | None = None
    is_reported: bool = False
    """A rollout had the metric `success`."""
    is_binary: bool = True
    """All rewards were 0 or 1."""

    @property
    def is_known(self) -> bool:
        """Whether the success of a rollout can be decided."""
        return self.is_reported or self.pass_threshold is not None or self.is_binary

    def see(self, reward: float | None, metrics: Mapping[str, float]) -> None:
        """Take note of a rollout; a reward of None is no reward."""
        self.is_reported = self.is_reported or SUCCESS in metrics
        self.is_binary = self.is_binary and reward in (None, 0.0, 1.0)

    def success_of(self, reward: float, metrics: Mapping[str, float]) -> float | None:
        """The rollout's success in [0, 1], 1 where it passed; None where that is unknown."""
        if self.is_reported:
            return min(max(metrics.get(SUCCESS, 0.0), 0.0), 1.0)
        if self.pass_threshold is not None:
            return float(reward >= self.pass_threshold)
        return reward if self.is_binary else None
