"""Nothing of a run is on the trainer's GPUs while it does not hold them."""

import threading
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from rollmesh.core.config import Config, ModelConfig, TrainerConfig
from rollmesh.core.errors import ConfigError
from rollmesh.core.share import check_may_share
from rollmesh.serve.coordinator.claims import Said
from rollmesh.serve.coordinator.hooks import PipelineHooks
from rollmesh.trainer.gpu_lease import TRAIN_CLUSTER, Offloadable, ScheduledGpus
from rollmesh.trainer.process import build
from rollmesh.trainer.recovery.revival import staleness_of
from rollmesh.wire.scheduling import (
    GENERATION_CLUSTER,
    GpuPriority,
    NotifyReleaseThenRequestGpus,
)
from tests.unit.serve.coordinator.fake_scheduler import FakeScheduler
from tests.unit.trainer.trainer_lives import PATIENCE_S

ALL = (TRAIN_CLUSTER, GENERATION_CLUSTER)


class NotedHooks(PipelineHooks):
    """What is said of the trainer's GPUs stands in `told`, as it is said."""

    def __init__(self, scheduler: str, pipeline_id: str) -> None:
        self.told: list[object] = []
        super().__init__(scheduler, pipeline_id)

    def say(self, words: Said) -> None:
        clusters = (getattr(words, "cluster", ""), getattr(words, "release_cluster", ""))
        if TRAIN_CLUSTER in clusters:
            self.told.append(words)
        super().say(words)


class Guest:
    """What computes on the trainer's GPUs: it notes where it is, and when."""

    def __init__(self, told: list[object]) -> None:
        self._told = told

    def offload(self) -> None:
        self._told.append("vacated")

    def reload(self) -> None:
        self._told.append("occupied")


class StaysOnGpus(ScheduledGpus):
    """The fault: what it trains stays where it is when the GPUs are given up."""

    def attach(self, lodger: Offloadable) -> None:
        del lodger


def was_alone(told: list[object]) -> bool:
    """Whether nothing of it was on GPUs that were not granted, or not any more."""
    is_granted = is_on = False
    for each in told:
        match each:
            case "granted":
                is_granted = True
            case "built" | "occupied":
                is_on = True
            case "vacated":
                is_on = False
            case _:  # it asks, or gives up
                is_granted = False
        if is_on and not is_granted:
            return False
    return True


@pytest.mark.parametrize("kind", [ScheduledGpus, StaysOnGpus])
@pytest.mark.parametrize("is_next_there", [False, True])
def test_nothing_of_a_run_is_on_gpus_that_it_does_not_hold(
    kind: type[ScheduledGpus], is_next_there: bool, scheduler: FakeScheduler
) -> None:
    """What was said is noted as it is said, between what is done on the GPUs."""
    with closing(NotedHooks(scheduler.hub.address, "p")) as hooks, scheduler.granting(*ALL):
        told = hooks.told
        tenant = kind(hooks, threading.Event())
        assert tenant.acquire()
        told += ["granted", "built"]
        tenant.attach(Guest(told))
        tenant.release_until_step()
        for step in range(2):
            while not tenant.may_ask(step, 8):
                pass
            while not tenant.may_train(step):
                pass
            if told[-1] == "occupied":
                told.insert(-1, "granted")
            tenant.hand_over(step + 1, 8, is_next_there=is_next_there)
        tenant.leave()
        tenant.close(PATIENCE_S)
    assert was_alone(told) is (kind is ScheduledGpus)
    assert ("occupied" in told) is (kind is ScheduledGpus)


def nowhere(tmp_path: Path) -> Config:
    """A run whose model cannot be loaded, so that whoever tries is found out."""
    return Config(model=ModelConfig(path=str(tmp_path / "none")))


def test_no_model_is_loaded_before_its_gpus_are_granted(
    scheduler: FakeScheduler, tmp_path: Path
) -> None:
    config = nowhere(tmp_path)
    with closing(PipelineHooks(scheduler.hub.address, "p")) as hooks:
        tenant, ends = ScheduledGpus(hooks, threading.Event()), list[Exception]()

        def load() -> None:
            try:
                build(config, staleness_of(config), tenant)
            except Exception as error:  # noqa: BLE001 - door: whatever it is, the model is not there
                ends.append(error)

        loading = threading.Thread(target=load)
        loading.start()
        asked = scheduler.expect(NotifyReleaseThenRequestGpus)
        assert (asked.cluster, asked.priority) == (TRAIN_CLUSTER, GpuPriority.INITIALIZATION)
        assert scheduler.expect(NotifyReleaseThenRequestGpus, is_again=True) == asked
        assert not ends, "it waits, and says so"
        scheduler.say_granted(asked.key, (0, 1))
        loading.join(PATIENCE_S)
        assert len(ends) == 1


def test_a_run_that_is_stopped_before_that_loads_none(
    scheduler: FakeScheduler, tmp_path: Path
) -> None:
    config, stop = nowhere(tmp_path), threading.Event()
    stop.set()
    with closing(PipelineHooks(scheduler.hub.address, "p")) as hooks:
        assert build(config, staleness_of(config), ScheduledGpus(hooks, stop)) is None


def test_ranks_on_gpus_cannot_leave_them_and_are_refused_in_one_line() -> None:
    ranked = Config(trainer=TrainerConfig(num_ranks=2, device="cuda"))
    with pytest.raises(ConfigError, match=r"num_ranks = 2, trainer.device = .cuda.*num_ranks = 1"):
        check_may_share(ranked)
    trainer = msgspec.structs.replace(ranked.trainer, device="cpu")
    check_may_share(msgspec.structs.replace(ranked, trainer=trainer))
