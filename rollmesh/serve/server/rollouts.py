"""One rollout: a session, the environment's agent in it, an outcome, a score.

    run --Transcript--> score --Score--> COMPLETED, or TRUNCATED where a limit ended the agent
     +--time is over---------> TRUNCATED, without a reward
     +--its task is cancelled--> the session is sealed, which aborts at the engine; no record
     +--AgentFailed, any other error of env code--> AGENT_ERROR
     +--InfraError, or its last call got no answer--> again in a fresh session, then INFRA_ERROR
    score --InfraError--> again;  any other error, time is over--> INFRA_ERROR

A session that a limit of ours ended is TRUNCATED for that reason, whatever its agent made of it:
scored where it ended well, without a reward where not. Invariants: a reward comes from the
environment alone, so a fault of the infrastructure is never a reward of zero; the session is sealed
when its run is over, however that ended. Driven by groups.py.
"""

import math
from collections.abc import Callable
from typing import Any

import msgspec

from rollmesh.core.clock import Clock
from rollmesh.core.config import WorkerConfig
from rollmesh.core.errors import AgentFailed, InfraError
from rollmesh.core.ids import RolloutId
from rollmesh.core.logs import get_logger, readable
from rollmesh.core.types import Outcome, RolloutRecord, Score
from rollmesh.envs.calls import Calls, Limit, OvertimeError, never_paused, nothing
from rollmesh.envs.env import Endpoint, Env, Transcript
from rollmesh.runtime.record import SessionRecord
from rollmesh.runtime.registry import Runtime
from rollmesh.runtime.scopes import OpenSession
from rollmesh.wire.messages import GroupAsk

log = get_logger()

MAX_ERROR_CHARS = 500


class Stage(msgspec.Struct, frozen=True):
    """What rollouts of a worker are played on."""

    env: Env
    runtime: Runtime
    base_url: str
    """Of the interception server, with `/v1`."""
    model_name: str
    settings: WorkerConfig
    clock: Clock
    calls: Calls = msgspec.field(default_factory=Calls)
    paused_s: Callable[[], float] = never_paused
    """A sum that grows while no engine can serve, which no rollout is charged with."""


class Played(msgspec.Struct):
    """A rollout that came to its end."""

    record: RolloutRecord
    """Without what its session holds, to which a child task may still add."""
    transcript: Transcript | None = None
    """Of one that has a score."""
    score: Score | None = None

    @property
    def is_cut_short(self) -> bool:
        """It has left nothing."""
        return self.record.outcome is Outcome.CANCELLED


class _Verdict(msgspec.Struct, frozen=True):
    """How one run of a rollout ended."""

    outcome: Outcome
    error: str = ""
    score: Score | None = None
    transcript: Transcript | None = None
    is_worth_retry: bool = False


async def play(stage: Stage, rollout_id: RolloutId, ask: GroupAsk) -> Played:
    """Run a rollout to its outcome, again where the infrastructure failed it; never raises."""
    started_s, started_unix_s = stage.clock.now_s(), stage.clock.unix_s()
    for retries_left in range(stage.settings.num_infra_retries, -1, -1):
        opened = stage.runtime.register_trajectory(rollout_id, ask.sampling, ask.seed)
        try:
            verdict = await _play_once(stage, opened, ask)
        finally:
            stage.runtime.cleanup_rollout(rollout_id)
        if not (verdict.is_worth_retry and retries_left):
            break
        log.warning("rollout.retried", rollout_id=str(rollout_id), error=verdict.error)
    record = RolloutRecord(
        index=rollout_id.index,
        outcome=verdict.outcome,
        error=verdict.error,
        started_s=started_unix_s,
        duration_s=stage.clock.now_s() - started_s,
    )
    give_score(record, verdict.score)
    return Played(record, verdict.transcript, verdict.score)


def cut_short(index: int) -> Played:
    """A rollout that was ended before its outcome, since nobody wants it any more."""
    error = "its group ended first"
    return Played(RolloutRecord(index=index, outcome=Outcome.CANCELLED, error=error))


def give_score(record: RolloutRecord, score: Score | None) -> None:
    """Put the environment's word on the record."""
    if score is not None:
        record.reward = float(score.reward)
        record.metrics = dict(score.metrics)


