"""A pipeline that waits for GPUs repeats its requests to each scheduler until it has an answer."""

from collections.abc import Sequence

import pytest

from rollmesh.serve.coordinator.claims import (
    NUM_CLEARS,
    SILENT_S,
    WARN_S,
    WITHDRAW_TIMEOUT_S,
    ClaimAction,
    Claims,
    ClaimSettled,
    SchedulerReachable,
    SchedulerSilent,
    StillWaiting,
)
from rollmesh.wire.machine import ROUTER, Received, Send, Ticked
from rollmesh.wire.messages import AnyMessage
from rollmesh.wire.scheduling import (
    GENERATION_CLUSTER,
    ClearProgress,
    GpuPriority,
    HooksWired,
    NotifyReleaseGpus,
    NotifyReleaseThenRequestGpus,
    ReportProgress,
    RequestGpus,
    SchedulerHello,
    TakeGpus,
    TicketMoved,
    TicketState,
    WithdrawRequest,
)

TRAIN = RequestGpus("k1", "p", "actor_train", GpuPriority.ACTOR_TRAINING, 3)
GENERATE = RequestGpus("k2", "p", GENERATION_CLUSTER, GpuPriority.GENERATION, 4, 64)
RELEASE = NotifyReleaseGpus("k3", "p", GENERATION_CLUSTER)
HAND_OVER = NotifyReleaseThenRequestGpus("k4", "p", "actor_train", "critic", 2)
WIRED = HooksWired("p")


class Program:
    """A pipeline's claims and its clock; returns the messages that it sends."""

    def __init__(self) -> None:
        self.claims = Claims("p")
        self.now_s = 100.0

    def do(self, event: object, after_s: float = 0.0) -> list[ClaimAction]:
        self.now_s += after_s
        return self.claims.step(event, self.now_s)  # type: ignore[arg-type]

    def send(self, event: object, after_s: float = 0.0) -> list[AnyMessage]:
        return sent_messages(self.do(event, after_s))

    def receive(self, message: AnyMessage, after_s: float = 0.0) -> list[ClaimAction]:
        return self.do(Received(ROUTER, message), after_s)


def sent_messages(actions: Sequence[ClaimAction]) -> list[AnyMessage]:
    return [each.message for each in actions if isinstance(each, Send)]


def progress(completed: int, batch: int = 1, target: int = 100) -> ReportProgress:
    return ReportProgress("p", "train", batch, target, completed)


@pytest.fixture
def program() -> Program:
    return Program()


def test_a_pipeline_greets_the_scheduler_first_and_each_second(program: Program) -> None:
    assert program.send(TRAIN) == [WIRED, TRAIN]
    program.receive(SchedulerHello("s1"))
    assert program.send(Ticked(), 0.5) == []
    assert program.send(Ticked(), 0.5) == [WIRED, TRAIN]


def test_a_waiting_request_is_repeated_until_it_is_answered(program: Program) -> None:
    program.do(TRAIN)
    assert program.receive(TicketMoved("k1", TicketState.QUEUED, (), "held by q")) == []
    assert program.send(Ticked(), 1.0) == [WIRED, TRAIN]
    granted = TicketMoved("k1", TicketState.GRANTED, (0, 1))
    assert program.receive(granted) == [ClaimSettled("k1", TicketState.GRANTED, (0, 1))]
    assert program.receive(granted) == []
    assert program.send(Ticked(), 1.0) == [WIRED]


def test_a_restarted_scheduler_receives_all_open_requests_at_once(program: Program) -> None:
    program.do(TRAIN)
    program.receive(SchedulerHello("s1"))
    program.do(progress(10))
    program.do(RELEASE)
    program.receive(TicketMoved("k1", TicketState.GRANTED, (0, 1)))
    assert sent_messages(program.receive(SchedulerHello("s1"))) == []
    assert sent_messages(program.receive(SchedulerHello("s2"))) == [WIRED, RELEASE, progress(10)]


def test_a_silent_scheduler_is_reported_once_and_receives_only_greetings(
    program: Program,
) -> None:
    program.do(TRAIN)
    program.receive(SchedulerHello("s1"))
    actions = program.do(Ticked(), SILENT_S)
    assert actions == [SchedulerSilent(SILENT_S), Send(ROUTER, WIRED)]
    assert program.do(Ticked(), 60.0)[1:] == [Send(ROUTER, WIRED)]
    assert program.send(progress(50)) == []
    assert program.send(GENERATE) == []
    actions = program.receive(SchedulerHello("s1"))
    assert actions[0] == SchedulerReachable()
    assert sent_messages(actions) == [WIRED, TRAIN, GENERATE, progress(50)]
    assert program.send(progress(60)) == [progress(60)]


