"""After a batch was trained nothing of it is reachable, nor of what did not train.

A real train loop with a real client, whose worker and router are the test: it ends each group in
another way, until the loop waits for one that is not answered. Then nothing of them may be left.
"""

import itertools
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollmesh.core.clock import SystemClock
from rollmesh.core.config import Config, load_config
from rollmesh.core.ids import GroupId
from rollmesh.core.types import GroupRecord, Outcome, Task
from rollmesh.serve.client.client import RolloutClient
from rollmesh.testing.client import ANSWER, PROMPT, rollout
from rollmesh.trainer.batches import TokenBatch
from rollmesh.trainer.fencing import FenceAsked
from rollmesh.trainer.loop import Parts, TrainLoop
from rollmesh.trainer.pacer import Batch, Pacer
from rollmesh.trainer.policy import Policy
from rollmesh.trainer.process import asking_of, staleness_of
from rollmesh.trainer.publisher import Probe, PublishReport
from rollmesh.trainer.records import RunRecords, Tally
from rollmesh.trainer.stock import ReadyGroup
from rollmesh.trainer.weights import BackgroundLoop, Weights
from rollmesh.wire.bodies import encode_record
from rollmesh.wire.frames import Packet
from rollmesh.wire.messages import AskGroup, GroupFailed, GroupFinished
from rollmesh.wire.sockets import Dialer
from tests.leftovers import MARK, assert_none_left
from tests.unit.serve.client.fake_router import FakeRouter, next_ack

PATIENCE_S = 30.0
SAMPLES = 2
ROUGH = (
    "good",
    "failed",
    "good",
    "incomplete",
    "good",
    "malformed",
    "twice",
    "stranger's",
    "good",
    "barren",
    "good",
    "foreign",
    "good",
    "old",
    "good",
    "good",
)
"""How groups end, one after the other."""
NUM_STEPS = 5
"""That the good ones make."""


class WatchedRecords(RunRecords):
    """Remembers, weakly, the arrays that it wrote down: the collector does not know those."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, SystemClock())
        self.arrays: list[weakref.ref[Any]] = []

    def rollout(self, *told: Any, **more: Any) -> None:
        for sample in told[3]:
            arrays = (sample.token_ids, sample.logprobs, sample.loss_mask, sample.policy_versions)
            self.arrays += map(weakref.ref, arrays)
        super().rollout(*told, **more)


class WatchedPolicy(Policy):
    """Notes, as a step ends, how many arrays of all that were written down somebody still holds."""

    def __init__(self, config: Config, records: WatchedRecords) -> None:
        super().__init__(config.model.path, config.trainer)
        self.records = records
        self.ends: list[tuple[int, int]] = []
        self.ended = threading.Condition()

    def end_step(self, step: int) -> None:
        super().end_step(step)
        num_held = sum(array() is not None for array in self.records.arrays)
        with self.ended:
            self.ends.append((step, num_held))
            self.ended.notify_all()


class Site:
    """A trainer in a thread, and its mesh by hand."""

    def __init__(self, config: Config, folder: Path) -> None:
        self.folder = folder
        self.router = FakeRouter()
        self.client = RolloutClient(self.router.hub.address, config.journal, folder)
        self.client.start()
        self.worker = Dialer(self.client.address, "w1")
        self.records, self.tally = WatchedRecords(folder), Tally()
        tasks = (Task(id=f"t{number}") for number in itertools.count())
        books = (self.records, self.tally)
        pacer = Pacer(self.client, staleness_of(config), tasks, asking_of(config), books)
        self.background = BackgroundLoop("publisher")
        self.weights = Weights(folder / "weights", 2, self.background)
        self.policy = policy = WatchedPolicy(config, self.records)
        self.fenced: list[FenceAsked] = []
        parts = Parts(self.client, pacer, policy, self.weights, bring, *books, self.fenced.append)
        self.stop = threading.Event()
        self.loop = threading.Thread(target=TrainLoop(config, parts, self.stop).run)
        self.loop.start()

    def close(self) -> None:
        self.stop.set()
        self.loop.join()
        self.background.close()
        self.client.close()
        self.records.close()
        self.worker.close()
        self.router.hub.close()

    def next_ask(self) -> tuple[bytes, AskGroup]:
        route, ask, _ = self.router.expect(AskGroup)
        return route, ask

    def end_next(self, how: str) -> None:
        """End the next group that is asked for, as `how` says."""
        route, ask = self.next_ask()
        group_id, num_samples = ask.group_id, ask.num_samples
        if how == "failed":
            self.router.say(route, GroupFailed(group_id, "env_failed: no such module"))
            return
        newest = self.tally.num_steps + 1
        policy_version = {"foreign": 99, "old": 1}.get(how, newest)
        outcome = Outcome.INFRA_ERROR if how == "barren" else Outcome.COMPLETED
        rollouts = [rollout(at, outcome, (policy_version,)) for at in range(num_samples)]
        body = encode_record(GroupRecord(task=Task(id=MARK.decode()), rollouts=rollouts))
        if how == "malformed":
            body = body[:-3]
        if how == "stranger's":
            self.send(GroupId("another-run", 0), body, num_samples)
        self.send(group_id, body, num_samples, complete=how != "incomplete")
        if how == "twice":
            self.send(group_id, body, num_samples)

    def send(self, group_id: GroupId, body: bytes, num_samples: int, complete: bool = True) -> None:
        token_ids = np.array((PROMPT + ANSWER) * num_samples, np.int32).tobytes()
        logprobs = np.array((-5.5, -5.25) * num_samples, np.float32).tobytes()
        message = GroupFinished(group_id, 1, "w1", complete)
        self.worker.send(Packet(message, "", body, (token_ids, logprobs)))
        next_ack(self.worker)

    def wait_for_steps(self, num_steps: int) -> None:
        policy = self.policy
        with policy.ended:
            assert policy.ended.wait_for(lambda: len(policy.ends) >= num_steps, PATIENCE_S)


async def bring(policy_version: int, folder: Path, probe: Probe) -> PublishReport:
    del folder, probe
    return PublishReport(
        policy_version=policy_version, updated=(), failed=(), wall_s=0.0, gap_s=0.0
    )


@pytest.fixture
def site(tiny_folder: Path, tmp_path: Path, young_heap: None) -> Iterator[Site]:
    del young_heap
    settings = [
        f"model.path={tiny_folder}",
        f"run.folder={tmp_path}",
        "trainer.groups_per_step=2",
        f"trainer.samples_per_group={SAMPLES}",
        "trainer.max_staleness=1",
        "trainer.eval_rollouts=3",
        "trainer.checkpoint_steps=2",
        "trainer.max_logprob_gap=100",
    ]
    site = Site(load_config(None, settings), tmp_path)
    yield site
    site.close()


def assert_nothing_is_left(site: Site) -> None:
    assert_none_left(ReadyGroup, Batch, TokenBatch)
    assert site.records.arrays
    assert not [array() for array in site.records.arrays if array() is not None]


def test_of_what_was_trained_or_dropped_nothing_is_reachable(site: Site) -> None:
    for _ in range(3):
        site.end_next("good")  # the evaluation's
    for how in ROUGH:
        site.end_next(how)
    site.wait_for_steps(NUM_STEPS)
    assert_nothing_is_left(site)
    assert site.policy.ends == [(step, 0) for step in range(NUM_STEPS)]
    assert site.loop.is_alive()
    reasons = (site.folder / "drops.jsonl").read_text()
    for reason in ("env_failed", "infra_error", "malformed", "foreign", "stale"):
        assert reason in reasons
