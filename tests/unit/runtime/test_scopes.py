"""A scope ends when its last loan is released; borrowers that do not release are named in the
log.
"""

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
from structlog.testing import capture_logs

from rollmesh.core.errors import SessionError, TrajectoryEnded
from rollmesh.core.ids import GroupId, RolloutId
from rollmesh.core.types import SamplingPolicy
from rollmesh.runtime.registry import Runtime
from rollmesh.runtime.scopes import LOAN_PATIENCE_S, OpenSession, Scope
from rollmesh.runtime.session import SessionState
from rollmesh.runtime.tokens.prompts import Prompts
from rollmesh.testing.clock import FakeClock
from rollmesh.testing.sampler import ScriptedSampler
from tests.unit.runtime.session_calls import MORE, USER, ReplyIds, assistant, call, turn

GROUP = GroupId("r", 0)
ROLLOUT = RolloutId(GROUP, 1)
EMPTY = {"scopes": 0, "groups": 0, "doors": 0, "loans": 0}
GONE = {"scopes": 1, "groups": 0, "doors": 4, "loans": 1}
"""Table sizes, except for loans."""


class AgentEnded:
    """A rollout of one call whose agent has ended."""

    def __init__(self, prompts: Prompts, reply_ids: ReplyIds) -> None:
        self.clock = FakeClock()
        self.sampler = ScriptedSampler(lambda _: reply_ids("4"), clock=self.clock)
        self.runtime = Runtime(self.sampler, prompts, 4096, self.clock)
        self.opened: OpenSession = self.runtime.register_trajectory(ROLLOUT, SamplingPolicy(), 7)

    async def play(self) -> None:
        await call(self.opened.session, turn(USER))
        self.runtime.cleanup_rollout(ROLLOUT)


@pytest.fixture
async def ended(prompts: Prompts, reply_ids: ReplyIds) -> AgentEnded:
    made = AgentEnded(prompts, reply_ids)
    await made.play()
    return made


@pytest.fixture
def logs() -> Iterator[list[Any]]:
    with capture_logs() as entries:
        yield entries


def refused_status(runtime: Runtime, api_key: str) -> int:
    with pytest.raises(SessionError) as caught:
        runtime.sessions.find(api_key)
    return caught.value.status


async def test_a_borrowed_transcript_continues_where_it_ended(ended: AgentEnded) -> None:
    runtime, own = ended.runtime, ended.opened.session
    with runtime.lend(ROLLOUT, "judge", appends=True) as loan:
        # The loan does not open the agent's own key again.
        assert refused_status(runtime, ended.opened.api_key) == 410
        session = runtime.sessions.find(loan.api_key)
        assert session is own
        await call(session, turn(USER, assistant("4"), MORE))
    assert refused_status(runtime, loan.api_key) == 410
    assert own.state is SessionState.SEALED
    nodes = own.record().nodes
    assert [(node.parent, node.sampled, node.branch) for node in nodes] == [
        (-1, False, "main"),
        (0, True, "main"),
        (1, False, "main"),
        (2, True, "main"),
    ]
    assert bytes(own.record().messages).count(b"higher") == 1


async def test_a_turn_that_the_end_cut_can_be_requested_again(ended: AgentEnded) -> None:
    """Answers that were not delivered to the agent are void, and answer no other request."""
    runtime = ended.runtime
    again = runtime.register_trajectory(ROLLOUT, SamplingPolicy(), 7)
    (cut,) = await again.session.attach(turn(USER))
    again.session.finish(cut)
    runtime.cleanup_rollout(ROLLOUT)
    with runtime.lend(ROLLOUT, "judge", appends=True) as loan:
        _, answer = await call(runtime.sessions.find(loan.api_key), turn(USER))
    assert answer.content == "4"
    sampled = [node for node in again.session.record().nodes if node.sampled]
    assert [node.finish_reason for node in sampled] == ["void", "stop"]


