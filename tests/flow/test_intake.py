"""Samples stay where the intake wrote them until their step has ended, and ranks read them
there.
"""

import itertools
from pathlib import Path

import pytest

from rollmesh.core.config import TrainerConfig
from rollmesh.core.types import SamplingPolicy, Task
from rollmesh.envs.guess import GuessEnv
from rollmesh.serve.client.samples import lay_plainly
from rollmesh.tensors.plane import current
from rollmesh.tensors.store import StorageStats
from rollmesh.testing.client import ScriptedClient
from rollmesh.testing.clock import FakeClock
from rollmesh.trainer.controller.controller import RoleCall, TrainController
from rollmesh.trainer.controller.dispatch import DispatchRule
from rollmesh.trainer.models.tiny import TinyShape, texts_of, write_tiny_model
from rollmesh.trainer.pacing.pacer import Batch, Pacer
from rollmesh.trainer.pacing.ready_queue import SampleAllocator, StoreAllocator, copy_samples
from rollmesh.trainer.pacing.requester import RequestSettings
from rollmesh.trainer.ranked import RankedPolicy
from rollmesh.trainer.reports.records import RunRecords, Tally
from rollmesh.trainer.staleness import StalenessManager, StalenessSettings
from tests.flow.intake_roles import where
from tests.flow.rank_group import plan, serving_runtime

GROUPS, SAMPLES = 3, 4
PACE = StalenessSettings(batch=GROUPS * SAMPLES, max_staleness=1, max_concurrent=400)
SETTINGS = TrainerConfig(max_logprob_gap=1e9, max_token_gap=1e9, num_ranks=2)
ASKING = RequestSettings(
    env="guess", num_samples=SAMPLES, sampling=SamplingPolicy(), seed=0, branches=("main",)
)


class Intake:
    """A pacer whose groups the test ends."""

    def __init__(self, folder: Path, room: SampleAllocator, staleness: StalenessManager) -> None:
        self.client, self.records = ScriptedClient(), RunRecords(folder, FakeClock())
        tasks = (Task(id=f"t{number}") for number in itertools.count())
        self.pacer = Pacer(self.client, staleness, tasks, ASKING, (self.records, Tally()), room)

    def batch(self, step: int) -> Batch:
        """Return the batch once all of its groups have arrived."""
        self.pacer.ask(GROUPS)
        for group_id in [*self.client.asked]:
            self.client.finish(group_id, policy_versions=(step,))
        self.pacer.collect(0.0)
        batch = self.pacer.take(step)
        assert batch is not None
        return batch


def stored() -> StorageStats:
    stats = current().stats().storage
    assert stats is not None
    return stats


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


@pytest.mark.slow
def test_two_ranks_read_the_same_bytes_that_the_intake_wrote(folder: Path) -> None:
    with serving_runtime() as home:
        assert home.plane.store is not None
        intake = Intake(folder, StoreAllocator(home.plane.store), StalenessManager(PACE))
        with TrainController(plan(2, make="tests.flow.intake_roles:Witness"), home) as controller:
            samples = intake.batch(0).samples()
            written = [where(sample.token_ids.ctypes.data) for sample in samples]
            handles = controller.take([sample.handle for sample in samples], 0)
            groups = [sample.group_id for sample in samples]
            call = RoleCall("sums.look", rule=DispatchRule(groups=groups, uneven="pad"))
            seen = controller.call(call, [{"arrays": handle} for handle in handles])
            assert [each["place"] for each in seen] == written
            assert {each["rank"] for each in seen} == {0, 1}
            assert {path.startswith("/dev/shm/rollmesh-") for path, _ in written} == {True}
            intake.pacer.close()
        intake.records.close()


@pytest.mark.slow
def test_a_step_takes_the_samples_of_the_intake_and_leaves_nothing(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_tiny_model(tmp_path / "model", texts_of(GuessEnv()), TinyShape(), seed=0)
    staleness = StalenessManager(PACE)
    model = str(tmp_path / "model")
    with RankedPolicy(model, SETTINGS, folder, staleness=staleness) as policy:
        intake = Intake(folder, policy.allocator, staleness)
        assert policy.staleness is staleness
        assert staleness.capacity == 2 * GROUPS * SAMPLES
        for step in range(3):
            batch = intake.batch(step)
            before = stored()
            assert before.num_tensors == GROUPS * SAMPLES
            samples = batch.samples()
            if step == 2:  # one of them has found no room
                policy.allocator.clear(samples[:1])
                samples[:1] = copy_samples(samples[:1], lay_plainly)
            policy.step(samples, step)
            after = stored()
            assert after.num_tensors == before.num_tensors
            assert after.total_bytes == before.total_bytes
            assert after.bytes_by_step == {step: after.total_bytes}
            intake.pacer.publishing(step + 1, step + 1)
            intake.pacer.published(step + 1)
            intake.pacer.trained(batch)
            del batch, samples
            policy.end_step(step)
            left = stored()
            assert (left.num_tensors, left.retained_bytes) == (0, 0)
        intake.records.close()
    assert [each.message for each in caplog.records if "tensors." in each.message] == []