def test_a_scheduler_that_was_never_reached_is_reported(program: Program) -> None:
    program.do(TRAIN)
    assert program.do(Ticked(), SILENT_S)[0] == SchedulerSilent(SILENT_S)


def test_a_long_wait_is_reported_with_its_reason_now_and_then(program: Program) -> None:
    program.do(TRAIN)
    program.receive(TicketMoved("k1", TicketState.QUEUED, (), "q/actor_train has GPU 0"))
    program.receive(SchedulerHello("s1"), WARN_S - 1.0)
    waits = program.do(Ticked(), 1.0)[0]
    assert waits == StillWaiting(TRAIN, WARN_S, "q/actor_train has GPU 0")
    assert [each for each in program.do(Ticked(), 1.0) if isinstance(each, StillWaiting)] == []


def test_progress_is_sent_when_it_enters_another_bucket_and_each_second(program: Program) -> None:
    program.do(Ticked())
    reports = [program.send(progress(completed)) for completed in range(5)]
    assert reports == [[progress(0)], [], [progress(2)], [], [progress(4)]]
    assert program.send(progress(5)) == []
    assert program.send(Ticked(), 1.0) == [WIRED, progress(5)]


def test_a_new_batch_and_the_end_of_one_are_sent_at_once(program: Program) -> None:
    program.do(Ticked())
    program.do(progress(998, target=1000))
    assert program.send(progress(999, target=1000)) == []
    assert program.send(progress(1000, target=1000)) == [progress(1000, target=1000)]
    assert program.send(progress(1000, batch=2, target=1000)) == [progress(1000, 2, 1000)]


def test_the_end_of_a_demand_is_sent_more_than_once(program: Program) -> None:
    program.do(progress(100))
    retired = ClearProgress("p", "train", 1)
    assert program.send(retired) == [retired]
    assert program.send(retired) == []
    later = [program.send(Ticked(), 1.0) for _ in range(NUM_CLEARS + 1)]
    assert later == [*[[WIRED, retired]] * (NUM_CLEARS - 1), [WIRED], [WIRED]]
    assert sent_messages(program.receive(SchedulerHello("s2"))) == [WIRED, retired]


def test_the_end_of_a_demand_never_closes_a_later_demand(program: Program) -> None:
    program.do(progress(100))
    program.do(ClearProgress("p", "train", 1))
    program.do(GENERATE)
    assert program.send(Ticked(), 1.0) == [WIRED, GENERATE]
    assert sent_messages(program.receive(SchedulerHello("s2"))) == [WIRED, GENERATE]


def test_a_withdrawal_is_repeated_until_it_is_answered(program: Program) -> None:
    program.do(TRAIN)
    program.receive(SchedulerHello("s1"))
    withdrawn = WithdrawRequest("k1")
    assert program.send(withdrawn) == [withdrawn]
    assert program.send(Ticked(), 1.0) == [WIRED, withdrawn]
    program.receive(TicketMoved("k1", TicketState.WITHDRAWN))
    assert program.send(Ticked(), 1.0) == [WIRED]
    assert program.send(withdrawn) == []


@pytest.mark.parametrize("claim", [TRAIN, GENERATE])
def test_a_cluster_grant_that_crosses_its_withdrawal_is_released(
    program: Program, claim: RequestGpus
) -> None:
    """If the withdrawal is lost, the scheduler would hold the GPUs for a request that has ended."""
    program.do(claim)
    program.receive(SchedulerHello("s1"))
    withdrawn = WithdrawRequest(claim.key)
    program.do(withdrawn)
    program.receive(TicketMoved(claim.key, TicketState.GRANTED, (0, 1)))
    is_fixed = claim is TRAIN
    assert (withdrawn in program.send(Ticked(), 1.0)) is is_fixed
    if is_fixed:
        given_back = ClaimSettled(claim.key, TicketState.RELEASED)
        assert given_back in program.receive(TicketMoved(claim.key, TicketState.RELEASED))
    assert withdrawn not in program.send(Ticked(), 1.0)


def test_an_unanswered_withdrawal_is_not_repeated_forever(program: Program) -> None:
    program.do(TRAIN)
    program.do(WithdrawRequest("k1"))
    for _ in range(3):
        program.receive(SchedulerHello("s1"), WITHDRAW_TIMEOUT_S / 4)
    assert ClaimSettled("k1", TicketState.WITHDRAWN) in program.do(Ticked(), WITHDRAW_TIMEOUT_S / 4)
    assert program.send(Ticked(), 1.0) == [WIRED]


