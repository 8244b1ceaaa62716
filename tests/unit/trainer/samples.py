"""Samples to train on, written down in one line."""

import itertools
from typing import Any

import numpy as np

from rollmesh.core.ids import GroupId, RolloutId
from rollmesh.serve.client.samples import Sample, SampledRun


def new_sample(
    token_ids: list[int], mask: list[int], seq: int = 0, index: int = 0, **fields: Any
) -> Sample:
    """Make a sample; defaults are log-probs of -1, version 0, reward 0, weight 1, temperature 1."""
    loss_mask = np.array(mask, np.bool_)
    logprobs = np.array(fields.pop("logprobs", np.full(len(mask), -1.0)), np.float32)
    sampled_by = fields.pop("policy_version", 0)
    given: dict[str, Any] = {
        "rollout_id": RolloutId(GroupId("r", seq), index),
        "branch": "main",
        "token_ids": np.array(token_ids, np.int32),
        "logprobs": np.where(loss_mask, logprobs, np.float32(0.0)),
        "loss_mask": loss_mask,
        "policy_versions": np.where(loss_mask, sampled_by, -1).astype(np.int32),
        "runs": tuple(
            SampledRun(len(list(run)), each)
            for each, run in itertools.groupby(
                np.broadcast_to(sampled_by, len(mask))[loss_mask].tolist()
            )
        ),
        "reward": 0.0,
        "weight": 1.0,
        "temperature": 1.0,
    }
    return Sample(**(given | fields))
