"""Client process for test_chaos.py: requests its tasks and resumes from its journal after a kill.

Arguments: the router's address, its folder, the number of tasks, and `keep` or `leave`. It prints a
line for each group that ends, and exits with 0 when every task has ended.
"""

import sys
from collections import Counter
from pathlib import Path

import msgspec

from rollmesh.core.config import JournalConfig
from rollmesh.core.ids import GroupId
from rollmesh.core.journal import Journal
from rollmesh.core.types import SamplingPolicy, Task
from rollmesh.serve.client.client import Arrival, Finished, RolloutClient
from rollmesh.serve.client.journal_entries import AnyEntry, GroupAsked, GroupBooked, GroupKept

GROUP_SIZE = 2
JOURNAL = msgspec.msgpack.Decoder(AnyEntry)


class Tasks:
    """The task of each group, and the tasks that have ended."""

    def __init__(self, num_tasks: int) -> None:
        self.wanted = [f"t{number}" for number in range(num_tasks)]
        self.ended: set[str] = set()
        self.of_group: dict[GroupId, str] = {}

    def take(self, arrival: Arrival) -> None:
        """Record that a group has ended."""
        task_id = self.of_group.pop(arrival.group_id, "")
        if isinstance(arrival, Finished):
            task_id = arrival.record.task.id
            assert [each.reward for each in arrival.record.rollouts] == [1.0] * GROUP_SIZE
        assert task_id not in self.ended, f"{task_id} ended twice"
        self.ended.add(task_id)
        how = "finished" if isinstance(arrival, Finished) else arrival.reason
        sys.stdout.write(f"{task_id} {how}\n")
        sys.stdout.flush()


def main(router: str, folder: Path, num_tasks: int, *, keep: bool) -> None:
    client = RolloutClient(router, JournalConfig(), folder, keep=keep)
    client.start()
    tasks = Tasks(num_tasks)
    tasks.of_group = {group_id: task.id for group_id, task in client.reopened.items()}
    for arrival in client.take(0.0):  # groups that the journal has kept
        tasks.take(arrival)
    under_way = {*tasks.of_group.values(), *tasks.ended}
    for task_id in tasks.wanted:
        if task_id not in under_way:
            tasks.of_group[ask(client, task_id)] = task_id
    while len(tasks.ended) < num_tasks:
        for arrival in client.take(1.0):
            tasks.take(arrival)
    client.close()


def ask(client: RolloutClient, task_id: str) -> GroupId:
    """Request a group of rollouts that take a while."""
    task = Task(id=task_id, data={"text_seed": int(task_id[1:])})
    return client.ask(
        task, env="storm:Storm", num_samples=GROUP_SIZE, sampling=SamplingPolicy(), seed=7
    )


def check_journal(folder: Path) -> None:
    """Check that every requested group ended exactly once at its sink."""
    requested: set[GroupId] = set()
    ends: Counter[GroupId] = Counter()
    journal = Journal(folder / "journal", 2**20, fsync=False)
    for _, frames in journal.replay():
        match JOURNAL.decode(frames[0]):
            case GroupAsked(group_id):
                requested.add(group_id)
            case GroupKept(group_id) | GroupBooked(group_id):
                ends[group_id] += 1
    journal.close()
    assert set(ends.values()) == {1}
    assert requested <= set(ends)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), keep=sys.argv[4] == "keep")
