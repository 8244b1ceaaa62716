"""Finished groups that wait for their train step, and the memory that holds their samples.

    cut --keep--> ALLOCATED --take--> in its step
    cut --keep--> SPILLED, to plain memory, where the allocator was full --take--> copied back
    ALLOCATED --a batch needs the memory--> SPILLED
    cut, or waiting --clear--> gone

- A sample is written once into its allocator's memory, and stays until it is cleared or its step
  ends; all of a batch that is taken is there.
- A full allocator costs time, never a group; the pacing bounds how much waits.
- A masked token is context like any token that was not sampled: loss mask False, log-prob 0, policy
  version -1, counted by no run. What is left of a rollout keeps the weight of the whole rollout.
"""

import itertools
from collections.abc import Collection, Iterable, Sequence
from itertools import islice
from typing import Protocol

import msgspec
import numpy as np

from rollmesh.core.errors import ConfigError, StoreFull
from rollmesh.core.ids import GroupId
from rollmesh.core.logs import get_logger
from rollmesh.core.types import Branch, GroupRecord, RolloutRecord
from rollmesh.serve.client.arrivals import Finished
from rollmesh.serve.client.samples import (
    BYTES_PER_TOKEN,
    Bools,
    Fill,
    Laid,
    Lay,
    Sample,
    SampleArrays,
    SampledRun,
    arrays_in,
    cut,
    lay_plainly,
)
from rollmesh.tensors.store import OwnerStore, ShardSpec

log = get_logger()


class SampleAllocator(Protocol):
    """Memory for samples from their arrival until their step has ended."""

    def allocate(self, lengths: Sequence[int], fill: Fill) -> list[Laid]:
        """Allocate and fill samples, see `Lay`; raise StoreFull, and allocate none, if they do not
        fit."""

    def holds(self, sample: Sample) -> bool:
        """Whether the sample is in this memory, and not spilled."""

    def clear(self, samples: Sequence[Sample]) -> None:
        """Free samples that will not train; ignore samples that are not in this memory."""


class LocalAllocator:
    """Arrays of this process, without a bound, for a policy that trains in it."""

    def allocate(self, lengths: Sequence[int], fill: Fill) -> list[Laid]:
        return lay_plainly(lengths, fill)

    def holds(self, sample: Sample) -> bool:
        del sample
        return True

    def clear(self, samples: Sequence[Sample]) -> None:
        """Do nothing: their memory is freed with the arrays."""


class StoreAllocator:
    """Shards of this process's store, within its budget, whose handles are sent to ranks."""

    def __init__(self, store: OwnerStore) -> None:
        self._store = store

    def allocate(self, lengths: Sequence[int], fill: Fill) -> list[Laid]:
        sizes = [BYTES_PER_TOKEN * each for each in lengths]
        with self._store.reserve([ShardSpec("uint8", (size,), size) for size in sizes]) as reserved:
            fill([arrays_in(memory) for memory in reserved.memory])
            handles = reserved.commit()
        return [Laid(arrays_in(self._store.read(each.shard_id).data), each) for each in handles]

    def holds(self, sample: Sample) -> bool:
        return sample.handle is not None

    def clear(self, samples: Sequence[Sample]) -> None:
        self._store.clear([each.handle.shard_id for each in samples if each.handle is not None])


def copy_samples(samples: Sequence[Sample], allocate: Lay) -> list[Sample]:
    """Copy samples to memory that `allocate` allocates; raise what `allocate` raises."""

    def fill(places: Sequence[SampleArrays]) -> None:
        for sample, place in zip(samples, places, strict=True):
            for name, array in place._asdict().items():
                array[:] = getattr(sample, name)

    laid = allocate([len(sample.token_ids) for sample in samples], fill)
    return [
        msgspec.structs.replace(sample, handle=each.handle, **each.arrays._asdict())
        for sample, each in zip(samples, laid, strict=True)
    ]


def without_versions(samples: Sequence[Sample], stale: Collection[int]) -> list[Sample]:
    """Copy a rollout's samples to plain memory with tokens of the policy versions `stale` masked; a
    sample with nothing left is omitted. The arguments are not changed."""
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
    """Merge neighbouring runs of one origin."""
    return tuple(
        SampledRun(sum(run.num_tokens for run in same), *origin)
        for origin, same in itertools.groupby(runs, lambda run: run.origin)
    )


class ReadyGroup(msgspec.Struct, eq=False):
    """A finished group with its samples; the buffers in which it arrived are freed."""

    group_id: GroupId
    record: GroupRecord
    worker_id: str
    samples: list[list[Sample]]
    """One list per rollout of the record; empty if it does not train."""
    num_masked: dict[int, int] = {}
    """Sampled tokens that are too old to train, by rollout index."""

    def all_samples(self) -> list[Sample]:
        return [sample for rollout in self.samples for sample in rollout]

    def pairs(self) -> list[tuple[RolloutRecord, list[Sample]]]:
        """(rollout, samples) of each rollout."""
        return list(zip(self.record.rollouts, self.samples, strict=True))


