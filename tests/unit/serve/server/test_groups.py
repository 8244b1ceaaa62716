"""A group: one payload of all siblings, complete only if the infrastructure held."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from rollmesh.core.errors import InfraError
from rollmesh.core.ids import GroupId
from rollmesh.core.types import GroupRecord, Outcome, Score, Task
from rollmesh.envs.env import Endpoint, Env, Transcript
from rollmesh.serve.server.groups import Payload, empty_payload, run_group
from rollmesh.serve.server.slots import Slots
from rollmesh.wire.bodies import decode_record
from tests.unit.serve.server.staging import ASK, ScriptedEnv, new_stage

GROUP = GroupId("r1", 3)
GOOD = Transcript()


async def run(folder: Path, env: Env, **settings: float) -> tuple[Payload, GroupRecord]:
    stage = new_stage(folder, env, None, **settings)
    payload = await run_group(stage, Slots(2), GROUP, 3, ASK)
    return payload, decode_record(payload.body)


async def test_complete_group_has_every_sibling_in_order(tmp_path: Path) -> None:
    payload, record = await run(tmp_path, ScriptedEnv(GOOD))
    assert payload.complete
    assert record.reason == ""
    assert record.task == ASK.task
    assert [rollout.index for rollout in record.rollouts] == [0, 1, 2]
    assert payload.buffers == (b"", b"")
    assert payload.num_bytes == len(payload.body)


async def test_sibling_that_stays_infra_error_makes_the_group_incomplete(tmp_path: Path) -> None:
    env = ScriptedEnv(InfraError("engine gone"), GOOD)
    payload, record = await run(tmp_path, env, num_infra_retries=0)
    assert not payload.complete
    assert record.reason == "infra_error: 1 of 3 rollouts: InfraError: engine gone"
    outcomes = [rollout.outcome for rollout in record.rollouts]
    assert outcomes == [Outcome.INFRA_ERROR, Outcome.COMPLETED, Outcome.COMPLETED]


async def test_agents_error_leaves_the_group_complete(tmp_path: Path) -> None:
    payload, record = await run(tmp_path, ScriptedEnv(ValueError("bug"), GOOD))
    assert payload.complete
    assert [r.reward for r in record.rollouts] == [None, 1.0, 1.0]


class Ranking(ScriptedEnv):
    """Scores by place; `give` turns the scores into what score_group answers."""

    def __init__(self, *steps: Exception | Transcript) -> None:
        super().__init__(*steps)
        self.give: Callable[[list[Score]], list[Score]] = lambda scores: scores
        self.num_scored: list[int] = []

    def score_group(self, task: Task, scores: list[Score]) -> list[Score]:
        del task
        self.num_scored.append(len(scores))
        return self.give([Score(float(place)) for place in range(len(scores))])


async def test_siblings_that_have_a_score_are_scored_together(tmp_path: Path) -> None:
    env = Ranking(ValueError("bug"), GOOD)
    payload, record = await run(tmp_path, env)
    assert payload.complete
    assert [rollout.reward for rollout in record.rollouts] == [None, 0.0, 1.0]
    assert env.num_scored == [2]


async def test_incomplete_group_is_not_scored_together(tmp_path: Path) -> None:
    env = Ranking(InfraError("gone"), GOOD)
    await run(tmp_path, env, num_infra_retries=0)
    assert env.num_scored == []


@pytest.mark.parametrize(
    "give", [lambda scores: scores[1:], lambda scores: [1, 2, 3], lambda scores: 1 / 0]
)
async def test_group_whose_scoring_breaks_is_incomplete(
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


def test_group_that_could_not_run_says_why() -> None:
    payload = empty_payload("bad_ask: no")
    assert not payload.complete
    assert decode_record(payload.body).reason == "bad_ask: no"
