"""Scoring of a group may run child tasks: on a sibling's history, or of the model alone."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollmesh.core.errors import AgentFailed
from rollmesh.core.ids import GroupId
from rollmesh.core.types import GroupRecord, Score, Task
from rollmesh.envs.chat import ChatClient, ChatReply, Message
from rollmesh.envs.env import Endpoint, Sibling, Transcript
from rollmesh.serve.client.samples import Cut, cut
from rollmesh.serve.server.groups import GroupPayload, Slots, run_group
from rollmesh.serve.server.worker_machine import Begin
from rollmesh.wire.frames import decode_record
from tests.unit.serve.server.rollout_context import (
    ASK,
    ScriptedEnv,
    new_context,
    sampler_answering,
    served,
)

BEGIN = Begin(GroupId("r1", 3), 2, b"")
GUESS: Message = {"role": "user", "content": "guess"}
WHY: Message = {"role": "user", "content": "why?"}
NONE = {"scopes": 0, "groups": 0, "doors": 0, "loans": 0}


class OneTurn(ScriptedEnv):
    """An environment whose rollouts are one turn each; the test decides what runs when the group
    is scored.
    """

    def __init__(self, ask: Callable[["OneTurn", Sibling], Awaitable[object]]) -> None:
        super().__init__(self._play)
        self.client = ChatClient()
        self.siblings: list[Sibling] = []
        self._ask = ask

    async def _play(self, agent: Endpoint) -> Transcript:
        reply = await self.client.complete(agent, [GUESS])
        return Transcript(data={"messages": [GUESS, reply.message]})

    async def score_siblings(self, task: Task, siblings: list[Sibling]) -> list[Score]:
        assert task == ASK.task
        self.siblings = siblings
        for sibling in siblings:
            await self._ask(self, sibling)
        return [Score(sibling.score.reward + sibling.index) for sibling in siblings]

    async def close(self) -> None:
        await self.client.close()


async def continue_sibling(env: OneTurn, sibling: Sibling) -> ChatReply:
    """Continue a sibling's history by one turn."""
    return await env.client.complete(sibling.line, [*sibling.transcript.data["messages"], WHY])


async def run(
    folder: Path, env: OneTurn, begin: Begin = BEGIN, **settings: float
) -> tuple[GroupPayload, GroupRecord]:
    context = new_context(folder, env, sampler_answering(folder, "4"), **settings)
    async with served(context) as (context, server):
        payload = await run_group(context, Slots(2), begin, ASK)
        assert context.runtime.entries() == NONE
        assert len(server.inflight) == sum(context.runtime.held().values()) == 0
    return payload, decode_record(payload.body)


def samples(payload: GroupPayload, record: GroupRecord) -> Cut:
    token_ids = np.frombuffer(payload.buffers[0], np.int32)
    logprobs = np.frombuffer(payload.buffers[1], np.float32)
    return cut(BEGIN.group_id, record, token_ids, logprobs, frozenset({"main"}))


async def test_a_turn_that_a_child_appends_trains_with_its_sibling(
    tmp_path: Path,
) -> None:
    payload, record = await run(tmp_path, OneTurn(continue_sibling))
    assert payload.complete, record.reason
    assert [rollout.reward for rollout in record.rollouts] == [1.0, 2.0]
    for rollout in record.rollouts:
        assert rollout.num_calls == 2
        assert [(node.parent, node.sampled, node.branch) for node in rollout.nodes] == [
            (-1, False, "main"),
            (0, True, "main"),
            (1, False, "main"),
            (2, True, "main"),
        ]
        assert bytes(rollout.messages).count(b'"why?"') == 1
    made = samples(payload, record)
    assert made.unused == []
    assert [(each.reward, int(each.loss_mask.sum())) for each in made.samples] == [
        (1.0, 4),
        (2.0, 4),
    ]


async def test_a_childs_own_calls_of_the_model_are_in_no_record(tmp_path: Path) -> None:
    async def judge(env: OneTurn, sibling: Sibling) -> None:
        reply = await env.client.complete(sibling.model, [WHY], temperature=0)
        assert reply.text == "4"

    payload, record = await run(tmp_path, OneTurn(judge))
    assert payload.complete, record.reason
    for rollout in record.rollouts:
        assert (rollout.num_calls, len(rollout.nodes), rollout.num_forks) == (1, 2, 0)


