"""Records in the files of a run, and the check that all of it was trained exactly once."""

import collections
from pathlib import Path
from typing import Any

import msgspec

from rollmesh.core.files import read_rows
from rollmesh.core.ids import GroupId
from rollmesh.core.journal import Journal
from rollmesh.core.types import Task
from rollmesh.serve.client.journal_entries import AnyEntry, GroupAsked, Published, StepTaken
from rollmesh.wire.frames import decode_ask


class RunHistory:
    """The client journal of a run, from its first record to its last."""

    def __init__(self, run: Path) -> None:
        self.steps: dict[int, tuple[GroupId, ...]] = {}
        self.policy_versions: list[int] = []
        self.asked: list[GroupId] = []
        self.tasks: list[Task] = []
        """Requested tasks, in the order in which they were drawn."""
        self.num_steps_taken = collections.Counter[int]()
        decode = msgspec.msgpack.Decoder(AnyEntry).decode
        journal = Journal(run / "journal", segment_bytes=2**25)
        for _, frames in journal.replay():
            self._add(decode(frames[0]), frames[1:])
        journal.close()

    def _add(self, entry: AnyEntry, frames: list[bytes]) -> None:
        match entry:
            case StepTaken(step, group_ids):
                self.num_steps_taken[step] += 1
                self.steps[step] = group_ids
            case Published(policy_version):
                self.policy_versions.append(policy_version)
            case GroupAsked(group_id):
                self.asked.append(group_id)
                self.tasks.append(decode_ask(frames[0]).task)

    def trained(self) -> list[GroupId]:
        """Ids of all trained groups of all steps."""
        return [group_id for group_ids in self.steps.values() for group_id in group_ids]


def why_not_whole(run: Path, num_steps: int) -> list[str]:
    """Return the faults of a run that has ended: a step or group that was not trained exactly
    once, a rollout that was lost, dropped or recorded twice.

    The journal must still have its first segment.
    """
    history = RunHistory(run)
    summary = msgspec.json.decode((run / "summary.json").read_bytes())
    trained, drops = history.trained(), read_rows(run / "drops.jsonl")
    rollouts = [each["rollout_id"] for each in read_rows(run / "trajectories.jsonl")]
    taken = {step: history.num_steps_taken[step] for step in range(num_steps)}
    found = {
        "steps not taken once": {step: times for step, times in taken.items() if times != 1},
        "steps after the last": sorted(history.num_steps_taken.keys() - taken.keys()),
        "groups trained again": _repeated(trained),
        "rollouts recorded again": _repeated(rollouts),
        "rollouts without a record": summary["num_rollouts"] - len(set(rollouts)),
        "rollouts lost": summary["num_lost"],
        "drops": drops[:3],
    }
    faults = [f"{what}: {value}" for what, value in found.items() if value]
    if (summary["num_steps"], summary["ended"]) != (num_steps, "done"):
        faults.append(f"ended as {summary['ended']} after {summary['num_steps']} steps")
    return faults


def _repeated(ids: list[Any]) -> list[Any]:
    return [each for each, times in collections.Counter(ids).items() if times > 1]
