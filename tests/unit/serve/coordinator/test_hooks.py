"""Pipeline hooks on a real socket, with a scheduler that the test drives."""

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest
from structlog.testing import capture_logs

from rollmesh.core.errors import AddressError, UserError
from rollmesh.serve.coordinator import claims
from rollmesh.serve.coordinator.hooks import PipelineHooks
from rollmesh.wire.scheduling import (
    GENERATION_CLUSTER,
    ClearProgress,
    GpuPriority,
    NotifyReleaseGpus,
    NotifyReleaseThenRequestGpus,
    ReportPreempt,
    ReportProgress,
    RequestGpus,
    TakeGpus,
    TicketMoved,
    TicketState,
    WithdrawRequest,
)
from tests.unit.serve.coordinator.fake_scheduler import FakeScheduler

PATIENCE_S = 60.0
TRAIN = GpuPriority.ACTOR_TRAINING


@pytest.fixture
def scheduler() -> Iterator[FakeScheduler]:
    scheduler = FakeScheduler()
    yield scheduler
    scheduler.hub.close()


@pytest.fixture
def hooks(scheduler: FakeScheduler) -> Iterator[PipelineHooks]:
    with closing(PipelineHooks(scheduler.hub.address, "p")) as hooks:
        yield hooks


@contextmanager
def waiting(hooks: PipelineHooks, stop: threading.Event | None = None) -> Iterator[list[bool]]:
    """Call signal_rollout_demand in a thread; yield the list that will hold its result."""
    ends: list[bool] = []
    thread = threading.Thread(
        target=lambda: ends.append(hooks.signal_rollout_demand(7, 64, stop)), daemon=True
    )
    thread.start()
    yield ends
    thread.join(PATIENCE_S)


def test_a_signal_returns_when_an_engine_is_awake(
    scheduler: FakeScheduler, hooks: PipelineHooks
) -> None:
    with waiting(hooks) as ends:
        ask = scheduler.expect(RequestGpus)
        assert (ask.pipeline_id, ask.cluster, ask.priority) == ("p", GENERATION_CLUSTER, 6)
        assert (ask.global_step, ask.step_target_estimate) == (7, 64)
        scheduler.send(TicketMoved(ask.key, TicketState.QUEUED, (), "all are busy"))
        assert scheduler.expect(RequestGpus, is_again=True) == ask
        assert ends == []
        scheduler.send(TicketMoved(ask.key, TicketState.GRANTED, (2,)))
    assert ends == [True]


def test_a_waiting_call_that_is_stopped_returns_and_withdraws(
    scheduler: FakeScheduler, hooks: PipelineHooks
) -> None:
    stop = threading.Event()
    with waiting(hooks, stop) as ends:
        ask = scheduler.expect(RequestGpus)
        stop.set()
        assert scheduler.expect(WithdrawRequest) == WithdrawRequest(ask.key)
    assert ends == [False]


@pytest.mark.parametrize("state", [TicketState.WITHDRAWN, TicketState.RELEASED])
def test_a_request_that_ended_without_a_grant_has_no_gpus(
    scheduler: FakeScheduler, hooks: PipelineHooks, state: TicketState
) -> None:
    """A caller that took it for a grant would train on GPUs of another pipeline."""
    ticket = hooks.request_gpus("actor_train", TRAIN)
    scheduler.send(TicketMoved(scheduler.expect(RequestGpus).key, state))
    while not ticket.is_void:
        assert ticket.wait(timeout_s=0.1) is None
    assert ticket.wait() is None


def test_offered_gpus_are_accepted_and_used_once_they_are_granted(
    scheduler: FakeScheduler, hooks: PipelineHooks
) -> None:
    ticket = hooks.request_gpus("actor_train", TRAIN)
    key = scheduler.expect(RequestGpus).key
    scheduler.send(TicketMoved(key, TicketState.OFFERED, (0, 1), "", 7))
    assert scheduler.expect(TakeGpus) == TakeGpus(key, 7)
    assert ticket.wait(timeout_s=0.0) is None
    scheduler.send_granted(key, (0, 1))
    assert ticket.wait() == (0, 1)


def test_closing_the_hooks_ends_a_waiting_call(
    scheduler: FakeScheduler, hooks: PipelineHooks
) -> None:
    with waiting(hooks) as ends:
        scheduler.expect(RequestGpus)
        hooks.close()
    assert ends == [False]
    assert hooks.request_gpus("actor_train", TRAIN).wait(timeout_s=PATIENCE_S) is None


