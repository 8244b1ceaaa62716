"""Outcomes of a rollout attribute faults, and only the environment gives rewards."""

import asyncio
import contextlib
import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollmesh.core.errors import AgentFailed, InfraError, SessionError
from rollmesh.core.ids import GroupId, RolloutId
from rollmesh.core.types import ErrorPlace, Outcome, Score, Task
from rollmesh.envs.env import Endpoint, Transcript
from rollmesh.runtime.chat import Turn
from rollmesh.runtime.generation.sampling import GenerationSettings
from rollmesh.runtime.session import SessionState
from rollmesh.serve.server.rollouts import RolloutResult, WorkerContext, check_score, one_line, play
from rollmesh.testing.sampler import ScriptedSampler
from tests.unit.serve.server.rollout_context import ASK, ScriptedEnv, Step, new_context

ROLLOUT = RolloutId(GroupId("r1", 3), 2)
GOOD = Transcript()


async def play_on(context: WorkerContext) -> RolloutResult:
    return await play(context, ROLLOUT, ASK)


async def test_a_completed_rollout_has_its_score(tmp_path: Path) -> None:
    env = ScriptedEnv(GOOD, reward=3)
    played = await play_on(new_context(tmp_path, env))
    assert played.record.outcome is Outcome.COMPLETED
    assert (played.record.reward, played.record.metrics) == (3.0, {"played": 1.0})
    assert (played.record.index, played.record.error) == (2, "")
    assert env.agents[0].base_url == "http://edge/v1"
    assert env.agents[0].model == "policy"


async def test_a_rollout_cut_by_a_limit_is_truncated_and_keeps_its_score(tmp_path: Path) -> None:
    played = await play_on(new_context(tmp_path, ScriptedEnv(Transcript(truncated=True))))
    assert (played.record.outcome, played.record.reward) == (Outcome.TRUNCATED, 1.0)


async def hang(agent: Endpoint) -> Transcript:
    del agent
    await asyncio.get_running_loop().create_future()
    return GOOD


async def swallow_cancellation(agent: Endpoint) -> Transcript:
    with contextlib.suppress(asyncio.CancelledError):
        await hang(agent)
    return GOOD


@pytest.mark.parametrize("step", [hang, swallow_cancellation])
async def test_a_rollout_out_of_time_is_truncated_without_a_reward(
    tmp_path: Path, step: Step
) -> None:
    played = await play_on(new_context(tmp_path, ScriptedEnv(step), run_timeout_s=0.01))
    assert (played.record.outcome, played.record.reward) == (Outcome.TRUNCATED, None)
    assert played.record.error == "run_timeout_s = 0.01 is over"


@pytest.mark.parametrize(
    "fault", [AgentFailed("gave up"), ValueError("bug"), TimeoutError("the agent's own")]
)
async def test_an_agents_fault_is_an_agent_error_and_not_run_again(
    tmp_path: Path, fault: Exception
) -> None:
    env = ScriptedEnv(fault)
    played = await play_on(new_context(tmp_path, env))
    assert (played.record.outcome, played.record.reward) == (Outcome.AGENT_ERROR, None)
    assert str(fault) in played.record.error
    assert len(env.agents) == 1


@pytest.mark.parametrize("stray", [asyncio.CancelledError(), SystemExit(3)])
async def test_a_stray_cancellation_or_exit_of_an_agent_is_its_own_error(
    tmp_path: Path, stray: BaseException
) -> None:
    async def escape(agent: Endpoint) -> Transcript:
        del agent
        raise stray

    played = await play_on(new_context(tmp_path, ScriptedEnv(escape)))
    assert (played.record.outcome, played.record.reward) == (Outcome.AGENT_ERROR, None)
    assert played.record.error.startswith("EscapedError: ")


async def test_the_first_call_waits_for_the_requested_policy_version(tmp_path: Path) -> None:
    sampler = ScriptedSampler()

    async def begin(agent: Endpoint) -> Transcript:
        session = context.runtime.sessions.find(agent.api_key)
        await session.attach(Turn(messages=[b'{"role":"user","content":"hi"}']))
        return GOOD

    context = new_context(tmp_path, ScriptedEnv(begin), sampler)
    await play(context, ROLLOUT, msgspec.structs.replace(ASK, min_policy_version=3))
    assert [request.min_policy_version for request in sampler.requests] == [3]


async def test_an_infrastructure_fault_is_run_again_in_a_new_session(tmp_path: Path) -> None:
    env = ScriptedEnv(InfraError("engine gone"), GOOD)
    context = new_context(tmp_path, env)
    played = await play_on(context)
    assert (played.record.outcome, played.record.reward) == (Outcome.COMPLETED, 1.0)
    first, second = env.agents
    assert first.api_key != second.api_key


async def test_a_lasting_infrastructure_fault_is_never_a_reward(tmp_path: Path) -> None:
    env = ScriptedEnv(InfraError("engine gone"))
    played = await play_on(new_context(tmp_path, env, num_infra_retries=2))
    assert (played.record.outcome, played.record.reward) == (Outcome.INFRA_ERROR, None)
    assert played.record.error.startswith("InfraError: engine gone (rollout_context.py:")
    assert len(env.agents) == 3


