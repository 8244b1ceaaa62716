"""A run on a shared fleet requests GPUs before it computes, releases what it had, and leaves
nothing.

Nothing of a run is on the trainer's GPUs while it does not hold them.
"""

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from rollmesh.core.config import Config, JournalConfig, ModelConfig
from rollmesh.core.errors import UserError
from rollmesh.core.share import TRAIN_CLUSTER, Share
from rollmesh.core.types import GroupRecord, NodeRow, Outcome, RolloutRecord, Task, VersionRun
from rollmesh.serve.coordinator.claims import ProgramMessage
from rollmesh.serve.coordinator.hooks import PipelineHooks
from rollmesh.trainer.checkpoints.recovery import restored_staleness
from rollmesh.trainer.controller.spec import Meeting
from rollmesh.trainer.gpu_lease import (
    ExclusiveGpus,
    Offloadable,
    ScheduledGpus,
    Stream,
    gpu_lease_of,
)
from rollmesh.trainer.process import build
from rollmesh.wire.messages import AnyMessage
from rollmesh.wire.scheduling import (
    GENERATION_CLUSTER,
    ClearProgress,
    GpuPriority,
    NotifyReleaseGpus,
    NotifyReleaseThenRequestGpus,
    ReportPreempt,
    ReportProgress,
    RequestGpus,
    TicketMoved,
    TicketState,
    WithdrawRequest,
)
from tests.unit.serve.coordinator.fake_scheduler import FakeScheduler
from tests.unit.trainer.trainer_incarnations import (
    PATIENCE_S,
    SAMPLES,
    TrainerIncarnation,
    TrainerIncarnations,
)

ALL = (TRAIN_CLUSTER, GENERATION_CLUSTER)


@pytest.fixture
def stop() -> threading.Event:
    return threading.Event()


@pytest.fixture
def gpus(scheduler: FakeScheduler, stop: threading.Event) -> Iterator[ScheduledGpus]:
    with closing(PipelineHooks(scheduler.hub.address, "p")) as hooks:
        yield ScheduledGpus(hooks, stop)


def release_all(gpus: ScheduledGpus) -> None:
    """Release all GPUs; the answer shows that all earlier messages were received."""
    gpus.release_all()
    gpus.close(PATIENCE_S)


def asks(received: list[AnyMessage]) -> list[tuple[str, int]]:
    """Return (cluster, rollouts to come) of each request, in order."""
    kinds = RequestGpus | NotifyReleaseThenRequestGpus
    return [(m.cluster, m.step_target_estimate) for m in received if isinstance(m, kinds)]


def targets(received: list[AnyMessage]) -> list[tuple[str, int, int]]:
    """Return (stream, target, completed) of each change of progress, in order."""
    reports = [m for m in received if isinstance(m, ReportProgress)]
    return [(each.stream, each.target, each.completed) for each in reports]


def train(gpus: ScheduledGpus, step: int) -> None:
    while not gpus.may_train(step):
        pass


def ask(gpus: ScheduledGpus, step: int, num_to_come: int = 8) -> None:
    while not gpus.may_request(step, num_to_come):
        pass


def test_step_requests_engines_then_gpus_and_exchanges_both_in_one_request(
    scheduler: FakeScheduler, gpus: ScheduledGpus
) -> None:
    with scheduler.granting(*ALL) as received:
        assert gpus.acquire()
        gpus.release_until_step()
        for step in range(2):
            gpus.finish_step(step, 8, is_next_there=False)
            ask(gpus, step)
            train(gpus, step)
        release_all(gpus)
    assert asks(received) == [
        (TRAIN_CLUSTER, 0),
        (GENERATION_CLUSTER, 8),
        (TRAIN_CLUSTER, 0),
        (GENERATION_CLUSTER, 8),
        (TRAIN_CLUSTER, 0),
    ]
    first, handed = (m for m in received if isinstance(m, NotifyReleaseThenRequestGpus))
    assert first is received[0], "what an earlier incarnation held is given up before all else"
    assert (first.release_cluster, first.priority) == (TRAIN_CLUSTER, GpuPriority.INITIALIZATION)
    assert (handed.release_cluster, handed.priority) == (TRAIN_CLUSTER, GpuPriority.GENERATION)
    assert (handed.release_global_step, handed.global_step) == (0, 1)
    released = [m.cluster for m in received if isinstance(m, NotifyReleaseGpus)]
    assert released == [TRAIN_CLUSTER, TRAIN_CLUSTER, GENERATION_CLUSTER]
    assert any(isinstance(m, ClearProgress) for m in received)