async def test_only_siblings_with_a_score_are_passed_to_scoring(
    tmp_path: Path,
) -> None:
    async def look(env: OneTurn, sibling: Sibling) -> None:
        del env
        assert sibling.score == Score(1.0, {"played": 1.0})

    env = OneTurn(look)
    env._steps = [ValueError("bug"), env._play]  # noqa: SLF001 - its own script
    payload, record = await run(tmp_path, env)
    assert payload.complete, record.reason
    assert [sibling.index for sibling in env.siblings] == [1]
    assert [rollout.reward for rollout in record.rollouts] == [None, 2.0]


@pytest.mark.parametrize("which", ["line", "model"])
async def test_the_keys_of_children_expire_when_the_group_is_scored(
    tmp_path: Path, which: str
) -> None:
    """The key of another group has expired while the first sibling of this one is scored."""
    early: list[Endpoint] = []

    async def keep(env: OneTurn, sibling: Sibling) -> None:
        if early:
            with pytest.raises(AgentFailed, match=r"HTTP 4(01|10)"):
                await env.client.complete(early[0], [WHY])
        early.append(getattr(sibling, which))

    env = OneTurn(keep)
    context = new_context(tmp_path, env, sampler_answering(tmp_path, "4"))
    async with served(context) as (context, _):
        for seq in range(2):
            env.siblings = []
            payload = await run_group(context, Slots(2), Begin(GroupId("r1", seq), 1, b""), ASK)
            assert payload.complete, payload.body
    assert len(early) == 2


async def test_a_child_that_outlasts_the_scoring_time_is_refused(tmp_path: Path) -> None:
    """This includes a child that is not awaited: its key is revoked, so it gets no answers."""
    error: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def stay(env: OneTurn, sibling: Sibling) -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            with pytest.raises(AgentFailed) as caught:
                await continue_sibling(env, sibling)
            error.set_result(str(caught.value))

    _, record = await run(tmp_path, OneTurn(stay), score_timeout_s=0.05)
    assert record.reason.startswith(
        "infra_error: score_siblings: OvertimeError: score_timeout_s = 0.05 is over ("
    )
    assert "HTTP 410" in await error


async def test_a_group_that_is_cancelled_during_scoring_leaves_nothing(
    tmp_path: Path,
) -> None:
    asked = asyncio.Event()

    async def stay(env: OneTurn, sibling: Sibling) -> None:
        await continue_sibling(env, sibling)
        asked.set()
        await asyncio.get_running_loop().create_future()

    env = OneTurn(stay)
    context = new_context(tmp_path, env, sampler_answering(tmp_path, "4"))
    async with served(context) as (context, server):
        task = asyncio.create_task(run_group(context, Slots(2), BEGIN, ASK))
        await asked.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert context.runtime.entries() == NONE
        assert len(server.inflight) == 0


@pytest.mark.parametrize("num_given", [0, 1, 3])
async def test_a_wrong_number_of_scores_scores_no_sibling(tmp_path: Path, num_given: int) -> None:
    class Odd(OneTurn):
        async def score_siblings(self, task: Task, siblings: list[Sibling]) -> list[Score]:
            del task, siblings
            return [Score(5.0)] * num_given

    payload, record = await run(tmp_path, Odd(continue_sibling))
    assert not payload.complete
    why = f"infra_error: score_siblings: EnvError: Odd.score_siblings returned {num_given} scores"
    assert record.reason.startswith(why)
    assert [rollout.reward for rollout in record.rollouts] == [1.0, 1.0]


async def test_the_simple_scoring_hook_scores_siblings_by_numbers(
    tmp_path: Path,
) -> None:
    class Ranking(ScriptedEnv):
        def score_group(self, task: Task, scores: list[Score]) -> list[Score]:
            del task
            return [Score(score.reward + place) for place, score in enumerate(scores)]

    env: Any = Ranking(Transcript())
    context = new_context(tmp_path, env)
    record = decode_record((await run_group(context, Slots(2), BEGIN, ASK)).body)
    assert [rollout.reward for rollout in record.rollouts] == [1.0, 2.0]
    # The default of the larger hook behaves the same.
    siblings = [
        Sibling(n, Score(1.0), Transcript(), Endpoint("", "", ""), Endpoint("", "", ""))
        for n in range(2)
    ]
    assert env.score_siblings(ASK.task, siblings) == [Score(1.0), Score(2.0)]