@pytest.mark.parametrize("end", [GOOD, AgentFailed("no answer"), ValueError("no answer")])
async def test_an_agent_that_swallows_a_failed_call_is_run_again_and_not_scored(
    tmp_path: Path, end: Transcript | Exception
) -> None:
    sampler = ScriptedSampler(settings=GenerationSettings(max_fruitless_attempts=0))

    async def swallow(agent: Endpoint) -> Transcript:
        session = context.runtime.sessions.find(agent.api_key)
        turn = Turn(messages=[b'{"role":"user","content":"hi"}'])
        (reply,) = await session.attach(turn)
        reply.join()
        sampler.generations[-1].fail("engine gone")
        with contextlib.suppress(SessionError):
            session.finish(reply)
        if isinstance(end, Exception):
            raise end
        return end

    env = ScriptedEnv(swallow)
    context = new_context(tmp_path, env, sampler, num_infra_retries=1)
    played = await play_on(context)
    assert (played.record.outcome, played.record.reward) == (Outcome.INFRA_ERROR, None)
    assert "no engine" in played.record.error
    assert played.record.place is None, "no line of the environment is at fault"
    assert len(env.agents) == 2


async def spend(context: WorkerContext, agent: Endpoint) -> SessionError:
    """Exceed a limit of the session; return the answer to the agent's next call."""
    session = context.runtime.sessions.find(agent.api_key)
    session.end_early("max_session_bytes = 7 is reached")
    with pytest.raises(SessionError) as caught:
        await session.attach(Turn(messages=[b'{"role":"user","content":"hi"}']))
    return caught.value


@pytest.mark.parametrize("crash", [SessionError, AgentFailed, ValueError, InfraError])
async def test_an_agent_that_crashes_after_the_end_of_its_session_is_truncated(
    tmp_path: Path, crash: type[Exception]
) -> None:
    async def run(agent: Endpoint) -> Transcript:
        refusal = await spend(context, agent)
        raise refusal if crash is SessionError else crash("no more")

    env = ScriptedEnv(run)
    context = new_context(tmp_path, env, num_infra_retries=1)
    played = await play_on(context)
    assert (played.record.outcome, played.record.reward) == (Outcome.TRUNCATED, None)
    assert played.record.error == "max_session_bytes = 7 is reached"
    assert len(env.agents) == 1


async def test_an_agent_that_returns_after_the_end_of_its_session_is_truncated_and_scored(
    tmp_path: Path,
) -> None:
    async def run(agent: Endpoint) -> Transcript:
        refusal = await spend(context, agent)
        assert (refusal.status, refusal.code) == (400, "session_over_limit")
        return GOOD

    env = ScriptedEnv(run, reward=3)
    context = new_context(tmp_path, env)
    played = await play_on(context)
    assert (played.record.outcome, played.record.reward) == (Outcome.TRUNCATED, 3.0)
    assert played.record.error == "max_session_bytes = 7 is reached"


async def test_a_score_that_fails_for_infrastructure_reasons_is_retried(tmp_path: Path) -> None:
    env = ScriptedEnv(GOOD)
    env.score_fault = InfraError("judge gone")
    played = await play_on(new_context(tmp_path, env, num_infra_retries=1))
    assert (played.record.outcome, played.record.reward) == (Outcome.INFRA_ERROR, None)
    assert len(env.agents) == 2


async def test_a_score_that_raises_is_no_reward_and_not_the_agents_fault(tmp_path: Path) -> None:
    env = ScriptedEnv(GOOD)
    env.score_fault = KeyError("answer")
    played = await play_on(new_context(tmp_path, env))
    assert (played.record.outcome, played.record.reward) == (Outcome.INFRA_ERROR, None)
    assert played.record.error.startswith("score: KeyError")
    assert len(env.agents) == 1


def compare(answer: str) -> float:
    """A user's helper, two frames below `score`."""
    return float(json.loads(answer)["right"])


class Faulty(ScriptedEnv):
    """An environment whose score calls a library through a helper of its own file."""

    def score(self, task: Task, transcript: Transcript) -> Score:
        del task, transcript
        return Score(compare("not json"))


async def test_an_error_in_score_names_the_line_of_the_users_file(tmp_path: Path) -> None:
    played = await play_on(new_context(tmp_path, Faulty(GOOD)))
    line = compare.__code__.co_firstlineno + 2
    assert played.record.place == ErrorPlace("JSONDecodeError", __file__, line, "compare")
    assert played.record.error.startswith("score: JSONDecodeError: Expecting value")
    assert played.record.error.endswith(f"(test_rollouts.py:{line} in compare)")