def test_step_with_a_ready_batch_queues_again_and_wakes_no_engine(
    scheduler: FakeScheduler, gpus: ScheduledGpus
) -> None:
    with scheduler.granting(*ALL) as received:
        ask(gpus, 0)
        train(gpus, 0)
        gpus.finish_step(1, 8, is_next_there=True)
        ask(gpus, 1)
        train(gpus, 1)
        gpus.finish_step(2, 4, is_next_there=False)
        release_all(gpus)
    demands = [(GENERATION_CLUSTER, 8), (GENERATION_CLUSTER, 4)]
    assert [each for each in asks(received) if each[1]] == demands, "that of before stays open"
    again, handed = (m for m in received if isinstance(m, NotifyReleaseThenRequestGpus))
    assert (again.release_cluster, again.cluster) == (TRAIN_CLUSTER, TRAIN_CLUSTER)
    assert (again.priority, again.global_step) == (GpuPriority.ACTOR_TRAINING, 1)
    assert (handed.release_cluster, handed.cluster) == (TRAIN_CLUSTER, GENERATION_CLUSTER)


def test_gpus_that_did_not_train_are_not_exchanged(
    scheduler: FakeScheduler, gpus: ScheduledGpus
) -> None:
    with scheduler.granting(GENERATION_CLUSTER) as received:
        ask(gpus, 0)
        assert not gpus.may_train(0)
        gpus.finish_step(0, 8, is_next_there=False)
        release_all(gpus)
    assert not [m for m in received if isinstance(m, NotifyReleaseThenRequestGpus)]


def test_no_group_is_requested_before_an_engine_is_awake(
    scheduler: FakeScheduler, gpus: ScheduledGpus
) -> None:
    with scheduler.granting(*ALL):
        ask(gpus, 0)
        train(gpus, 0)
    gpus.finish_step(1, 8, is_next_there=False)
    assert not gpus.may_request(1, 8)
    handed = scheduler.expect(NotifyReleaseThenRequestGpus)
    scheduler.send_granted(handed.key, (0,))
    ask(gpus, 1)
    assert gpus.may_request(1, 8)


@pytest.mark.parametrize("state", [TicketState.WITHDRAWN, TicketState.RELEASED])
@pytest.mark.parametrize("cluster", ALL)
def test_a_demand_that_ended_without_a_grant_is_requested_again(
    cluster: str,
    state: TicketState,
    scheduler: FakeScheduler,
    stop: threading.Event,
    gpus: ScheduledGpus,
) -> None:
    """The scheduler released the cluster meanwhile; the step still needs it."""

    def wait() -> None:
        may_go_on = gpus.may_train if cluster == TRAIN_CLUSTER else has_engines
        while not (stop.is_set() or may_go_on(0)):
            pass

    def has_engines(step: int) -> bool:
        return gpus.may_request(step, 8)

    waiting = threading.Thread(target=wait)
    waiting.start()
    try:
        first = scheduler.expect(RequestGpus)
        assert first.cluster == cluster
        scheduler.send(TicketMoved(first.key, state))
        second = scheduler.expect(RequestGpus)
        assert (second.cluster, second.global_step) == (cluster, 0)
        assert second.key != first.key
        scheduler.send_granted(second.key, (0,))
        waiting.join(PATIENCE_S)
        assert not waiting.is_alive()
    finally:
        stop.set()
        waiting.join()


def test_progress_reports_remaining_rollouts_and_grows_with_capacity(
    scheduler: FakeScheduler, gpus: ScheduledGpus
) -> None:
    with scheduler.granting(*ALL) as received:
        for num_to_come in (8, 8, 5, 9, 0):
            ask(gpus, 0, num_to_come)
        ask(gpus, 1, 4)
        release_all(gpus)
    assert targets(received) == [
        ("train", 8, 0),
        ("train", 8, 3),
        ("train", 12, 3),
        ("train", 12, 12),
        ("train", 4, 0),
    ]


