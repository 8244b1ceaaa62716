"""A trainer process whose sequences have different lengths in each step.

    python -m benchmarks.lib.trainer_run FOLDER LONGEST STEPS ...

- The real train loop, policy, weights and records; instead of a mesh, a client that answers each
  request at once with sequences of 64 to LONGEST tokens.
- After each of STEPS, the last of which ends the run, the next batch is REST_S late; then a line of
  JSON reports the resident memory of the waiting process.
"""

import gc
import itertools
import random
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec
import numpy as np
import psutil

from rollmesh.core.clock import SystemClock
from rollmesh.core.config import Config, load_config
from rollmesh.core.ids import GroupId
from rollmesh.core.types import (
    GroupRecord,
    NodeRow,
    Outcome,
    RolloutRecord,
    SamplingParams,
    SamplingPolicy,
    Task,
    VersionRun,
)
from rollmesh.engine.shared_memory import SharedSegment
from rollmesh.serve.client.arrivals import Arrival, Finished, Unopened
from rollmesh.serve.client.journal import History
from rollmesh.serve.client.journal_entries import StateSaved
from rollmesh.trainer.checkpoints.recovery import restored_staleness
from rollmesh.trainer.checkpoints.recovery_plan import plan_recovery
from rollmesh.trainer.checkpoints.store import CheckpointStore
from rollmesh.trainer.loop import TrainerDeps, TrainLoop
from rollmesh.trainer.models.tiny import TinyShape, write_tiny_model
from rollmesh.trainer.pacing.pacer import Pacer
from rollmesh.trainer.policy import Policy
from rollmesh.trainer.process import request_settings
from rollmesh.trainer.reports.exactness import FenceRequested
from rollmesh.trainer.reports.records import RunRecords, Tally
from rollmesh.trainer.weights.folder import BackgroundLoop, WeightVersions
from rollmesh.trainer.weights.publisher import PublishReport
from rollmesh.trainer.weights.verdicts import Probe

SHORTEST = 64
GROUPS, SAMPLES = 2, 4
"""Groups per step, and samples per group."""
SAMPLED_SHARE = 0.25
"""Share of sampled tokens in a sequence."""
MESSAGE_BYTES_PER_TOKEN = 4
TEXTS = ("a tokenizer of few words",)
REST_S = 4.0
"""Long enough for the background work of an idle trainer."""


class TrainerMemory(msgspec.Struct):
    """Memory of a trainer that waits for its next batch."""

    num_steps: int
    """Number of finished steps."""
    rss_bytes: int
    num_objects: int
    """Objects tracked by Python's garbage collector."""