def test_a_withdrawal_during_an_outage_is_sent_to_the_next_scheduler(
    program: Program,
) -> None:
    """The request may have been granted meanwhile; without a withdrawal its GPUs are never
    released.
    """
    program.do(TRAIN)
    program.receive(SchedulerHello("s1"))
    program.do(Ticked(), SILENT_S)
    program.do(WithdrawRequest("k1"))
    for _ in range(10):
        assert program.do(Ticked(), WITHDRAW_TIMEOUT_S) == [Send(ROUTER, WIRED)]
    assert sent_messages(program.receive(SchedulerHello("s2"))) == [WIRED, WithdrawRequest("k1")]


def test_an_unsent_hand_over_is_sent_before_its_withdrawal(
    program: Program,
) -> None:
    """Without the hand-over the scheduler would hold the GPUs that it releases."""
    program.do(HAND_OVER)
    program.do(Ticked(), SILENT_S)
    program.do(WithdrawRequest("k4"))
    actions = [WIRED, HAND_OVER, WithdrawRequest("k4")]
    assert sent_messages(program.receive(SchedulerHello("s1"))) == actions
    program.receive(TicketMoved("k4", TicketState.QUEUED, (), "held by q"))
    assert program.send(Ticked(), 1.0) == [WIRED, WithdrawRequest("k4")]


def offered(offer: int) -> TicketMoved:
    return TicketMoved("k1", TicketState.OFFERED, (0, 1), "", offer)


def test_an_offer_is_accepted_and_its_gpus_are_used_only_after_the_grant(program: Program) -> None:
    program.do(TRAIN)
    take = TakeGpus("k1", 7)
    assert program.receive(offered(7)) == [Send(ROUTER, take)]
    assert program.receive(offered(7)) == []
    assert program.send(Ticked(), 1.0) == [WIRED, TRAIN, take]
    granted = TicketMoved("k1", TicketState.GRANTED, (0, 1), "", 7)
    assert program.receive(granted) == [ClaimSettled("k1", TicketState.GRANTED, (0, 1))]
    assert program.send(Ticked(), 1.0) == [WIRED]


def test_an_offer_that_has_lapsed_is_not_accepted_and_the_next_one_is(program: Program) -> None:
    program.do(TRAIN)
    program.receive(offered(7))
    assert program.receive(TicketMoved("k1", TicketState.QUEUED)) == []
    assert program.send(Ticked(), 1.0) == [WIRED, TRAIN]
    assert sent_messages(program.receive(offered(9))) == [TakeGpus("k1", 9)]


def test_a_withdrawn_request_accepts_no_offer(program: Program) -> None:
    program.do(TRAIN)
    program.do(WithdrawRequest("k1"))
    assert program.receive(offered(7)) == []
    assert program.send(Ticked(), 1.0) == [WIRED, WithdrawRequest("k1")]


class CountsByItsClock(Claims):
    """The fault: a restarted process whose clock went back numbers its reports as older ones."""

    def _numbered(self, message: AnyMessage) -> AnyMessage:
        return message


@pytest.mark.parametrize(("kind", "is_news"), [(Claims, True), (CountsByItsClock, False)])
def test_progress_by_a_clock_that_went_back_is_news(kind: type[Claims], is_news: bool) -> None:
    program = Program()
    program.claims = kind("p")
    program.do(Ticked())
    program.receive(SchedulerHello("s1", newest_batch=5000))
    reports = [progress(0, batch=10), progress(50, batch=10), ClearProgress("p", "train", 10)]
    batches = [batch_of(program.send(each)) for each in reports]
    assert len(set(batches)) == 1
    assert (batches[0] > 5000) is is_news
    program.receive(SchedulerHello("s1", newest_batch=batches[0]))
    assert batch_of(program.send(progress(0, batch=11))) == batches[0] + 1


def batch_of(reports: list[AnyMessage]) -> int:
    [report] = reports
    assert isinstance(report, ReportProgress | ClearProgress)
    return report.batch


def test_a_late_report_of_an_earlier_incarnation_makes_no_newer_report_old(
    program: Program,
) -> None:
    program.do(progress(0, batch=10))
    program.receive(SchedulerHello("s1", newest_batch=5000))
    assert progress(0, batch=5001) in program.send(Ticked(), 1.0)
