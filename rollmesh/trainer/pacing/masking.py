"""A rollout's samples without the tokens that are too old to train.

Invariants: a token that is masked is context like any other that was not sampled: its mask is
False, its log-prob 0, its policy version -1, and no run counts it; a sample with nothing left is
gone; what is left of a rollout weighs as much as the whole did (samples.py says how its samples
share that). Nothing that was given is written to. Pure; driven by stock.py.
"""

import itertools
from collections.abc import Collection, Iterable, Sequence

import msgspec
import numpy as np

from rollmesh.serve.client.samples import Bools, Sample, SampleArrays, SampledRun, lay_plainly


def without_versions(samples: Sequence[Sample], stale: Collection[int]) -> list[Sample]:
    """Of one rollout, in plain memory; tokens of the policy versions `stale` do not train."""
    masks = [each.loss_mask & ~np.isin(each.policy_versions, [*stale]) for each in samples]
    num_left = sum(int(mask.sum()) for mask in masks)
    return [
        _masked(sample, mask, stale, int(mask.sum()) / num_left)
        for sample, mask in zip(samples, masks, strict=True)
        if mask.any()
    ]


def _masked(sample: Sample, mask: Bools, stale: Collection[int], weight: float) -> Sample:
    def fill(arrays: Sequence[SampleArrays]) -> None:
        token_ids, logprobs, policy_versions, loss_mask = arrays[0]
        token_ids[:] = sample.token_ids
        logprobs[:] = np.where(mask, sample.logprobs, 0.0)
        policy_versions[:] = np.where(mask, sample.policy_versions, -1)
        loss_mask[:] = mask

    [laid] = lay_plainly([len(sample.token_ids)], fill)
    runs = _joined(run for run in sample.runs if run.policy_version not in stale)
    return msgspec.structs.replace(
        sample, weight=weight, runs=runs, handle=None, **laid.arrays._asdict()
    )


def _joined(runs: Iterable[SampledRun]) -> tuple[SampledRun, ...]:
    """Neighbours of one origin are one run."""
    return tuple(
        SampledRun(sum(run.num_tokens for run in same), *origin)
        for origin, same in itertools.groupby(runs, lambda run: run.origin)
    )
