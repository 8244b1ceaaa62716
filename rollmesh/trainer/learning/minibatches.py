"""Which samples make one optimiser step, and what a token of each weighs in its loss.

    token     1 / trained tokens of the minibatch     Yu et al. 2025, "DAPO", eq. 8: every token of
                                                      a minibatch counts as much as any other
    rollout   1 / rollouts of the minibatch, spread   GRPO (Shao et al. 2024, "DeepSeekMath", eq. 3)
              evenly over the rollout's tokens        over rollouts that may be cut into samples

Both count over all ranks. Invariants: a minibatch is whole groups, chosen on the whole batch, so
that neither it nor any weight depends on the number of ranks; a rollout's weight does not grow
with the samples that its graph was cut into, since each of its tokens trains in one of them; the
weights of a minibatch add up to 1. Tokens that are masked later are counted, as zeros: what is
left weighs no more because of them. Pure; driven by the policy.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from rollmesh.core.config import LossWeight
from rollmesh.core.ids import GroupId
from rollmesh.serve.client.samples import Sample


def minibatches_of(samples: Sequence[Sample], num: int) -> list[int]:
    """Which of at most `num` minibatches each of a batch's samples is in; groups in turn."""
    turns: dict[GroupId, int] = {}
    return [turns.setdefault(sample.group_id, len(turns)) % num for sample in samples]


def weigh(samples: Sequence[Sample], rule: LossWeight) -> tuple[npt.NDArray[np.float32], float]:
    """What a trained token of each sample weighs [len(samples)], and what all of them add up to.

    One rank's part of a minibatch; its weights are yet to be divided by the sum over all ranks.
    """
    counts = np.array([sample.loss_mask.sum() for sample in samples], np.float32)
    if rule == "token":
        return np.ones(len(samples), np.float32), float(counts.sum())
    shares = np.array([sample.weight for sample in samples], np.float32)
    return shares / counts, float(len({sample.rollout_id for sample in samples}))