def test_gpus_are_requested_handed_over_and_released(
    scheduler: FakeScheduler, hooks: PipelineHooks
) -> None:
    asked = hooks.request_gpus("actor_train", TRAIN, 3)
    scheduler.send_granted(scheduler.expect(RequestGpus).key, (0, 1))
    assert asked.wait() == (0, 1)
    handed = hooks.notify_release_then_request_gpus(
        "actor_train", GENERATION_CLUSTER, GpuPriority.GENERATION, step_target_estimate=8
    )
    both = scheduler.expect(NotifyReleaseThenRequestGpus)
    assert (both.release_cluster, both.cluster) == ("actor_train", GENERATION_CLUSTER)
    scheduler.send_granted(both.key, (3,))
    assert handed.wait() == (3,)
    released = hooks.notify_release_gpus(GENERATION_CLUSTER)
    scheduler.send(TicketMoved(scheduler.expect(NotifyReleaseGpus).key, TicketState.RELEASED))
    assert released.wait() == ()


def test_request_keys_are_unique_across_restarts(scheduler: FakeScheduler) -> None:
    keys = set()
    for _ in range(2):
        with closing(PipelineHooks(scheduler.hub.address, "p")) as hooks:
            for _ in range(2):
                hooks.request_gpus("actor_train", TRAIN)
                keys.add(scheduler.expect(RequestGpus).key)
    assert len(keys) == 4


def test_a_refusal_is_a_users_error_of_one_line(
    scheduler: FakeScheduler, hooks: PipelineHooks
) -> None:
    asked = hooks.request_gpus("actor_train", TRAIN)
    key = scheduler.expect(RequestGpus).key
    scheduler.send(TicketMoved(key, TicketState.REFUSED, (), "it is not registered"))
    with pytest.raises(UserError, match=r"pipeline 'p', actor_train: it is not registered"):
        asked.wait()


def test_progress_is_reported_in_rollouts_of_batches_with_growing_numbers(
    scheduler: FakeScheduler, hooks: PipelineHooks
) -> None:
    hooks.begin_progress_batch(4)
    hooks.bump_completed(3)
    hooks.bump_completed()
    begun, three, all_ = (scheduler.expect(ReportProgress) for _ in range(3))
    assert [each.completed for each in (begun, three, all_)] == [0, 3, 4]
    assert {(each.stream, each.target, each.batch) for each in (begun, three, all_)} == {
        ("train", 4, begun.batch)
    }
    hooks.begin_progress_batch(8, 2)
    second = scheduler.expect(ReportProgress)
    assert (second.target, second.completed) == (8, 2)
    assert second.batch > begun.batch
    hooks.end_progress_batch()
    assert scheduler.expect(ClearProgress) == ClearProgress("p", "train", second.batch)


def test_progress_after_the_end_of_a_batch_is_not_sent(
    scheduler: FakeScheduler, hooks: PipelineHooks
) -> None:
    with scheduler.granting() as messages:
        hooks.begin_progress_batch(4)
        hooks.end_progress_batch()
        hooks.bump_completed()
        hooks.end_progress_batch()
        hooks.notify_release_gpus("actor_train").wait()
    assert [type(each) for each in messages] == [ReportProgress, ClearProgress, NotifyReleaseGpus]


def test_batch_numbers_grow_across_restarts(scheduler: FakeScheduler) -> None:
    batches = []
    for _ in range(2):
        with closing(PipelineHooks(scheduler.hub.address, "p")) as hooks:
            hooks.begin_progress_batch(4)
            batches.append(scheduler.expect(ReportProgress).batch)
    assert batches[0] < batches[1]


def test_a_preemption_is_reported(scheduler: FakeScheduler, hooks: PipelineHooks) -> None:
    hooks.report_preempt("http://e1", 1)
    assert scheduler.expect(ReportPreempt) == ReportPreempt("p", 1, "http://e1")


def test_a_wait_continues_through_a_restart_of_the_scheduler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(claims, "SILENT_S", 0.5)
    first = FakeScheduler()
    with closing(PipelineHooks(first.hub.address, "p")) as hooks, capture_logs() as logs:
        ticket = hooks.request_gpus("actor_train", TRAIN)
        key = first.expect(RequestGpus).key
        address = first.hub.address
        first.hub.close()
        while not logs:
            assert ticket.wait(timeout_s=0.1) is None
        second = FakeScheduler(address, "s2")
        assert second.expect(RequestGpus).key == key
        second.send_granted(key, (0,))
        assert ticket.wait(timeout_s=PATIENCE_S) == (0,)
    second.hub.close()
    events = [each["event"] for each in logs]
    assert events[:2] == ["scheduler.unreachable", "scheduler.reachable"]


def test_an_invalid_address_is_a_users_error() -> None:
    with pytest.raises(AddressError, match="nowhere"):
        PipelineHooks("nowhere", "p")
