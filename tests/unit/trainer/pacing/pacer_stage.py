"""A pacer on a scripted client, and the files in its run folder."""

import itertools
from pathlib import Path

import msgspec

from rollmesh.core.config import StalePolicy
from rollmesh.core.ids import GroupId
from rollmesh.core.types import SamplingPolicy, Task
from rollmesh.testing.client import ScriptedClient
from rollmesh.testing.clock import FakeClock
from rollmesh.trainer.pacing.pacer import Batch, Pacer
from rollmesh.trainer.pacing.requester import RequestSettings
from rollmesh.trainer.reports.records import RunRecords, Tally
from rollmesh.trainer.staleness import StalenessManager, StalenessSettings

ASKING = RequestSettings(
    env="guess", num_samples=4, sampling=SamplingPolicy(), seed=0, branches=("main",)
)
MANY = 10**6


class Stage:
    """A pacer with a batch of two groups and a staleness of one step."""

    def __init__(
        self,
        folder: Path,
        client: ScriptedClient | None = None,
        policy: StalePolicy = "wait",
        num_tasks: int | None = None,
    ) -> None:
        self.client = client or ScriptedClient()
        self.tally = Tally()
        self.folder = folder
        settings = StalenessSettings(
            batch=2 * 4, max_staleness=1, max_concurrent=100 * 4, policy=policy
        )
        tasks = (Task(id=f"t{number}") for number in itertools.islice(itertools.count(), num_tasks))
        self.records = RunRecords(folder, FakeClock())
        reports = (self.records, self.tally)
        self.pacer = Pacer(self.client, StalenessManager(settings), tasks, ASKING, reports)

    def open(self) -> list[GroupId]:
        return list(self.client.asked)

    def batch(self, step: int) -> Batch:
        self.pacer.collect(0.0)
        batch = self.pacer.take(step)
        assert batch is not None
        return batch

    def measured(self, num_rollouts: int) -> list[float]:
        """The rewards of an evaluation."""
        while not self.pacer.measure(num_rollouts):
            self.pacer.collect(0.0)
        return self.tally.measured

    def lost(self) -> int:
        self.tally.num_open = self.pacer.num_open()
        lost: int = self.tally.summary()["num_lost"]
        return lost

    def rows(self, name: str) -> list[dict[str, object]]:
        self.records.flush()
        lines = (self.folder / name).read_bytes().splitlines()
        return [msgspec.json.decode(line) for line in lines]


def staged(tmp_path: Path, policy: StalePolicy) -> Stage:
    """A history in which the weights of steps 0 to 3 have the step as version."""
    stage = Stage(tmp_path, policy=policy)
    for step in range(1, 4):
        stage.pacer.publishing(policy_version=step, step=step)
        stage.pacer.published(step)
    return stage