async def test_a_borrower_of_the_model_leaves_no_trace_in_the_rollout(ended: AgentEnded) -> None:
    runtime, own = ended.runtime, ended.opened.session
    before = own.held_bytes
    with runtime.lend(ROLLOUT, "judge", appends=False) as loan:
        session = runtime.sessions.find(loan.api_key)
        assert session is not own
        await call(session, turn(MORE))
        assert sum(runtime.held().values()) == before + session.held_bytes > before
    assert refused_status(runtime, loan.api_key) == 410
    assert session.held_bytes == 0
    assert own.held_bytes == before
    assert len(own.record().nodes) == 2


async def test_a_borrower_of_the_model_has_its_own_settings_and_seed(
    ended: AgentEnded,
) -> None:
    runtime, requests = ended.runtime, ended.sampler.requests
    with (
        runtime.lend(ROLLOUT, "one", appends=False) as one,
        runtime.lend(ROLLOUT, "other", appends=False) as other,
    ):
        for loan in (one, other):
            await call(runtime.sessions.find(loan.api_key), turn(USER))
    assert len({request.params.seed for request in requests}) == len(requests) == 3
    assert len({request.params.max_tokens for request in requests}) == 1


async def test_a_transcript_stays_open_until_its_last_loan_is_released(ended: AgentEnded) -> None:
    runtime, own = ended.runtime, ended.opened.session
    one = runtime.lend(ROLLOUT, "one", appends=True)
    other = runtime.lend(ROLLOUT, "other", appends=True)
    one.release()
    one.release()
    assert [own.state, refused_status(runtime, one.api_key)] == [SessionState.OPEN, 410]
    other.release()
    assert own.state is SessionState.SEALED


async def test_a_lent_scope_ends_with_its_last_loan(ended: AgentEnded) -> None:
    runtime = ended.runtime
    loan = runtime.lend(ROLLOUT, "judge", appends=True)
    runtime.cleanup_group(GROUP)
    runtime.cleanup_group(GROUP)
    assert runtime.entries() == GONE
    await call(runtime.sessions.find(loan.api_key), turn(USER, assistant("4"), MORE))
    with pytest.raises(TrajectoryEnded):
        runtime.lend(ROLLOUT, "late", appends=False)
    loan.release()
    assert runtime.entries() == EMPTY
    assert refused_status(runtime, loan.api_key) == 401
    with pytest.raises(TrajectoryEnded):
        runtime.resolve_trajectory(ROLLOUT)


@pytest.mark.parametrize("appends", [True, False])
async def test_a_borrower_that_dropped_its_loan_is_logged_and_retains_nothing(
    ended: AgentEnded, logs: list[Any], appends: bool
) -> None:
    runtime = ended.runtime
    runtime.lend(ROLLOUT, "forgetful judge", appends=appends)
    assert runtime.entries()["loans"] == 1
    runtime.cleanup_group(GROUP)
    assert runtime.entries() == EMPTY
    assert [(log["event"], log["borrower"], log["rollout_id"]) for log in logs] == [
        ("loan.leaked", "forgetful judge", "r/0/1")
    ]


async def test_a_loan_that_is_dropped_late_ends_its_scope_at_the_next_check(
    ended: AgentEnded, logs: list[Any]
) -> None:
    runtime = ended.runtime
    loan = runtime.lend(ROLLOUT, "judge", appends=True)
    runtime.cleanup_group(GROUP)
    runtime.look_for_leaks()
    assert runtime.entries() == GONE
    del loan
    runtime.look_for_leaks()
    assert runtime.entries() == EMPTY
    assert [log["why"] for log in logs] == ["dropped without a release"]


