"""The groups that wait for their step, and the memory that their samples lie in.

    cut --keep--> IN THE ROOM --take--> in its step
    cut --keep--> ASIDE, in plain memory, where the room was full --take--> moved in, in its step
    IN THE ROOM --a batch wants its place--> ASIDE
    cut, or waiting --clear--> gone

Invariants: a batch that is taken lies in the room, all of it; what cannot lie there waits aside and
is copied when its step comes, so that a full room costs time and never a group; of a group that is
cleared nothing is left in the room. How many groups wait is the pacing's word, and so is how much
may lie aside. Driven by pacer.py, on the train loop's thread.
"""

from collections.abc import Collection, Sequence
from itertools import islice

import msgspec

from rollmesh.core.errors import ConfigError, StoreFull
from rollmesh.core.ids import GroupId
from rollmesh.core.logs import get_logger
from rollmesh.core.types import Branch, GroupRecord, RolloutRecord
from rollmesh.serve.client.arrivals import Finished
from rollmesh.serve.client.samples import BYTES_PER_TOKEN, Lay, Sample, cut, lay_plainly
from rollmesh.trainer.pacing.masking import without_versions
from rollmesh.trainer.pacing.room import Room, moved

log = get_logger()


class ReadyGroup(msgspec.Struct, eq=False):
    """A finished group whose samples are cut; the buffers in which it came are gone."""

    group_id: GroupId
    record: GroupRecord
    worker_id: str
    samples: list[list[Sample]]
    """One list per rollout of the record; empty where it does not train."""
    num_masked: dict[int, int] = {}
    """Sampled tokens that are too old to train, by the rollout's index."""

    def all_samples(self) -> list[Sample]:
        return [sample for rollout in self.samples for sample in rollout]

    def pairs(self) -> list[tuple[RolloutRecord, list[Sample]]]:
        """Each rollout with its samples."""
        return list(zip(self.record.rollouts, self.samples, strict=True))


class Stock:
    """See the module."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._waiting: dict[GroupId, ReadyGroup] = {}
        """In the order of their arrival."""
        self._was_full = False

    def cut(self, finished: Finished, branches: Collection[Branch]) -> ReadyGroup:
        """A group that may train, in the room if there is any."""
        try:
            return cut_group(finished, branches, self._room.lay)
        except StoreFull as full:
            if not self._was_full:
                self._was_full = True
                effect = "groups that find no room are copied when their step comes"
                log.warning("room.full", why=str(full), effect=effect)
            return cut_group(finished, branches, lay_plainly)

    def keep(self, group: ReadyGroup) -> None:
        """It waits for its step."""
        self._waiting[group.group_id] = group

    def waiting(self) -> Collection[ReadyGroup]:
        """All that wait."""
        return self._waiting.values()

    def take(self, group_ids: Sequence[GroupId]) -> list[ReadyGroup]:
        """The groups of a step, all in the room; ConfigError, and all still wait, where they are
        more than it can hold."""
        groups = [self._waiting[group_id] for group_id in group_ids]
        for group in groups:
            while not self._is_inside(group):
                try:
                    self._move(group, self._room.lay)
                except StoreFull as full:
                    self._make_room(groups, full)
        for group_id in group_ids:
            del self._waiting[group_id]
        return groups

    def mask(self, group_id: GroupId, stale: Collection[int]) -> ReadyGroup:
        """One that waits, whose tokens of the policy versions `stale` do not train any more."""
        group = self._waiting[group_id]
        for at, (rollout, samples) in enumerate(group.pairs()):
            left = without_versions(samples, stale)
            num_masked = _num_trained(samples) - _num_trained(left)
            if num_masked:
                self._room.clear(samples)
                group.samples[at], group.num_masked[rollout.index] = left, num_masked
        return group

    def give_up(self, group_id: GroupId) -> ReadyGroup:
        """One that will not be taken, and is to be cleared."""
        return self._waiting.pop(group_id)

    def clear(self, groups: Collection[ReadyGroup]) -> None:
        """Nothing of them stays in the room."""
        self._room.clear([sample for group in groups for sample in group.all_samples()])

    def _is_inside(self, group: ReadyGroup) -> bool:
        return all(map(self._room.holds, group.all_samples()))

    def _make_room(self, groups: Sequence[ReadyGroup], full: StoreFull) -> None:
        """Put the newest aside that is not of `groups`."""
        others = [each for each in self._waiting.values() if each not in groups]
        inside = [each for each in others if self._is_inside(each)]
        if not inside:
            raise _too_large(groups, full) from None
        samples = inside[-1].all_samples()
        self._move(inside[-1], lay_plainly)
        self._room.clear(samples)

    def _move(self, group: ReadyGroup, lay: Lay) -> None:
        samples = iter(moved(group.all_samples(), lay))
        group.samples = [list(islice(samples, len(rollout))) for rollout in group.samples]


def cut_group(finished: Finished, branches: Collection[Branch], lay: Lay) -> ReadyGroup:
    """What a group gives to train, laid by `lay`."""
    record = finished.record
    by_rollout: dict[int, list[Sample]] = {rollout.index: [] for rollout in record.rollouts}
    parts = (finished.token_ids, finished.logprobs, branches, lay)
    for sample in cut(finished.group_id, record, *parts).samples:
        by_rollout[sample.rollout_id.index].append(sample)
    samples = list(by_rollout.values())
    return ReadyGroup(finished.group_id, record, finished.worker_id, samples)


def _num_trained(samples: Sequence[Sample]) -> int:
    """Tokens of them that train."""
    return sum(int(sample.loss_mask.sum()) for sample in samples)


def _too_large(groups: Sequence[ReadyGroup], full: StoreFull) -> ConfigError:
    lengths = [len(sample.token_ids) for group in groups for sample in group.all_samples()]
    wanted = f"a step's {len(lengths):,} samples are {BYTES_PER_TOKEN * sum(lengths):,} bytes"
    room = f"ranks share {full.max_bytes:,}{full.why and f' ({full.why})'}"
    remedy = "lower trainer.groups_per_step or trainer.samples_per_group, or enlarge /dev/shm"
    return ConfigError(f"{wanted}, and {room}: {remedy} (in a container by --shm-size)")
