"""Slots bound the concurrent rollouts; a group's payload is complete only if no fault occurred."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import pytest

from rollmesh.core.errors import InfraError
from rollmesh.core.ids import GroupId
from rollmesh.core.types import ErrorPlace, GroupRecord, Outcome, Score, Task
from rollmesh.envs.env import Endpoint, Env, Transcript
from rollmesh.serve.server.groups import GroupPayload, Slots, empty_payload, run_group
from rollmesh.serve.server.worker_machine import Begin
from rollmesh.wire.frames import decode_record
from tests.unit.serve.server.rollout_context import ASK, ScriptedEnv, new_context


async def hold(slots: Slots, gate: asyncio.Event, order: list[int], number: int) -> None:
    async with slots:
        order.append(number)
        await gate.wait()


async def test_no_more_than_the_slots_run_at_once_and_in_order() -> None:
    slots, gate, order = Slots(2), asyncio.Event(), list[int]()
    async with asyncio.TaskGroup() as group:
        for number in range(5):
            group.create_task(hold(slots, gate, order, number))
        for _ in range(5):
            await asyncio.sleep(0)
        assert order == [0, 1]
        assert slots.num_open == 5
        gate.set()
    assert order == [0, 1, 2, 3, 4]
    assert (slots.num_open, slots.num_finished) == (0, 5)


async def test_a_cancelled_waiter_takes_no_slot_and_is_not_counted() -> None:
    slots, gate, order = Slots(1), asyncio.Event(), list[int]()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(hold(slots, gate, order, number)) for number in range(3)]
        await asyncio.sleep(0)
        tasks[1].cancel()
        await asyncio.sleep(0)
        gate.set()
    assert order == [0, 2]
    assert (slots.num_open, slots.num_finished) == (0, 2)


async def test_a_failed_rollout_releases_its_slot() -> None:
    slots = Slots(1)
    for _ in range(2):
        with pytest.raises(ValueError, match="bad"):
            async with slots:
                raise ValueError("bad")
    assert (slots.num_open, slots.num_finished) == (0, 0)


GROUP = GroupId("r1", 3)
GOOD = Transcript()


async def run(
    folder: Path,
    env: Env,
    slots: Slots | None = None,
    deadline_s: float = 0.0,
    **settings: float | str,
) -> tuple[GroupPayload, GroupRecord]:
    context = new_context(folder, env, None, **settings)
    begin = Begin(GROUP, 3, b"", deadline_s)
    payload = await run_group(context, slots or Slots(2), begin, ASK)
    return payload, decode_record(payload.body)


async def hang(agent: Endpoint) -> Transcript:
    del agent
    await asyncio.get_running_loop().create_future()
    return GOOD


async def test_a_complete_group_has_every_sibling_in_order(tmp_path: Path) -> None:
    payload, record = await run(tmp_path, ScriptedEnv(GOOD))
    assert payload.complete
    assert record.reason == ""
    assert record.task == ASK.task
    assert [rollout.index for rollout in record.rollouts] == [0, 1, 2]
    assert payload.buffers == (b"", b"")
    assert payload.num_bytes == len(payload.body)


class SlotsWithEvent(Slots):
    """Slots that set an event when the first rollout has ended."""

    def __init__(self, max_rollouts: int) -> None:
        super().__init__(max_rollouts)
        self.one_is_free = asyncio.Event()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await super().__aexit__(kind, error, trace)
        self.one_is_free.set()


async def test_the_siblings_of_a_rollout_that_failed_for_good_are_cancelled(tmp_path: Path) -> None:
    slots = SlotsWithEvent(3)

    async def fail_second(agent: Endpoint) -> Transcript:
        del agent
        await slots.one_is_free.wait()
        raise InfraError("engine gone")

    env = ScriptedEnv(GOOD, fail_second, hang)
    payload, record = await run(tmp_path, env, slots, num_infra_retries=0)
    assert not payload.complete
    line = fail_second.__code__.co_firstlineno + 3
    place = f"(test_groups.py:{line} in fail_second)"
    assert record.reason == f"infra_error: 1 of 3 rollouts: InfraError: engine gone {place}"
    assert record.place == ErrorPlace("InfraError", __file__, line, "fail_second")
    outcomes = [rollout.outcome for rollout in record.rollouts]
    assert outcomes == [Outcome.COMPLETED, Outcome.INFRA_ERROR, Outcome.CANCELLED]
    assert [rollout.index for rollout in record.rollouts] == [0, 1, 2]
    assert record.rollouts[2].error == "its group ended first"
    assert (slots.num_open, slots.num_finished, slots.num_failed) == (0, 2, 1)
    assert slots.last_error == f"infra_error: InfraError: engine gone {place}"
    assert (slots.last_place, slots.last_task_id) == (record.place, ASK.task.id)


async def test_a_sibling_that_waits_for_a_slot_is_not_begun_for_a_lost_group(
    tmp_path: Path,
) -> None:
    env = ScriptedEnv(InfraError("engine gone"))
    _, record = await run(tmp_path, env, Slots(1), num_infra_retries=0)
    assert len(env.agents) == 1
    assert [r.outcome for r in record.rollouts[1:]] == [Outcome.CANCELLED] * 2


async def test_the_other_siblings_are_scored_if_the_policy_allows_it(tmp_path: Path) -> None:
    env = Ranking(GOOD, InfraError("engine gone"), GOOD)
    policy = "score_rest"
    payload, record = await run(tmp_path, env, num_infra_retries=0, failed_sibling=policy)
    assert payload.complete
    assert record.reason == ""
    assert [r.reward for r in record.rollouts] == [0.0, None, 1.0]
    assert record.rollouts[1].outcome is Outcome.INFRA_ERROR
    assert env.num_scored == [2]


async def test_a_group_without_a_surviving_sibling_is_incomplete_under_any_policy(
    tmp_path: Path,
) -> None:
    env = ScriptedEnv(InfraError("engine gone"))
    policy = "score_rest"
    payload, record = await run(tmp_path, env, num_infra_retries=0, failed_sibling=policy)
    assert not payload.complete
    assert record.reason.startswith("infra_error: 3 of 3 rollouts: ")


async def test_a_group_past_its_deadline_ends_with_its_finished_rollouts(tmp_path: Path) -> None:
    slots = Slots(3)
    payload, record = await run(tmp_path, ScriptedEnv(GOOD, hang), slots, deadline_s=0.05)
    assert not payload.complete
    assert record.reason == "deadline: the ask's 0.05 s are over"
    outcomes = [rollout.outcome for rollout in record.rollouts]
    assert outcomes == [Outcome.COMPLETED, Outcome.CANCELLED, Outcome.CANCELLED]
    assert slots.num_open == 0


async def test_a_group_whose_scoring_outlasts_its_deadline_ends_at_the_deadline(
    tmp_path: Path,
) -> None:
    gate = threading.Event()
    env = Ranking(GOOD)
    env.give = lambda scores: [score for score in scores if gate.wait(30)]
    _, record = await run(tmp_path, env, deadline_s=0.05)
    gate.set()
    assert record.reason.startswith("deadline: ")


async def test_a_blocking_score_ends_at_its_time_limit(tmp_path: Path) -> None:
    gate = threading.Event()
    env = Ranking(GOOD)
    env.give = lambda scores: [score for score in scores if gate.wait(30)]
    _, record = await run(tmp_path, env, score_timeout_s=0.01)
    gate.set()
    assert record.reason.startswith(
        "infra_error: score_group: OvertimeError: score_timeout_s = 0.01 is over (test_groups.py:"
    )


async def test_an_agents_error_leaves_the_group_complete(tmp_path: Path) -> None:
    payload, record = await run(tmp_path, ScriptedEnv(ValueError("bug"), GOOD))
    assert payload.complete
    assert [r.reward for r in record.rollouts] == [None, 1.0, 1.0]


class Ranking(ScriptedEnv):
    """Scores by rank; `give` turns the scores into the result of score_group."""

    def __init__(self, *steps: Exception | Transcript) -> None:
        super().__init__(*steps)
        self.give: Callable[[list[Score]], list[Score]] = lambda scores: scores
        self.num_scored: list[int] = []

    def score_group(self, task: Task, scores: list[Score]) -> list[Score]:
        del task
        self.num_scored.append(len(scores))
        return self.give([Score(float(place)) for place in range(len(scores))])


async def test_scored_siblings_are_scored_together_again(tmp_path: Path) -> None:
    env = Ranking(ValueError("bug"), GOOD)
    payload, record = await run(tmp_path, env)
    assert payload.complete
    assert [rollout.reward for rollout in record.rollouts] == [None, 0.0, 1.0]
    assert env.num_scored == [2]


async def test_an_incomplete_group_is_not_scored_together(tmp_path: Path) -> None:
    env = Ranking(InfraError("gone"), GOOD)
    await run(tmp_path, env, num_infra_retries=0)
    assert env.num_scored == []


@pytest.mark.parametrize(
    "give", [lambda scores: scores[1:], lambda scores: [1, 2, 3], lambda scores: 1 / 0]
)
async def test_a_group_whose_scoring_fails_is_incomplete(
    tmp_path: Path, give: Callable[[list[Score]], list[Score]]
) -> None:
    env = Ranking(GOOD)
    env.give = give
    payload, record = await run(tmp_path, env)
    assert not payload.complete
    assert record.reason.startswith("infra_error: score_group: ")


async def test_siblings_share_the_slots(tmp_path: Path) -> None:
    gate, num_running, most = asyncio.Event(), 0, 0

    async def play(agent: Endpoint) -> Transcript:
        nonlocal num_running, most
        del agent
        num_running += 1
        most = max(most, num_running)
        await gate.wait()
        num_running -= 1
        return GOOD

    asyncio.get_running_loop().call_soon(gate.set)
    await run(tmp_path, ScriptedEnv(play))
    assert most <= 2


def test_a_group_that_could_not_run_reports_the_reason() -> None:
    payload = empty_payload("bad_ask: no")
    assert not payload.complete
    assert decode_record(payload.body).reason == "bad_ask: no"
