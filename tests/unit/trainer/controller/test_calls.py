"""Calls: all ranks or none, in their order, and each ends once."""

from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from rollmesh.core.errors import CallFailed, RankGone
from rollmesh.trainer.controller.rank_group import (
    CallAction,
    CallAnswered,
    CallRaised,
    CallRequested,
    RankCalls,
    SendToAll,
)
from rollmesh.wire.ranks import CallEnded, CallStaged, DropCall, RunCall, StageCall

SETTLE_S = 5.0


def made(call_id: int, num_ranks: int = 2) -> CallRequested:
    return CallRequested(
        call_id, "actor", "train", 4, tuple(b"%d" % rank for rank in range(num_ranks))
    )


def stage(calls: RankCalls, call_id: int, *errors: str) -> list[CallAction]:
    """Every rank says that it is staged, or why not."""
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
    """With call 1 of two ranks running."""
    calls = RankCalls(2, SETTLE_S)
    list(calls.make(made(1), 3))
    stage(calls, 1, "", "")
    return calls


def failures(actions: Iterable[CallAction]) -> list[tuple[int, str]]:
    return [(each.call_id, str(each.error)) for each in actions if isinstance(each, CallRaised)]


def test_each_rank_is_told_of_a_call_with_its_own_arguments() -> None:
    calls = RankCalls(2, SETTLE_S)
    told = list(calls.make(made(1), 3))
    assert told == [SendToAll(StageCall(3, 1, "actor", "train", 4), (b"0", b"1"))]


def test_nothing_runs_before_all_have_their_arguments() -> None:
    calls = RankCalls(2, SETTLE_S)
    list(calls.make(made(1), 3))
    assert list(calls.staged(CallStaged(1, 1), 3)) == []
    assert list(calls.staged(CallStaged(0, 1), 3)) == [SendToAll(RunCall(3, 1))]


def test_where_one_rank_cannot_have_its_arguments_none_runs_the_call() -> None:
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


def test_a_call_that_is_dropped_holds_nobody_up() -> None:
    calls = RankCalls(2, SETTLE_S)
    list(calls.make(made(1), 3))
    list(calls.make(made(2), 3))
    stage(calls, 2, "", "")
    assert stage(calls, 1, "no", "")[-1] == SendToAll(RunCall(3, 2))


def test_a_call_that_all_ranks_failed_at_says_so_of_the_first() -> None:
    calls = started()
    end(calls, 1, 1, "ValueError: b")
    failed = end(calls, 0, 1, "ValueError: a")
    assert failures(failed) == [(1, "actor.train failed at rank 0: ValueError: a")]
    assert isinstance(failed[0], CallRaised)
    assert isinstance(failed[0].error, CallFailed)


def test_a_rank_that_stays_in_a_call_at_which_another_failed_is_stuck() -> None:
    calls = started()
    end(calls, 1, 1, "ValueError: b", now_s=10.0)
    assert calls.stuck(10.0 + SETTLE_S - 0.1) is None
    lost = calls.stuck(10.0 + SETTLE_S)
    assert isinstance(lost, RankGone)
    assert lost.rank == 0
    assert "actor.train, at which rank 1 failed: ValueError: b" in lost.cause


def test_a_call_that_takes_long_is_not_stuck() -> None:
    calls = started()
    end(calls, 1, 1, now_s=10.0)
    assert calls.stuck(1e9) is None


def test_what_is_said_of_unknown_calls_changes_nothing() -> None:
    calls = started()
    assert stage(calls, 9, "", "") == []
    assert stage(calls, 1, "late", "late") == []
    assert end(calls, 0, 9) == []


@given(st.data())
def test_whatever_the_order_each_call_ends_once_and_runs_in_its_turn(data: st.DataObject) -> None:
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