class InstantClient:
    """A client whose groups end as soon as they are requested, one take later."""

    def __init__(self, seed: int, longest: int, vocab_size: int, rests: list[int]) -> None:
        self.run_id = "run"
        self._random = random.Random(seed)
        self._numbers = np.random.default_rng(seed)
        self._longest = longest
        self._vocab_size = vocab_size
        self._asked: list[GroupId] = []
        self._num_asked = 0
        self._policy_version = 0
        self._num_steps = 0
        self._rests = rests
        self._rest_ends_s = 0.0

    def ask(
        self,
        task: Task,
        *,
        env: str,
        num_samples: int,
        sampling: SamplingPolicy,
        seed: int,
        is_eval: bool = False,
        asked_step: int = 0,
        num_drawn: int = 0,
        again: object = None,
        min_policy_version: int = -1,
    ) -> GroupId:
        """Mint an id."""
        del task, env, num_samples, sampling, seed, is_eval, asked_step, num_drawn, again
        del min_policy_version
        group_id = GroupId(self.run_id, self._num_asked)
        self._num_asked += 1
        self._asked.append(group_id)
        return group_id

    def take(self, timeout_s: float) -> list[Arrival]:
        """Return all requested groups; the loop calls this when it has nothing to train."""
        if self._rests and self._num_steps >= self._rests[0]:
            now_s = time.monotonic()
            self._rest_ends_s = self._rest_ends_s or now_s + REST_S
            if now_s < self._rest_ends_s:
                time.sleep(timeout_s)
                return []
            self._rest_ends_s = 0.0
            del self._rests[0]
            print_rest(self._num_steps)
        asked, self._asked = self._asked, []
        return [self._finish(group_id) for group_id in asked]

    def note_step(
        self, step: int, group_ids: list[GroupId], oldest_step: int = 0, again: object = None
    ) -> None:
        """Count a step."""
        del group_ids, oldest_step, again
        self._num_steps = step + 1

    def note_published(self, policy_version: int, step: int, again: object = None) -> None:
        """Set the version that samples from now on."""
        del step, again
        self._policy_version = policy_version

    def cancel(self, group_id: GroupId, reason: str) -> None:
        """Do nothing: groups end at once."""

    def open(self, arrival: Unopened) -> Arrival:
        """Fail: no result is ever stored on disk."""
        raise AssertionError(arrival)

    def done_with(
        self, group_ids: Iterable[GroupId], reason: str = "", step: int = 0, times: int = 0
    ) -> None:
        """Do nothing: there is no journal."""

    def note_saved(self, saved: StateSaved) -> None:
        """Do nothing: there is no journal."""

    is_journal_full = False

    def _finish(self, group_id: GroupId) -> Finished:
        shortest, longest = np.log2(SHORTEST), np.log2(self._longest)
        lengths = [int(2 ** self._random.uniform(shortest, longest)) for _ in range(SAMPLES)]
        rollouts = [self._rollout(index, length) for index, length in enumerate(lengths)]
        num_sampled = sum(each.num_logprobs for each in rollouts)
        return Finished(
            group_id=group_id,
            attempt=1,
            worker_id="worker-0",
            record=GroupRecord(task=Task(id=str(group_id)), rollouts=rollouts),
            token_ids=self._numbers.integers(0, self._vocab_size, sum(lengths), np.int32),
            logprobs=-self._numbers.random(num_sampled, np.float32),
            position=group_id.seq,
        )

    def _rollout(self, index: int, length: int) -> RolloutRecord:
        num_sampled = max(1, int(SAMPLED_SHARE * length))
        answer = NodeRow(
            parent=0,
            num_tokens=num_sampled,
            sampled=True,
            policy_versions=(VersionRun(self._policy_version, num_sampled),),
            params=SamplingParams(max_tokens=length),
            finish_reason="stop",
        )
        text = self._random.randbytes(MESSAGE_BYTES_PER_TOKEN * length // 2).hex()
        return RolloutRecord(
            index=index,
            outcome=Outcome.COMPLETED,
            reward=self._random.random(),
            messages=msgspec.Raw(msgspec.json.encode([{"role": "user", "content": text}])),
            nodes=[NodeRow(parent=-1, num_tokens=length - num_sampled, sampled=False), answer],
            num_tokens=length,
            num_logprobs=num_sampled,
        )


def print_rest(num_steps: int) -> None:
    """Print the resident memory."""
    memory = psutil.Process().memory_info()
    rest = TrainerMemory(num_steps, memory.rss, len(gc.get_objects()))
    print(msgspec.json.encode(rest).decode(), flush=True)


async def bring(
    policy_version: int, folder: Path, probe: Probe, parts: tuple[SharedSegment, ...]
) -> PublishReport:
    """Publish to no engine."""
    del folder, probe, parts
    return PublishReport(
        policy_version=policy_version, updated=(), failed=(), wall_s=0.0, gap_s=0.0
    )


def config_of(folder: Path, num_steps: int) -> Config:
    """Eight sequences per step, requested one step ahead."""
    settings = {
        "model.path": folder / "model",
        "trainer.num_steps": num_steps,
        "trainer.groups_per_step": GROUPS,
        "trainer.samples_per_group": SAMPLES,
        "trainer.max_staleness": 1,
        "trainer.max_logprob_gap": 1e9,
        "trainer.max_token_gap": 1e9,
    }
    return load_config(None, [f"{key}={value}" for key, value in settings.items()])


def fence(asked: FenceRequested) -> None:
    """Do nothing: there is no engine."""


def main() -> None:
    """Train and print the resident memory."""
    folder, longest, *rests = Path(sys.argv[1]), *map(int, sys.argv[2:])
    model = write_tiny_model(folder / "model", TEXTS, TinyShape(max_positions=longest), seed=0)
    # Two more steps, since the loop may have taken the next batch when it ends the last step.
    config = config_of(folder, rests[-1] + 2)
    client = InstantClient(0, longest, int(model.config.vocab_size), rests)
    del model
    reports = RunRecords(folder, SystemClock()), Tally()
    tasks = (Task(id=str(number)) for number in itertools.count())
    asking = request_settings(config)
    pacer = Pacer(client, restored_staleness(config), tasks, asking, reports)
    weights = WeightVersions(folder / "weights", BackgroundLoop("publisher"))
    policy = Policy(config.model.path, config.trainer)
    parts = TrainerDeps(
        client=client,  # type: ignore[arg-type]
        pacer=pacer,
        policy=policy,
        weights=weights,
        bring=bring,
        records=reports[0],
        tally=reports[1],
        checkpoints=CheckpointStore(folder),
        fence=fence,
    )
    TrainLoop(config, parts, threading.Event()).run(plan_recovery(None, History()))


if __name__ == "__main__":
    main()
