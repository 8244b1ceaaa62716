"""Who waits for GPUs says so until it has an answer, to each scheduler that there is in time."""

from collections.abc import Sequence

import pytest

from rollmesh.serve.coordinator.claims import (
    NUM_CLEARS,
    PATIENCE_S,
    SILENT_S,
    WARN_S,
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
    """A pipeline's claims, the time, and what was said."""

    def __init__(self) -> None:
        self.claims = Claims("p")
        self.now_s = 100.0

    def do(self, event: object, after_s: float = 0.0) -> list[ClaimAction]:
        self.now_s += after_s
        return self.claims.step(event, self.now_s)  # type: ignore[arg-type]

    def says(self, event: object, after_s: float = 0.0) -> list[AnyMessage]:
        return said(self.do(event, after_s))

    def hears(self, message: AnyMessage, after_s: float = 0.0) -> list[ClaimAction]:
        return self.do(Received(ROUTER, message), after_s)


def said(actions: Sequence[ClaimAction]) -> list[AnyMessage]:
    return [each.message for each in actions if isinstance(each, Send)]


def progress(completed: int, batch: int = 1, target: int = 100) -> ReportProgress:
    return ReportProgress("p", "train", batch, target, completed)


@pytest.fixture
def program() -> Program:
    return Program()


def test_it_says_that_it_is_wired_before_anything_else_and_each_second(program: Program) -> None:
    assert program.says(TRAIN) == [WIRED, TRAIN]
    program.hears(SchedulerHello("s1"))
    assert program.says(Ticked(), 0.5) == []
    assert program.says(Ticked(), 0.5) == [WIRED, TRAIN]


def test_who_waits_says_its_ask_again_until_it_has_an_answer(program: Program) -> None:
    program.do(TRAIN)
    assert program.hears(TicketMoved("k1", TicketState.QUEUED, (), "held by q")) == []
    assert program.says(Ticked(), 1.0) == [WIRED, TRAIN]
    granted = TicketMoved("k1", TicketState.GRANTED, (0, 1))
    assert program.hears(granted) == [ClaimSettled("k1", TicketState.GRANTED, (0, 1))]
    assert program.hears(granted) == []
    assert program.says(Ticked(), 1.0) == [WIRED]


def test_a_scheduler_that_was_started_anew_hears_at_once_all_that_is_open(program: Program) -> None:
    program.do(TRAIN)
    program.hears(SchedulerHello("s1"))
    program.do(progress(10))
    program.do(RELEASE)
    program.hears(TicketMoved("k1", TicketState.GRANTED, (0, 1)))
    assert said(program.hears(SchedulerHello("s1"))) == []
    assert said(program.hears(SchedulerHello("s2"))) == [WIRED, RELEASE, progress(10)]


def test_a_silent_scheduler_is_told_of_once_and_hears_no_more_than_that_we_are_here(
    program: Program,
) -> None:
    program.do(TRAIN)
    program.hears(SchedulerHello("s1"))
    actions = program.do(Ticked(), SILENT_S)
    assert actions == [SchedulerSilent(SILENT_S), Send(ROUTER, WIRED)]
    assert program.do(Ticked(), 60.0)[1:] == [Send(ROUTER, WIRED)]
    assert program.says(progress(50)) == []
    assert program.says(GENERATE) == []
    heard = program.hears(SchedulerHello("s1"))
    assert heard[0] == SchedulerReachable()
    assert said(heard) == [WIRED, TRAIN, GENERATE, progress(50)]
    assert program.says(progress(60)) == [progress(60)]


def test_who_never_heard_a_scheduler_says_so(program: Program) -> None:
    program.do(TRAIN)
    assert program.do(Ticked(), SILENT_S)[0] == SchedulerSilent(SILENT_S)


def test_who_waits_for_long_tells_why_now_and_then(program: Program) -> None:
    program.do(TRAIN)
    program.hears(TicketMoved("k1", TicketState.QUEUED, (), "q/actor_train has GPU 0"))
    program.hears(SchedulerHello("s1"), WARN_S - 1.0)
    waits = program.do(Ticked(), 1.0)[0]
    assert waits == StillWaiting(TRAIN, WARN_S, "q/actor_train has GPU 0")
    assert [each for each in program.do(Ticked(), 1.0) if isinstance(each, StillWaiting)] == []


def test_progress_is_said_where_it_enters_another_bucket_and_each_second(program: Program) -> None:
    program.do(Ticked())
    reports = [program.says(progress(completed)) for completed in range(5)]
    assert reports == [[progress(0)], [], [progress(2)], [], [progress(4)]]
    assert program.says(progress(5)) == []
    assert program.says(Ticked(), 1.0) == [WIRED, progress(5)]


def test_a_new_batch_and_the_end_of_one_are_said_at_once(program: Program) -> None:
    program.do(Ticked())
    program.do(progress(998, target=1000))
    assert program.says(progress(999, target=1000)) == []
    assert program.says(progress(1000, target=1000)) == [progress(1000, target=1000)]
    assert program.says(progress(1000, batch=2, target=1000)) == [progress(1000, 2, 1000)]


def test_what_is_retired_is_said_to_be_so_more_than_once(program: Program) -> None:
    program.do(progress(100))
    retired = ClearProgress("p", "train", 1)
    assert program.says(retired) == [retired]
    assert program.says(retired) == []
    later = [program.says(Ticked(), 1.0) for _ in range(NUM_CLEARS + 1)]
    assert later == [*[[WIRED, retired]] * (NUM_CLEARS - 1), [WIRED], [WIRED]]
    assert said(program.hears(SchedulerHello("s2"))) == [WIRED, retired]


def test_what_is_retired_never_closes_a_demand_that_came_after_it(program: Program) -> None:
    program.do(progress(100))
    program.do(ClearProgress("p", "train", 1))
    program.do(GENERATE)
    assert program.says(Ticked(), 1.0) == [WIRED, GENERATE]
    assert said(program.hears(SchedulerHello("s2"))) == [WIRED, GENERATE]


def test_what_is_withdrawn_is_said_to_be_so_until_that_is_answered(program: Program) -> None:
    program.do(TRAIN)
    program.hears(SchedulerHello("s1"))
    withdrawn = WithdrawRequest("k1")
    assert program.says(withdrawn) == [withdrawn]
    assert program.says(Ticked(), 1.0) == [WIRED, withdrawn]
    program.hears(TicketMoved("k1", TicketState.WITHDRAWN))
    assert program.says(Ticked(), 1.0) == [WIRED]
    assert program.says(withdrawn) == []


@pytest.mark.parametrize("claim", [TRAIN, GENERATE])
def test_a_grant_that_crosses_its_withdrawal_is_given_back_where_it_is_a_cluster(
    program: Program, claim: RequestGpus
) -> None:
    """The withdrawal may be lost, and the scheduler would hold the GPUs for nobody for ever."""
    program.do(claim)
    program.hears(SchedulerHello("s1"))
    withdrawn = WithdrawRequest(claim.key)
    program.do(withdrawn)
    program.hears(TicketMoved(claim.key, TicketState.GRANTED, (0, 1)))
    is_fixed = claim is TRAIN
    assert (withdrawn in program.says(Ticked(), 1.0)) is is_fixed
    if is_fixed:
        given_back = ClaimSettled(claim.key, TicketState.RELEASED)
        assert given_back in program.hears(TicketMoved(claim.key, TicketState.RELEASED))
    assert withdrawn not in program.says(Ticked(), 1.0)


def test_what_nobody_answers_is_not_withdrawn_for_ever(program: Program) -> None:
    program.do(TRAIN)
    program.do(WithdrawRequest("k1"))
    for _ in range(3):
        program.hears(SchedulerHello("s1"), PATIENCE_S / 4)
    assert ClaimSettled("k1", TicketState.WITHDRAWN) in program.do(Ticked(), PATIENCE_S / 4)
    assert program.says(Ticked(), 1.0) == [WIRED]


def test_what_was_withdrawn_while_nobody_heard_is_withdrawn_once_somebody_does(
    program: Program,
) -> None:
    """It may have been granted meanwhile, and nobody would ever give it back."""
    program.do(TRAIN)
    program.hears(SchedulerHello("s1"))
    program.do(Ticked(), SILENT_S)
    program.do(WithdrawRequest("k1"))
    for _ in range(10):
        assert program.do(Ticked(), PATIENCE_S) == [Send(ROUTER, WIRED)]
    assert said(program.hears(SchedulerHello("s2"))) == [WIRED, WithdrawRequest("k1")]


def test_what_gives_up_is_said_before_it_is_withdrawn_where_nobody_has_heard_of_it(
    program: Program,
) -> None:
    """Else what it gives up would be held for ever."""
    program.do(HAND_OVER)
    program.do(Ticked(), SILENT_S)
    program.do(WithdrawRequest("k4"))
    heard = [WIRED, HAND_OVER, WithdrawRequest("k4")]
    assert said(program.hears(SchedulerHello("s1"))) == heard
    program.hears(TicketMoved("k4", TicketState.QUEUED, (), "held by q"))
    assert program.says(Ticked(), 1.0) == [WIRED, WithdrawRequest("k4")]


def offered(offer: int) -> TicketMoved:
    return TicketMoved("k1", TicketState.OFFERED, (0, 1), "", offer)


def test_what_is_offered_is_taken_and_nobodys_before_it_is_granted(program: Program) -> None:
    program.do(TRAIN)
    take = TakeGpus("k1", 7)
    assert program.hears(offered(7)) == [Send(ROUTER, take)]
    assert program.hears(offered(7)) == []
    assert program.says(Ticked(), 1.0) == [WIRED, TRAIN, take]
    granted = TicketMoved("k1", TicketState.GRANTED, (0, 1), "", 7)
    assert program.hears(granted) == [ClaimSettled("k1", TicketState.GRANTED, (0, 1))]
    assert program.says(Ticked(), 1.0) == [WIRED]


def test_an_offer_that_has_lapsed_is_not_taken_and_the_next_one_is(program: Program) -> None:
    program.do(TRAIN)
    program.hears(offered(7))
    assert program.hears(TicketMoved("k1", TicketState.QUEUED)) == []
    assert program.says(Ticked(), 1.0) == [WIRED, TRAIN]
    assert said(program.hears(offered(9))) == [TakeGpus("k1", 9)]


def test_who_has_withdrawn_takes_nothing(program: Program) -> None:
    program.do(TRAIN)
    program.do(WithdrawRequest("k1"))
    assert program.hears(offered(7)) == []
    assert program.says(Ticked(), 1.0) == [WIRED, WithdrawRequest("k1")]


class CountsByItsClock(Claims):
    """The fault: a next life whose clock went back reports what is old."""

    def _numbered(self, message: AnyMessage) -> AnyMessage:
        return message


@pytest.mark.parametrize(("kind", "is_news"), [(Claims, True), (CountsByItsClock, False)])
def test_progress_by_a_clock_that_went_back_is_news(kind: type[Claims], is_news: bool) -> None:
    program = Program()
    program.claims = kind("p")
    program.do(Ticked())
    program.hears(SchedulerHello("s1", newest_batch=5000))
    reports = [progress(0, batch=10), progress(50, batch=10), ClearProgress("p", "train", 10)]
    batches = [batch_of(program.says(each)) for each in reports]
    assert len(set(batches)) == 1
    assert (batches[0] > 5000) is is_news
    program.hears(SchedulerHello("s1", newest_batch=batches[0]))
    assert batch_of(program.says(progress(0, batch=11))) == batches[0] + 1


def batch_of(told: list[AnyMessage]) -> int:
    [report] = told
    assert isinstance(report, ReportProgress | ClearProgress)
    return report.batch


def test_what_a_life_before_said_late_makes_nothing_old(program: Program) -> None:
    program.do(progress(0, batch=10))
    program.hears(SchedulerHello("s1", newest_batch=5000))
    assert progress(0, batch=5001) in program.says(Ticked(), 1.0)