def fill(record: RolloutRecord, session: SessionRecord) -> None:
    """Put what the session has recorded on the record."""
    record.nodes = session.nodes
    record.engines = session.engines
    record.num_tokens = session.token_ids.nbytes // 4
    record.num_logprobs = session.logprobs.nbytes // 4
    record.messages = session.messages
    record.num_calls = session.num_calls
    record.num_forks = session.num_forks
    record.forks = session.forks
    record.healed = session.healed


def one_line(error: BaseException) -> str:
    """The kind of an error and the first line of what it says."""
    first_line = next(iter(str(error).splitlines()), "")
    return readable(f"{type(error).__name__}: {first_line}"[:MAX_ERROR_CHARS])


def score_limit(settings: WorkerConfig, when_over: Callable[[], None] = nothing) -> Limit:
    """Of a call that scores."""
    return Limit("score_timeout_s", settings.score_timeout_s, when_over)


def check_score(score: object) -> Score:
    """The score in floats, whatever numbers it has; TypeError or ValueError where it is none."""
    if not isinstance(score, Score):
        raise TypeError(f"score gave {type(score).__name__} and not a Score")
    reward = _number("reward", score.reward)
    if not math.isfinite(reward):
        raise ValueError(f"the reward is {reward}")
    metrics = {readable(str(k)): _number(f"metric {k}", v) for k, v in score.metrics.items()}
    return Score(reward, {name: value for name, value in metrics.items() if math.isfinite(value)})


def _number(name: str, value: Any) -> float:
    """Of a bool, an int, or a number of numpy's or torch's too."""
    if isinstance(value, str):
        raise TypeError(f"the {name} is {value!r} and no number")
    return float(value)


async def _play_once(stage: Stage, opened: OpenSession, ask: GroupAsk) -> _Verdict:
    agent = Endpoint(stage.base_url, opened.api_key, stage.model_name)

    def when_over() -> None:
        opened.session.seal("the rollout was ended")

    settings = stage.settings
    limit = Limit("run_timeout_s", settings.run_timeout_s, when_over, stage.paused_s)
    try:
        transcript = await stage.calls.call(limit, stage.env.run, ask.task, agent)
        if not isinstance(transcript, Transcript):
            raise TypeError(f"run gave {type(transcript).__name__} and not a Transcript")
    except OvertimeError as error:
        return _Verdict(Outcome.TRUNCATED, str(error))
    except InfraError as error:
        return _blame(opened, one_line(error), is_agents=False)
    except AgentFailed as error:
        return _blame(opened, one_line(error))
    except Exception as error:  # door: env and agent code may raise anything
        if not opened.session.spent_because:
            log.exception("rollout.failed", rollout_id=str(opened.session.rollout_id))
        return _blame(opened, one_line(error))
    if opened.session.engine_fault:
        # An agent may swallow a failed call and go on to lose: that is no reward of zero.
        return _blame(opened, "")
    return await _score(stage, opened, ask, transcript)


def _blame(opened: OpenSession, error: str, *, is_agents: bool = True) -> _Verdict:
    """Whose fault a failed run is: a limit of ours; or the agent's, unless its last call got no
    answer."""
    if spent := opened.session.spent_because:
        return _Verdict(Outcome.TRUNCATED, spent)
    fault = opened.session.engine_fault if is_agents else error
    if fault:
        return _Verdict(Outcome.INFRA_ERROR, fault[:MAX_ERROR_CHARS], is_worth_retry=True)
    return _Verdict(Outcome.AGENT_ERROR, error)


async def _score(
    stage: Stage, opened: OpenSession, ask: GroupAsk, transcript: Transcript
) -> _Verdict:
    try:
        limit = score_limit(stage.settings)
        found = await stage.calls.call(limit, stage.env.score, ask.task, transcript)
        score = check_score(found)
    except InfraError as error:
        return _Verdict(Outcome.INFRA_ERROR, f"score: {one_line(error)}", is_worth_retry=True)
    except Exception as error:  # door: env code may raise anything
        log.exception("score.failed", task_id=ask.task.id)
        return _Verdict(Outcome.INFRA_ERROR, f"score: {one_line(error)}")
    spent = opened.session.spent_because
    outcome = Outcome.TRUNCATED if transcript.truncated or spent else Outcome.COMPLETED
    return _Verdict(outcome, spent, score, transcript)
