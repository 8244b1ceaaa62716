"""The rank group: it forms, beats, ends in order, and breaks rather than hangs.

Calls: at all ranks or at none, in order, and each ends once.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rollmesh.core.errors import CallFailed, RankGone
from rollmesh.trainer.controller.rank_group import (
    Action,
    CallAction,
    CallAnswered,
    CallRaised,
    CallRequested,
    EndRequested,
    RankCalls,
    RankExited,
    RankGroup,
    RankGroupSettings,
    RankGroupState,
    RankJoined,
    RanksFormed,
    RanksLost,
    SendToAll,
    SendToRank,
    TensorReport,
    TensorsQueried,
)
from rollmesh.wire.machine import Received, Ticked
from rollmesh.wire.ranks import (
    AbortRank,
    CallEnded,
    CallStaged,
    ControllerBeat,
    DropCall,
    EndRank,
    FormGroup,
    HeldTensors,
    RankBeat,
    RankHello,
    RankLeft,
    RankMessage,
    RankReady,
    ReadTensors,
    RunCall,
    StageCall,
    TensorsReported,
)
from tests.unit.trainer.controller.rank_group_sim import GIVE_UP_S, Sim

SETTINGS = RankGroupSettings(
    start_s=60.0, beat_s=1.0, silence_s=10.0, settle_s=5.0, report_timeout_s=3.0
)
CALL = CallRequested(1, "actor", "train", 4, (b"x", b"y"))
HELD = HeldTensors()


def received(
    group: RankGroup, message: RankMessage, now_s: float = 0.0, body: bytes = b""
) -> list[Action]:
    rank = getattr(message, "rank", 0)
    return group.step(Received(b"rank-%d" % rank, message, body), now_s)


def routes(num_ranks: int) -> list[bytes]:
    return [b"rank-%d" % rank for rank in range(num_ranks)]


def ready_crew(num_ranks: int = 2) -> RankGroup:
    group = RankGroup(routes(num_ranks), SETTINGS, 0.0)
    for rank in range(num_ranks):
        received(group, RankHello(rank, 100 + rank))
    for rank in range(num_ranks):
        received(group, RankReady(rank, "tcp://h:1"))
    assert group.state is RankGroupState.READY
    return group


def sent(actions: Sequence[Action], kind: type) -> list[tuple[bytes, RankMessage]]:
    return [
        (action.route, action.message)
        for action in actions
        if isinstance(action, SendToRank) and isinstance(action.message, kind)
    ]


def error_of(actions: Sequence[Action]) -> RankGone:
    [broken] = [action for action in actions if isinstance(action, RanksLost)]
    return broken.error


def test_ranks_meet_once_all_have_sent_hello() -> None:
    group = RankGroup(routes(2), SETTINGS, 0.0)
    assert received(group, RankHello(1, 101)) == []
    formed = received(group, RankHello(0, 100))
    message = FormGroup(-1)
    assert sent(formed, FormGroup) == [(b"rank-0", message), (b"rank-1", message)]


def test_group_is_ready_when_all_ranks_are_and_then_begins_earlier_requests() -> None:
    group = RankGroup(routes(2), SETTINGS, 0.0)
    assert group.step(CALL, 0.0) == []
    for rank in range(2):
        received(group, RankHello(rank, 100))
    assert received(group, RankReady(1, "")) == []
    formed, *staged = received(group, RankReady(0, ""))
    assert formed == RanksFormed()
    assert [each.body for each in staged if isinstance(each, SendToRank)] == [b"x", b"y"]


def test_a_call_goes_to_all_ranks_and_comes_back() -> None:
    group = ready_crew()
    group.step(CALL, 0.0)
    received(group, CallStaged(0, 1))
    received(group, CallStaged(1, 1))
    received(group, CallEnded(0, 1), body=b"p")
    assert received(group, CallEnded(1, 1), body=b"q") == [CallAnswered(1, (b"p", b"q"))]


@pytest.mark.parametrize("state", ["staging", "running"])
def test_exit_of_a_rank_fails_open_requests_with_its_name(state: str) -> None:
    group = ready_crew()
    group.step(CALL, 0.0)
    if state == "running":
        received(group, CallStaged(0, 1))
        received(group, CallStaged(1, 1))
    failed, broken = group.step(RankExited(1, "killed by signal 9"), 0.0)
    assert isinstance(failed, CallRaised)
    assert str(failed.error) == "rank 1 is gone: killed by signal 9; all ranks have to restart"
    assert error_of([broken]) is failed.error


def test_request_to_a_broken_group_fails_at_once() -> None:
    group = ready_crew()
    group.step(RankExited(1, "killed by signal 9"), 0.0)
    [failed] = group.step(CALL, 0.0)
    assert isinstance(failed, CallRaised)
    assert isinstance(failed.error, RankGone)
    assert group.step(TensorsQueried(5, 3), 0.0) == [TensorReport(5, (), (0, 1))]
    assert group.step(RankExited(0, "killed"), 0.0) == []


def test_rank_that_leaves_reports_the_reason() -> None:
    assert error_of(received(ready_crew(), RankLeft(0, "sigterm"))).cause == "sigterm"


def test_silent_rank_is_lost() -> None:
    group = ready_crew()
    received(group, RankBeat(0, -1, 2), now_s=9.0)
    assert group.state is RankGroupState.READY
    group.step(Ticked(), 9.9)
    assert group.state is RankGroupState.READY
    lost = error_of(group.step(Ticked(), 10.0))
    assert (lost.rank, lost.cause) == (1, "silent for 10 s")


def test_rank_that_never_connects_is_lost_at_the_ready_timeout() -> None:
    group = RankGroup(routes(2), SETTINGS, 0.0)
    received(group, RankHello(0, 100))
    assert error_of(group.step(Ticked(), 60.0)).cause == "not ready 60 s after its start"


def test_rank_stuck_in_a_failed_call_breaks_the_group() -> None:
    group = ready_crew()
    group.step(CALL, 0.0)
    received(group, CallStaged(0, 1))
    received(group, CallStaged(1, 1))
    received(group, CallEnded(0, 1, "ValueError: x"), now_s=1.0)
    assert group.state is RankGroupState.READY
    lost = error_of(group.step(Ticked(), 6.0))
    assert lost.rank == 1
    assert "ValueError: x" in lost.cause


def test_lost_message_is_detected_at_the_next_beat() -> None:
    group = ready_crew()
    assert received(group, RankBeat(1, -1, 2)) == []
    assert error_of(received(group, RankBeat(1, -1, 5))).cause == "2 of its messages were lost"


def test_heartbeats_carry_the_ended_step_and_earlier_messages() -> None:
    group = ready_crew()
    group.step(TensorsQueried(1, 7), 0.0)
    beats = sent(group.step(Ticked(), 1.0), ControllerBeat)
    assert beats == [(b"rank-0", ControllerBeat(7, 2)), (b"rank-1", ControllerBeat(7, 2))]
    assert sent(group.step(Ticked(), 1.5), ControllerBeat) == []
    assert len(sent(group.step(Ticked(), 2.0), ControllerBeat)) == 2


def test_all_ranks_report_tensors_and_receive_ended_steps() -> None:
    group = ready_crew()
    actions = group.step(TensorsQueried(5, 7, b"ids"), 0.0)
    assert [each.body for each in actions if isinstance(each, SendToRank)] == [b"ids", b"ids"]
    assert sent(actions, ReadTensors) == [
        (b"rank-0", ReadTensors(7, 5)),
        (b"rank-1", ReadTensors(7, 5)),
    ]
    answers = [TensorsReported(rank, 5, 7, 0, HELD, HELD) for rank in (1, 0)]
    assert received(group, answers[0]) == []
    assert received(group, answers[1]) == [TensorReport(5, (answers[1], answers[0]), ())]


def test_ended_step_never_decreases() -> None:
    group = ready_crew()
    group.step(TensorsQueried(1, 7), 0.0)
    actions = group.step(TensorsQueried(2, -1), 0.0)
    assert sent(actions, ReadTensors)[0][1] == ReadTensors(7, 2)


def test_rank_without_a_tensor_report_is_listed_as_missing() -> None:
    group = ready_crew()
    group.step(TensorsQueried(5, 7), 0.0)
    answer = TensorsReported(0, 5, 7, 0, HELD, HELD)
    received(group, answer)
    assert TensorReport(5, (answer,), (1,)) in group.step(Ticked(), 3.0)
    assert group.state is RankGroupState.READY
    assert received(group, TensorsReported(1, 5, 7, 0, HELD, HELD), now_s=3.1) == []


def test_ranks_end_in_reverse_and_the_first_when_the_others_have() -> None:
    group = ready_crew(3)
    ends = sent(group.step(EndRequested("done"), 0.0), EndRank)
    assert [route for route, _ in ends] == [b"rank-2", b"rank-1"]
    assert group.step(RankExited(1, "exit code 0"), 0.0) == []
    assert [route for route, _ in sent(group.step(RankExited(2, "exit code 0"), 0.0), EndRank)] == [
        b"rank-0"
    ]


def test_end_before_all_are_ready_waits_for_no_rank() -> None:
    group = RankGroup(routes(2), SETTINGS, 0.0)
    received(group, RankHello(0, 100))
    cause = "not ready yet, and the user has gone"
    assert error_of(group.step(EndRequested("the user has gone"), 0.0)).cause == cause


def test_end_fails_open_requests() -> None:
    group = ready_crew()
    group.step(CALL, 0.0)
    assert [
        each.call_id
        for each in group.step(EndRequested("done"), 0.0)
        if isinstance(each, CallRaised)
    ] == [1]
    assert [type(each) for each in group.step(CALL, 0.0)] == [CallRaised]


PLAN = "d1"
NOW_S = 4 * SETTINGS.beat_s


def waiting_group() -> RankGroup:
    """A group of rank 0, which waits for rank 1 from elsewhere."""
    group = RankGroup([b"rank-0", b""], SETTINGS, 0.0, PLAN, "cpu")
    received(group, RankHello(0, 100, "host-a", "cpu", PLAN, "10.0.0.1:5"))
    return group


def hello(route: bytes, plan: str = PLAN, device: str = "cpu") -> Received:
    return Received(route, RankHello(1, 101, "host-b", device, plan), b"")


def refusal_of(actions: Sequence[Action]) -> str:
    [joined, sent] = actions
    assert isinstance(joined, RankJoined)
    assert isinstance(sent, SendToRank)
    assert sent.message == AbortRank(-1, joined.refusal)
    return joined.refusal


def test_a_rank_from_elsewhere_joins_by_its_hello_and_learns_the_store_of_rank_0() -> None:
    group = waiting_group()
    assert group.missing() == [1]
    joined, *formed = group.step(hello(b"rank-1-x"), NOW_S)
    assert joined == RankJoined(1, "host-b")
    message = FormGroup(-1, "10.0.0.1:5")
    assert sent(formed, FormGroup) == [(b"rank-0", message), (b"rank-1-x", message)]
    assert group.missing() == []


@pytest.mark.parametrize(
    ("plan", "device", "why"),
    [("d2", "cpu", "differs from the trainer's"), (PLAN, "cuda", "computes on cuda")],
)
def test_a_rank_from_elsewhere_that_differs_is_refused_and_the_right_one_may_join(
    plan: str, device: str, why: str
) -> None:
    group = waiting_group()
    assert why in refusal_of(group.step(hello(b"rank-1-x", plan, device), NOW_S))
    assert group.missing() == [1]
    assert group.step(hello(b"rank-1-y"), NOW_S)[0] == RankJoined(1, "host-b")


def test_a_second_process_of_a_rank_replaces_the_first_only_if_that_is_silent() -> None:
    group = RankGroup([b"rank-0", b"", b""], SETTINGS, 0.0, PLAN, "cpu")
    group.step(hello(b"rank-1-x"), NOW_S)
    assert "has joined from host-b" in refusal_of(group.step(hello(b"rank-1-y"), NOW_S + 1.0))
    late_s = NOW_S + 20 * SETTINGS.beat_s
    assert group.step(hello(b"rank-1-z"), late_s) == [RankJoined(1, "host-b")]
    assert group.step(Received(b"rank-1-x", RankBeat(1, -1, 99), b""), late_s) == []
    assert group.state is RankGroupState.FORMING


def test_no_rank_joins_a_complete_group() -> None:
    group = waiting_group()
    group.step(hello(b"rank-1-x"), NOW_S)
    assert "are complete" in refusal_of(group.step(hello(b"rank-1-y"), 100.0))


def test_ranks_of_elsewhere_learn_which_rank_of_which_host_is_gone() -> None:
    group = waiting_group()
    group.step(hello(b"rank-1-x"), NOW_S)
    actions = group.step(RankExited(0, "killed by signal 9"), NOW_S)
    error = error_of(actions)
    assert str(error).startswith("rank 0 on host-a is gone: killed by signal 9")
    assert sent(actions, AbortRank) == [(b"rank-1-x", AbortRank(-1, str(error)))]


def test_a_rank_that_never_joins_is_named_with_the_others_that_are_missing() -> None:
    group = RankGroup([b"rank-0", b"", b""], SETTINGS, 0.0, PLAN, "cpu")
    received(group, RankHello(0, 100, "host-a", "cpu", PLAN))
    received(group, RankReady(0, ""), now_s=59.0)
    cause = error_of(group.step(Ticked(), 60.0)).cause
    assert cause.startswith("it has not joined in 60 s (missing: 1, 2); start it by torchrun or")


def test_messages_of_strangers_and_lost_ranks_are_ignored() -> None:
    group = ready_crew()
    assert received(group, RankLeft(7, "who?")) == []
    group.step(RankExited(1, "killed"), 0.0)
    assert received(group, RankBeat(1, -1, 99)) == []


@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(0, 5))
def test_without_faults_every_call_runs_at_every_rank_in_one_order(
    seed: int, num_ranks: int, num_calls: int
) -> None:
    sim = Sim(seed, num_ranks, trouble=0.0, loss=0.0)
    sim.run(num_calls)
    assert sim.broken == []
    assert sim.ends == Counter(dict.fromkeys(range(2 * num_calls), 1))
    assert all(rank.ran == sim.ranks[0].ran for rank in sim.ranks)
    assert len(sim.ranks[0].ran) == num_calls


@example(1459944, 3, 0.02)  # a lost RunCall, and the next one in time
@given(st.integers(0, 2**32), st.integers(1, 4), st.sampled_from([0.0, 0.02]))
def test_every_request_ends_once_and_no_rank_runs_a_call_that_another_could_not_stage(
    seed: int, num_ranks: int, loss: float
) -> None:
    sim = Sim(seed, num_ranks, trouble=0.2, loss=loss)
    sim.run(5)
    assert sim.now_s < GIVE_UP_S, "nothing hangs"
    assert sim.ends == Counter(dict.fromkeys(range(10), 1))
    assert len(sim.broken) <= 1
    orders = [rank.ran for rank in sim.ranks]
    longest = max(orders, key=len)
    assert all(ran == longest[: len(ran)] for ran in orders)


SETTLE_S = 5.0


def made(call_id: int, num_ranks: int = 2) -> CallRequested:
    return CallRequested(
        call_id, "actor", "train", 4, tuple(b"%d" % rank for rank in range(num_ranks))
    )


def stage(calls: RankCalls, call_id: int, *errors: str) -> list[CallAction]:
    """Report from every rank that the call is staged, or why not."""
    return [
        action
        for rank, error in enumerate(errors)
        for action in calls.staged(CallStaged(rank, call_id, error), 3)
    ]


def end(
    calls: RankCalls, rank: int, call_id: int, error: str = "", now_s: float = 0.0
) -> list[CallAction]:
    return list(calls.ended(CallEnded(rank, call_id, error), b"a%d" % rank, now_s))


def started() -> RankCalls:
    """A group whose two ranks are running call 1."""
    calls = RankCalls(2, SETTLE_S)
    list(calls.make(made(1), 3))
    stage(calls, 1, "", "")
    return calls


def failures(actions: Iterable[CallAction]) -> list[tuple[int, str]]:
    return [(each.call_id, str(each.error)) for each in actions if isinstance(each, CallRaised)]


def test_each_rank_receives_a_call_with_its_own_arguments() -> None:
    calls = RankCalls(2, SETTLE_S)
    sent = list(calls.make(made(1), 3))
    assert sent == [SendToAll(StageCall(3, 1, "actor", "train", 4), (b"0", b"1"))]


def test_no_call_runs_before_all_ranks_have_its_arguments() -> None:
    calls = RankCalls(2, SETTLE_S)
    list(calls.make(made(1), 3))
    assert list(calls.staged(CallStaged(1, 1), 3)) == []
    assert list(calls.staged(CallStaged(0, 1), 3)) == [SendToAll(RunCall(3, 1))]


def test_call_that_one_rank_cannot_stage_runs_nowhere() -> None:
    calls = RankCalls(3, SETTLE_S)
    list(calls.make(made(1, 3), 3))
    dropped, failed = stage(calls, 1, "", "shard 7 is cleared", "owner gone")
    assert dropped == SendToAll(DropCall(3, 1))
    assert failures([failed]) == [(1, "actor.train failed at rank 1: shard 7 is cleared")]


def test_a_call_has_the_answers_of_all_ranks_in_their_order() -> None:
    calls = started()
    assert end(calls, 1, 1) == []
    assert end(calls, 0, 1) == [CallAnswered(1, (b"a0", b"a1"))]


def test_a_later_call_that_is_staged_first_runs_second() -> None:
    calls = RankCalls(2, SETTLE_S)
    list(calls.make(made(1), 3))
    list(calls.make(made(2), 3))
    assert stage(calls, 2, "", "") == []
    assert stage(calls, 1, "", "") == [SendToAll(RunCall(3, 1)), SendToAll(RunCall(3, 2))]


def test_a_dropped_call_delays_no_rank() -> None:
    calls = RankCalls(2, SETTLE_S)
    list(calls.make(made(1), 3))
    list(calls.make(made(2), 3))
    stage(calls, 2, "", "")
    assert stage(calls, 1, "no", "")[-1] == SendToAll(RunCall(3, 2))


def test_call_that_fails_everywhere_names_the_first_rank() -> None:
    calls = started()
    end(calls, 1, 1, "ValueError: b")
    failed = end(calls, 0, 1, "ValueError: a")
    assert failures(failed) == [(1, "actor.train failed at rank 0: ValueError: a")]
    assert isinstance(failed[0], CallRaised)
    assert isinstance(failed[0].error, CallFailed)


def test_rank_still_running_a_call_that_failed_elsewhere_is_stuck() -> None:
    calls = started()
    end(calls, 1, 1, "ValueError: b", now_s=10.0)
    assert calls.stuck(10.0 + SETTLE_S - 0.1) is None
    rank, cause = calls.stuck(10.0 + SETTLE_S) or (-1, "")
    assert rank == 0
    assert "actor.train, which failed at rank 1: ValueError: b" in cause


def test_of_several_ranks_in_a_failed_call_the_one_that_is_silent_longest_is_stuck() -> None:
    calls = RankCalls(4, SETTLE_S)
    list(calls.make(made(1, 4), 3))
    stage(calls, 1, "", "", "", "")
    end(calls, 2, 1, "connection closed by peer", now_s=10.0)
    rank, _ = calls.stuck(10.0 + SETTLE_S, [14.9, 14.8, 14.9, 9.9]) or (-1, "")
    assert rank == 3


def test_long_call_is_not_stuck() -> None:
    calls = started()
    end(calls, 1, 1, now_s=10.0)
    assert calls.stuck(1e9) is None


def test_messages_about_unknown_calls_change_nothing() -> None:
    calls = started()
    assert stage(calls, 9, "", "") == []
    assert stage(calls, 1, "late", "late") == []
    assert end(calls, 0, 9) == []


@given(st.data())
def test_each_call_runs_in_order_and_ends_once(data: st.DataObject) -> None:
    num_ranks, num_calls = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    calls = RankCalls(num_ranks, SETTLE_S)
    ran: list[int] = []
    dropped: list[int] = []
    ends: list[int] = []
    waiting: list[CallStaged | CallEnded] = []
    cannot = {n: data.draw(st.booleans()) for n in range(num_calls)}

    def do(actions: Iterable[CallAction]) -> None:
        for action in actions:
            match action:
                case SendToAll(RunCall(call_id=call_id)):
                    ran.append(call_id)
                    waiting.extend(CallEnded(rank, call_id) for rank in range(num_ranks))
                case SendToAll(DropCall(call_id=call_id)):
                    dropped.append(call_id)
                case CallAnswered(call_id) | CallRaised(call_id):
                    ends.append(call_id)

    for call_id in range(num_calls):
        do(calls.make(made(call_id, num_ranks), 0))
        waiting += [
            CallStaged(rank, call_id, "no" if cannot[call_id] and rank == 0 else "")
            for rank in range(num_ranks)
        ]
    while waiting:
        message = waiting.pop(data.draw(st.integers(0, len(waiting) - 1)))
        if isinstance(message, CallStaged):
            do(calls.staged(message, 0))
        else:
            do(calls.ended(message, b"", 0.0))
    assert ran == [n for n in range(num_calls) if not cannot[n]]
    assert sorted(dropped) == [n for n in range(num_calls) if cannot[n]]
    assert sorted(ends) == list(range(num_calls))