async def test_a_borrower_that_does_not_release_is_logged_and_no_longer_waited_for(
    ended: AgentEnded, logs: list[Any]
) -> None:
    runtime, own = ended.runtime, ended.opened.session
    loan = runtime.lend(ROLLOUT, "stubborn judge", appends=True)
    runtime.cleanup_group(GROUP)
    ended.clock.advance(LOAN_PATIENCE_S - 1)
    runtime.look_for_leaks()
    assert runtime.entries() == GONE
    assert logs == []
    ended.clock.advance(1)
    runtime.look_for_leaks()
    assert runtime.entries() == EMPTY
    assert own.held_bytes == 0
    assert [log["borrower"] for log in logs] == ["stubborn judge"]
    assert refused_status(runtime, loan.api_key) == 401
    loan.release()  # too late to have an effect
    assert runtime.entries() == EMPTY


async def test_a_loan_that_is_kept_forever_retains_no_scope(
    ended: AgentEnded, young_heap: None
) -> None:
    del young_heap
    runtime = ended.runtime
    runtime.cleanup_group(GROUP)
    runtime.register_trajectory(ROLLOUT, SamplingPolicy(), 7)
    loan = runtime.lend(ROLLOUT, "judge", appends=False)
    runtime.cleanup_group(GROUP)
    assert len(scopes()) == 1
    loan.release()
    gc.disable()
    try:
        assert scopes() == []
    finally:
        gc.enable()


def scopes() -> list[Scope]:
    return [each for each in gc.get_objects() if isinstance(each, Scope)]


async def test_recording_a_transcript_recalls_its_loans(ended: AgentEnded, logs: list[Any]) -> None:
    runtime, own = ended.runtime, ended.opened.session
    loans = [runtime.lend(ROLLOUT, name, appends=True) for name in ("dropped", "held")]
    model = runtime.lend(ROLLOUT, "judge", appends=False)
    del loans[0]
    runtime.recall(ROLLOUT)
    assert own.state is SessionState.SEALED
    assert [log["borrower"] for log in logs] == ["dropped", "held"]
    assert refused_status(runtime, loans[0].api_key) == 410
    assert runtime.sessions.find(model.api_key) is not own


async def test_a_repeated_rollout_waits_for_no_borrower_of_its_earlier_run(
    ended: AgentEnded, logs: list[Any]
) -> None:
    runtime = ended.runtime
    loan = runtime.lend(ROLLOUT, "judge", appends=True)
    runtime.cleanup_group(GROUP)
    again = runtime.register_trajectory(ROLLOUT, SamplingPolicy(), 7)
    assert [log["why"] for log in logs] == ["the rollout is run again"]
    loan.release()
    assert runtime.sessions.find(again.api_key) is again.session
    assert again.session.state is SessionState.OPEN


@pytest.mark.parametrize("appends", [True, False])
async def test_a_repeated_rollout_recalls_the_loans_of_its_earlier_run(
    ended: AgentEnded, logs: list[Any], appends: bool
) -> None:
    runtime, before = ended.runtime, ended.opened.session
    loan = runtime.lend(ROLLOUT, "judge", appends=appends)
    lent = runtime.sessions.find(loan.api_key)
    await call(lent, turn(MORE))
    again = runtime.register_trajectory(ROLLOUT, SamplingPolicy(), 7)
    assert [(log["borrower"], log["why"]) for log in logs] == [
        ("judge", "the rollout is run again")
    ]
    assert refused_status(runtime, loan.api_key) == 410
    assert before.held_bytes == lent.held_bytes == sum(runtime.held().values()) == 0
    loan.release()
    assert (
        runtime.sessions.find(again.api_key) is runtime.resolve_trajectory(ROLLOUT) is again.session
    )
    runtime.cleanup_group(GROUP)
    assert runtime.entries() == EMPTY


async def test_a_lent_scope_is_freed_without_the_garbage_collector(ended: AgentEnded) -> None:
    runtime = ended.runtime
    ended.sampler.keeps = False
    loan = runtime.lend(ROLLOUT, "judge", appends=True)
    own = weakref.ref(ended.opened.session)
    gc.disable()
    try:
        del ended.opened
        ended.sampler.requests.clear()
        ended.sampler.generations.clear()
        runtime.cleanup_group(GROUP)
        loan.release()
        assert own() is None
    finally:
        gc.enable()