async def test_an_error_in_run_names_its_line(tmp_path: Path) -> None:
    async def run(agent: Endpoint) -> Transcript:
        del agent
        raise ValueError("no such tool\nand more")

    played = await play_on(new_context(tmp_path, ScriptedEnv(run)))
    line = run.__code__.co_firstlineno + 2
    assert played.record.error == f"ValueError: no such tool (test_rollouts.py:{line} in run)"
    assert played.record.place == ErrorPlace("ValueError", __file__, line, "run")


async def test_an_error_in_a_task_group_is_reported_by_its_cause(tmp_path: Path) -> None:
    async def search() -> None:
        raise LookupError("nothing found")

    async def run(agent: Endpoint) -> Transcript:
        del agent
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(search())
        return GOOD

    played = await play_on(new_context(tmp_path, ScriptedEnv(run)))
    line = search.__code__.co_firstlineno + 1
    assert played.record.error == f"LookupError: nothing found (test_rollouts.py:{line} in search)"


async def test_a_call_of_sys_exit_names_its_line(tmp_path: Path) -> None:
    async def run(agent: Endpoint) -> Transcript:
        del agent
        raise SystemExit(3)

    played = await play_on(new_context(tmp_path, ScriptedEnv(run)))
    assert played.record.error.endswith(
        f"(test_rollouts.py:{run.__code__.co_firstlineno + 2} in run)"
    )


class Forgetful(ScriptedEnv):
    """An environment whose score returns no reward."""

    def score(self, task: Task, transcript: Transcript) -> Score:
        del task, transcript
        return Score(None)  # type: ignore[arg-type]


async def test_a_reward_of_none_names_the_environment_and_its_method(tmp_path: Path) -> None:
    played = await play_on(new_context(tmp_path, Forgetful(GOOD)))
    line = Forgetful.score.__code__.co_firstlineno
    assert played.record.outcome is Outcome.INFRA_ERROR
    assert played.record.error == (
        f"score: EnvError: Forgetful.score returned reward None (test_rollouts.py:{line} in score)"
    )
    assert played.record.place == ErrorPlace("EnvError", __file__, line, "score")


async def test_a_session_is_sealed_when_its_rollout_has_ended(tmp_path: Path) -> None:
    env = ScriptedEnv(InfraError("gone"), GOOD)
    context = new_context(tmp_path, env)
    await play_on(context)
    for agent in env.agents:
        with pytest.raises(SessionError) as caught:
            context.runtime.sessions.find(agent.api_key)
        assert caught.value.status == 410
    assert context.runtime.resolve_trajectory(ROLLOUT).state is SessionState.SEALED
    context.runtime.cleanup_group(ROLLOUT.group_id)
    with pytest.raises(SessionError) as caught:
        context.runtime.sessions.find(env.agents[0].api_key)
    assert caught.value.status == 401


async def test_a_cancelled_rollout_seals_its_session_before_its_code_has_ended(
    tmp_path: Path,
) -> None:
    started, cancelled = asyncio.Event(), asyncio.Event()
    seen: list[SessionState] = []

    async def linger(agent: Endpoint) -> Transcript:
        started.set()
        try:
            await hang(agent)
        finally:
            seen.append(context.runtime.sessions.find(agent.api_key).state)
            cancelled.set()
        return GOOD

    env = ScriptedEnv(linger)
    context = new_context(tmp_path, env)
    task = asyncio.ensure_future(play_on(context))
    await started.wait()
    task.cancel()
    await cancelled.wait()
    assert seen == [SessionState.SEALED]
    with pytest.raises(asyncio.CancelledError):
        await task
    assert context.runtime.resolve_trajectory(ROLLOUT).record().nodes == []


def test_errors_are_one_line_of_bounded_length() -> None:
    assert one_line(TypeError("first\nsecond")) == "TypeError: first"
    assert len(one_line(ValueError("x" * 9999))) == 500
    # File names may contain such text; heartbeats carry the last error and must be encodable.
    assert one_line(ValueError("half a pair: \udcff")) == "ValueError: half a pair: \\udcff"


class Number:
    """A number type like those of numpy or torch."""

    def __float__(self) -> float:
        return 0.5


def test_a_score_of_other_number_types_becomes_floats() -> None:
    """Other types would be sent unchanged and fail to decode."""
    metrics: dict[Any, Any] = {"right": True, "num": 3, "share": Number(), 7: 1.5, "mean": math.nan}
    score = check_score(Score(True, metrics))
    assert msgspec.structs.astuple(score) == (
        1.0,
        {"right": 1.0, "num": 3.0, "share": 0.5, "7": 1.5},
    )
    assert {type(value) for value in (score.reward, *score.metrics.values())} == {float}


@pytest.mark.parametrize(
    "bad",
    [
        *(1.0, None, Score(math.nan), Score(math.inf), Score("7")),  # type: ignore[arg-type]
        *(Score(1e308), Score(-1.1e30)),
        Score(1.0, {"word": "good"}),  # type: ignore[dict-item]
    ],
)
def test_a_result_that_is_no_score_is_refused(bad: object) -> None:
    with pytest.raises((TypeError, ValueError)):
        check_score(bad)