class ReadyQueue:
    """Groups that wait for their step."""

    def __init__(self, allocator: SampleAllocator) -> None:
        self._allocator = allocator
        self._waiting: dict[GroupId, ReadyGroup] = {}
        """In order of arrival."""
        self._was_full = False

    def cut(self, finished: Finished, branches: Collection[Branch]) -> ReadyGroup:
        """Return the group with samples, in the allocator's memory if they fit."""
        try:
            return cut_group(finished, branches, self._allocator.allocate)
        except StoreFull as full:
            if not self._was_full:
                self._was_full = True
                effect = "groups that do not fit are copied when their step comes"
                log.warning("allocator.full", why=str(full), effect=effect)
            return cut_group(finished, branches, lay_plainly)

    def keep(self, group: ReadyGroup) -> None:
        """Keep a group until its step."""
        self._waiting[group.group_id] = group

    def waiting(self) -> Collection[ReadyGroup]:
        """All waiting groups."""
        return self._waiting.values()

    def take(self, group_ids: Sequence[GroupId]) -> list[ReadyGroup]:
        """Remove and return the groups of a step, all in the allocator's memory; raise ConfigError,
        and remove none, if they are more than it can hold."""
        groups = [self._waiting[group_id] for group_id in group_ids]
        for group in groups:
            while not self._is_allocated(group):
                try:
                    self._move(group, self._allocator.allocate)
                except StoreFull as full:
                    self._spill_newest(groups, full)
        for group_id in group_ids:
            del self._waiting[group_id]
        return groups

    def mask(self, group_id: GroupId, stale: Collection[int]) -> ReadyGroup:
        """Mask tokens of the policy versions `stale` in a waiting group."""
        group = self._waiting[group_id]
        for at, (rollout, samples) in enumerate(group.pairs()):
            left = without_versions(samples, stale)
            num_masked = _num_trained(samples) - _num_trained(left)
            if num_masked:
                self._allocator.clear(samples)
                group.samples[at], group.num_masked[rollout.index] = left, num_masked
        return group

    def pop(self, group_id: GroupId) -> ReadyGroup:
        """Remove a group that will not train; the caller clears it."""
        return self._waiting.pop(group_id)

    def clear(self, groups: Collection[ReadyGroup]) -> None:
        """Free the samples of these groups."""
        self._allocator.clear([sample for group in groups for sample in group.all_samples()])

    def _is_allocated(self, group: ReadyGroup) -> bool:
        return all(map(self._allocator.holds, group.all_samples()))

    def _spill_newest(self, groups: Sequence[ReadyGroup], full: StoreFull) -> None:
        """Spill the newest waiting group that is not one of `groups`."""
        others = [each for each in self._waiting.values() if each not in groups]
        inside = [each for each in others if self._is_allocated(each)]
        if not inside:
            raise _too_large(groups, full) from None
        samples = inside[-1].all_samples()
        self._move(inside[-1], lay_plainly)
        self._allocator.clear(samples)

    def _move(self, group: ReadyGroup, allocate: Lay) -> None:
        samples = iter(copy_samples(group.all_samples(), allocate))
        group.samples = [list(islice(samples, len(rollout))) for rollout in group.samples]


def cut_group(finished: Finished, branches: Collection[Branch], allocate: Lay) -> ReadyGroup:
    """Return the group with its samples, allocated by `allocate`."""
    record = finished.record
    by_rollout: dict[int, list[Sample]] = {rollout.index: [] for rollout in record.rollouts}
    parts = (finished.token_ids, finished.logprobs, branches, allocate)
    for sample in cut(finished.group_id, record, *parts).samples:
        by_rollout[sample.rollout_id.index].append(sample)
    samples = list(by_rollout.values())
    return ReadyGroup(finished.group_id, record, finished.worker_id, samples)


def _num_trained(samples: Sequence[Sample]) -> int:
    """Number of trained tokens."""
    return sum(int(sample.loss_mask.sum()) for sample in samples)


def _too_large(groups: Sequence[ReadyGroup], full: StoreFull) -> ConfigError:
    lengths = [len(sample.token_ids) for group in groups for sample in group.all_samples()]
    wanted = f"a step's {len(lengths):,} samples are {BYTES_PER_TOKEN * sum(lengths):,} bytes"
    allocator = f"ranks share {full.max_bytes:,}{full.why and f' ({full.why})'}"
    remedy = "lower trainer.groups_per_step or trainer.samples_per_group, or enlarge /dev/shm"
    return ConfigError(f"{wanted}, and {allocator}: {remedy} (in a container by --shm-size)")