class ReportsGroups(ScheduledGpus):
    """Fault W16: the target is reported in rollouts, and the progress in groups."""

    def _begin(self, stream: Stream, step: int, num_to_come: int) -> None:
        super()._begin(stream, step, num_to_come // SAMPLES)

    def _progress(self, stream: Stream, num_to_come: int) -> None:
        super()._progress(stream, num_to_come // SAMPLES)


@pytest.mark.parametrize(("kind", "num_reported"), [(ScheduledGpus, 6), (ReportsGroups, 3)])
def test_the_rest_of_a_demand_is_reported_in_its_own_unit(
    kind: type[ScheduledGpus], num_reported: int, scheduler: FakeScheduler, stop: threading.Event
) -> None:
    with closing(PipelineHooks(scheduler.hub.address, "p")) as hooks:
        gpus = kind(hooks, stop)
        with scheduler.granting(*ALL) as received:
            ask(gpus, 0, 8)
            ask(gpus, 0, 8 - SAMPLES)
            release_all(gpus)
    assert asks(received) == [(GENERATION_CLUSTER, 8)]
    *_, (_, target, completed) = targets(received)
    assert target - completed == num_reported
    assert (num_reported == 8 - SAMPLES) is (kind is ScheduledGpus)


def test_evaluation_is_a_separate_demand_that_ends_when_the_next_begins(
    scheduler: FakeScheduler, gpus: ScheduledGpus
) -> None:
    with scheduler.granting(*ALL) as received:
        assert gpus.may_request(-1, 100, "eval")
        assert gpus.may_request(-1, 0, "eval")
        ask(gpus, 0)
        release_all(gpus)
    streams = [
        (type(m), m.stream) for m in received if isinstance(m, ReportProgress | ClearProgress)
    ]
    assert streams == [
        (ReportProgress, "eval"),
        (ReportProgress, "eval"),
        (ReportProgress, "train"),
        (ClearProgress, "eval"),
        (ClearProgress, "train"),
    ]


def test_turns_that_another_engine_ended_with_the_same_weights_are_reported(
    scheduler: FakeScheduler, gpus: ScheduledGpus
) -> None:
    def turn(*runs: tuple[int, int]) -> NodeRow:
        versions = tuple(VersionRun(version_, 1, engine) for version_, engine in runs)
        return NodeRow(0, len(runs), sampled=True, policy_versions=versions)

    nodes = [turn((1, 0), (1, 1)), turn((1, 1), (2, 0)), turn((1, -1), (1, 0))]
    moved = RolloutRecord(index=0, outcome=Outcome.COMPLETED, nodes=nodes, engines=["e0", "e1"])
    with scheduler.granting(*ALL) as received:
        gpus.report_moved(GroupRecord(task=Task(id="t"), rollouts=[moved]))
        release_all(gpus)
    assert [each.url for each in received if isinstance(each, ReportPreempt)] == ["e0"]


def test_a_stopping_trainer_waits_neither_for_engines_nor_for_gpus(
    scheduler: FakeScheduler, gpus: ScheduledGpus, stop: threading.Event
) -> None:
    stop.set()
    assert not gpus.acquire()
    assert not gpus.may_request(0, 8)
    assert not gpus.may_train(0)
    asked = {scheduler.expect(NotifyReleaseThenRequestGpus).key, scheduler.expect(RequestGpus).key}
    assert scheduler.expect(WithdrawRequest).key in asked


def test_trainer_that_exits_during_a_step_releases_everything(
    scheduler: FakeScheduler, gpus: ScheduledGpus
) -> None:
    with scheduler.granting(GENERATION_CLUSTER) as received:
        ask(gpus, 0)
        assert not gpus.may_train(0)
        release_all(gpus)
    [train] = [m for m in received if isinstance(m, RequestGpus) and m.cluster == TRAIN_CLUSTER]
    assert WithdrawRequest(train.key) in received
    released = [m.cluster for m in received if isinstance(m, NotifyReleaseGpus)]
    assert released == [TRAIN_CLUSTER, GENERATION_CLUSTER]


def test_refusal_without_a_waiter_is_a_user_error(
    scheduler: FakeScheduler, gpus: ScheduledGpus
) -> None:
    assert not gpus.may_train(0)
    key = scheduler.expect(RequestGpus).key
    scheduler.send(TicketMoved(key, TicketState.REFUSED, (), "no such pipeline"))
    with scheduler.granting() as received, pytest.raises(UserError, match="no such pipeline"):
        train(gpus, 0)
    assert not [m for m in received if isinstance(m, RequestGpus) and m.key != key], (
        "nor requested again"
    )


def test_unknown_pipeline_is_a_user_error(
    scheduler: FakeScheduler, gpus: ScheduledGpus, stop: threading.Event
) -> None:
    refusing = threading.Thread(target=refuse, args=[scheduler])
    refusing.start()
    with pytest.raises(UserError, match="'p', actor_train: no such pipeline"):
        gpus.acquire()
    refusing.join()


def refuse(scheduler: FakeScheduler) -> None:
    key = scheduler.expect(NotifyReleaseThenRequestGpus).key
    scheduler.send(TicketMoved(key, TicketState.REFUSED, (), "no such pipeline"))


@contextmanager
def running(incarnation: TrainerIncarnation, scheduler: FakeScheduler) -> Iterator[None]:
    """Run the loop on leased GPUs until it is stopped."""
    with closing(PipelineHooks(scheduler.hub.address, "p")) as hooks:
        incarnation.parts.gpu_lease = ScheduledGpus(hooks, incarnation.stop)
        loop = threading.Thread(target=incarnation.loop.run, args=[incarnation.recovery])
        loop.start()
        try:
            yield
        finally:
            incarnation.stop.set()
            loop.join()


def test_loop_requests_engines_first_and_trains_on_granted_gpus(
    scheduler: FakeScheduler, begin: TrainerIncarnations
) -> None:
    incarnation = begin(JournalConfig())
    with running(incarnation, scheduler):
        demand = scheduler.expect(RequestGpus)
        assert (demand.cluster, demand.global_step) == (GENERATION_CLUSTER, 0)
        assert demand.step_target_estimate == 5 * SAMPLES, "of max_staleness + 1 steps"
        assert not incarnation.pacer.lifecycle.open_ids
        scheduler.send_granted(demand.key, (2,))
        group_id, task = incarnation.receive_ask()
        incarnation.finish(group_id, task.id)
        step = scheduler.expect(RequestGpus)
        assert (step.cluster, step.priority) == (TRAIN_CLUSTER, GpuPriority.ACTOR_TRAINING)
        assert not incarnation.tally.num_steps
        scheduler.send_granted(step.key, (0, 1))
        handed = scheduler.expect(NotifyReleaseThenRequestGpus)
        assert handed.cluster == GENERATION_CLUSTER
        assert (handed.release_global_step, handed.global_step) == (0, 1)
    assert [row["step"] for row in incarnation.rows("metrics.jsonl")] == [0]


def test_stopped_loop_does_not_wait_for_gpus(
    scheduler: FakeScheduler, begin: TrainerIncarnations
) -> None:
    incarnation = begin(JournalConfig())
    with running(incarnation, scheduler):
        with scheduler.granting(GENERATION_CLUSTER):
            group_id, task = incarnation.receive_ask()
            incarnation.finish(group_id, task.id)
        asked = scheduler.expect(RequestGpus)
        assert asked.cluster == TRAIN_CLUSTER
    assert not incarnation.tally.num_steps


def test_run_without_a_share_sends_no_request(stop: threading.Event) -> None:
    gpu_lease = gpu_lease_of(None, stop)
    assert isinstance(gpu_lease, ExclusiveGpus)
    assert gpu_lease.acquire()
    assert gpu_lease.may_request(0, 8)
    assert gpu_lease.may_train(0)


def test_run_with_a_share_leases_its_gpus(scheduler: FakeScheduler, stop: threading.Event) -> None:
    gpu_lease = gpu_lease_of(Share(scheduler.hub.address, "p"), stop)
    assert isinstance(gpu_lease, ScheduledGpus)
    with scheduler.granting():
        gpu_lease.release_all()
        gpu_lease.close(PATIENCE_S)


class RecordingHooks(PipelineHooks):
    """Records messages about the trainer's GPUs in `received`, in order."""

    def __init__(self, scheduler: str, pipeline_id: str) -> None:
        self.received: list[object] = []
        super().__init__(scheduler, pipeline_id)

    def send(self, message: ProgramMessage) -> None:
        clusters = (getattr(message, "cluster", ""), getattr(message, "release_cluster", ""))
        if TRAIN_CLUSTER in clusters:
            self.received.append(message)
        super().send(message)


class RecordingState:
    """State on the trainer's GPUs that records when it moves."""

    def __init__(self, received: list[object]) -> None:
        self._events = received

    def offload(self) -> None:
        self._events.append("vacated")

    def reload(self) -> None:
        self._events.append("occupied")


class StaysOnGpus(ScheduledGpus):
    """A fault: the trainer's state stays on the GPUs when they are released."""

    def attach(self, offloadable: Offloadable) -> None:
        del offloadable


def was_alone(received: list[object]) -> bool:
    """Return whether the state was on the GPUs only while they were granted."""
    is_granted = is_on = False
    for each in received:
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
def test_policy_is_offloaded_from_gpus_that_the_run_does_not_hold(
    kind: type[ScheduledGpus], is_next_there: bool, scheduler: FakeScheduler
) -> None:
    """Messages are recorded in order, between the events on the GPUs."""
    with closing(RecordingHooks(scheduler.hub.address, "p")) as hooks, scheduler.granting(*ALL):
        received = hooks.received
        gpus = kind(hooks, threading.Event())
        assert gpus.acquire()
        received += ["granted", "built"]
        gpus.attach(RecordingState(received))
        gpus.release_until_step()
        for step in range(2):
            while not gpus.may_request(step, 8):
                pass
            while not gpus.may_train(step):
                pass
            if received[-1] == "occupied":
                received.insert(-1, "granted")
            gpus.finish_step(step + 1, 8, is_next_there=is_next_there)
        gpus.release_all()
        gpus.close(PATIENCE_S)
    assert was_alone(received) is (kind is ScheduledGpus)
    assert ("occupied" in received) is (kind is ScheduledGpus)


def nowhere(tmp_path: Path) -> Config:
    """A run whose model cannot be loaded, so that an attempt raises."""
    return Config(model=ModelConfig(path=str(tmp_path / "none")))


def test_no_model_is_loaded_before_its_gpus_are_granted(
    scheduler: FakeScheduler, tmp_path: Path
) -> None:
    config = nowhere(tmp_path)
    with closing(PipelineHooks(scheduler.hub.address, "p")) as hooks:
        gpus, ends = ScheduledGpus(hooks, threading.Event()), list[Exception]()

        def load() -> None:
            try:
                build(config, restored_staleness(config), gpus, Meeting())
            except Exception as error:  # noqa: BLE001 - door: whatever it is, the model is not there
                ends.append(error)

        loading = threading.Thread(target=load)
        loading.start()
        asked = scheduler.expect(NotifyReleaseThenRequestGpus)
        assert (asked.cluster, asked.priority) == (TRAIN_CLUSTER, GpuPriority.INITIALIZATION)
        assert scheduler.expect(NotifyReleaseThenRequestGpus, is_again=True) == asked
        assert not ends, "it waits, and says so"
        scheduler.send_granted(asked.key, (0, 1))
        loading.join(PATIENCE_S)
        assert len(ends) == 1


def test_run_stopped_before_the_grant_loads_no_model(
    scheduler: FakeScheduler, tmp_path: Path
) -> None:
    config, stop = nowhere(tmp_path), threading.Event()
    stop.set()
    with closing(PipelineHooks(scheduler.hub.address, "p")) as hooks:
        gpus = ScheduledGpus(hooks, stop)
        assert build(config, restored_staleness(config), gpus, Meeting(stop=stop)) is None
