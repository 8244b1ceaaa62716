"""A rollout: a session, the environment's agent in it, an outcome and a score.

    run --Transcript--> score --Score--> COMPLETED, or TRUNCATED if a limit ended the agent
     +--timeout--------------> TRUNCATED, without a reward
     +--its task is cancelled--> the session is sealed, which aborts at the engine; no record
     +--AgentFailed, any other error of env code--> AGENT_ERROR
     +--InfraError, or its last call was not answered--> again in a new session, then INFRA_ERROR
    score --InfraError--> again;  any other error, timeout--> INFRA_ERROR

- A session that a limit of rollmesh ended is TRUNCATED for that reason: with a score if its agent
  ended well, else without a reward.
- Only the environment gives a reward, so a fault of the infrastructure is never a reward of zero.
- The session is sealed when its run is over, however that ended.
"""

import math
import reprlib
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from rollmesh.core.clock import Clock
from rollmesh.core.config import WorkerConfig
from rollmesh.core.errors import AgentFailed, EnvError, InfraError
from rollmesh.core.ids import RolloutId
from rollmesh.core.logs import get_logger
from rollmesh.core.text import printable
from rollmesh.core.types import ErrorPlace, Outcome, RolloutRecord, Score, reward_fault
from rollmesh.envs.calls import EnvCalls, OvertimeError, TimeLimit, do_nothing, never_paused
from rollmesh.envs.env import Endpoint, Env, Transcript
from rollmesh.runtime.registry import Runtime
from rollmesh.runtime.scopes import OpenSession
from rollmesh.runtime.session import SessionRecord
from rollmesh.serve.server.stack import cause_of, place_of
from rollmesh.wire.messages import GroupAsk

log = get_logger()

MAX_ERROR_CHARS = 500
"""Limit on the length of an error's text, without its place."""


class WorkerContext(msgspec.Struct, frozen=True):
    """The environment, endpoint and limits of a worker's rollouts."""

    env: Env
    runtime: Runtime
    base_url: str
    """Base URL that agents are given, with `/v1`."""
    model_name: str
    settings: WorkerConfig
    clock: Clock
    calls: EnvCalls = msgspec.field(default_factory=EnvCalls)
    paused_s: Callable[[], float] = never_paused
    """A sum that grows while no engine can serve; time limits of rollouts do not count it."""
    local_url: str = ""
    """Base URL for agents on this machine, with `/v1`; '' if it is `base_url`."""

    def endpoint(self, api_key: str) -> Endpoint:
        """Return the endpoint of the session with this key."""
        return Endpoint(self.base_url, api_key, self.model_name, self.local_url or self.base_url)


class EnvFault(NamedTuple):
    """An exception of environment code, as it is reported."""

    text: str
    """One line, with the place at its end: `ValueError: no answer (my_env.py:15 in score)`."""
    place: ErrorPlace | None


NO_FAULT = EnvFault("", None)


class RolloutResult(msgspec.Struct):
    """A rollout that has ended."""

    record: RolloutRecord
    """Its record without what its session holds, to which a child task may still add."""
    transcript: Transcript | None = None
    """Its transcript, if it has a score."""
    score: Score | None = None

    @property
    def is_cut_short(self) -> bool:
        """A result without a record."""
        return self.record.outcome is Outcome.CANCELLED


class _Verdict(msgspec.Struct, frozen=True):
    """How one run of a rollout ended."""

    outcome: Outcome
    error: str = ""
    score: Score | None = None
    transcript: Transcript | None = None
    place: ErrorPlace | None = None
    is_worth_retry: bool = False


async def play(context: WorkerContext, rollout_id: RolloutId, ask: GroupAsk) -> RolloutResult:
    """Run a rollout to its outcome, again if the infrastructure failed it; never raises."""
    started_s, started_unix_s = context.clock.now_s(), context.clock.unix_s()
    for retries_left in range(context.settings.num_infra_retries, -1, -1):
        opened = context.runtime.register_trajectory(
            rollout_id, ask.sampling, ask.seed, min_policy_version=ask.min_policy_version
        )
        try:
            verdict = await _play_once(context, opened, ask)
        finally:
            context.runtime.cleanup_rollout(rollout_id)
        if not (verdict.is_worth_retry and retries_left):
            break
        log.warning("rollout.retried", rollout_id=str(rollout_id), error=verdict.error)
    record = RolloutRecord(
        index=rollout_id.index,
        outcome=verdict.outcome,
        error=verdict.error,
        place=verdict.place,
        started_s=started_unix_s,
        duration_s=context.clock.now_s() - started_s,
    )
    give_score(record, verdict.score)
    return RolloutResult(record, verdict.transcript, verdict.score)


def cut_short(index: int) -> RolloutResult:
    """Return the result of a rollout that was ended before its outcome because it is not wanted."""
    error = "its group ended first"
    return RolloutResult(RolloutRecord(index=index, outcome=Outcome.CANCELLED, error=error))


def give_score(record: RolloutRecord, score: Score | None) -> None:
    """Copy the environment's score to the record."""
    if score is not None:
        record.reward = float(score.reward)
        record.metrics = dict(score.metrics)


def fill(record: RolloutRecord, session: SessionRecord) -> None:
    """Copy what the session has recorded to the record."""
    record.nodes = session.nodes
    record.engines = session.engines
    record.num_tokens = session.token_ids.nbytes // 4
    record.num_logprobs = session.logprobs.nbytes // 4
    record.messages = session.messages
    record.num_calls = session.num_calls
    record.num_forks = session.num_forks
    record.forks = session.forks
    record.healed = session.healed


def fault_of(error: BaseException, method: object) -> EnvFault:
    """Describe `error`, which `method` of the environment raised, with its place."""
    error = cause_of(error)
    place, text = place_of(error, method), one_line(error)
    if place is None:
        return EnvFault(text, None)
    place = msgspec.structs.replace(place, file=printable(place.file))
    return EnvFault(f"{text} ({place})", place)


def one_line(error: BaseException) -> str:
    """Return the type of an error and the first line of its message."""
    first_line = next(iter(str(error).splitlines()), "")
    return printable(f"{type(error).__name__}: {first_line}"[:MAX_ERROR_CHARS])[:MAX_ERROR_CHARS]


def score_limit(settings: WorkerConfig, when_over: Callable[[], None] = do_nothing) -> TimeLimit:
    """Return the fault of a call that scores."""
    return TimeLimit("score_timeout_s", settings.score_timeout_s, when_over)


def check_score(score: object, method: str = "score") -> Score:
    """Return the score in floats, whatever numbers it has; EnvError that names `method` if it has
    others.

    `method` is the environment's, with its class: `GuessEnv.score`.
    """
    if not isinstance(score, Score):
        raise EnvError(f"{method} returned {_shown(score)}, not a Score")
    reward = _number(f"{method} returned reward", score.reward)
    if fault := reward_fault(reward):
        raise EnvError(f"{method} returned reward {fault}")
    metrics = {
        printable(str(name)): _number(f"{method} returned metric {name} =", value)
        for name, value in score.metrics.items()
    }
    return Score(reward, {name: value for name, value in metrics.items() if math.isfinite(value)})


def _number(what: str, value: Any) -> float:
    """Convert a bool, an int, or a number of numpy's or torch's to a float."""
    try:
        if isinstance(value, str):
            raise TypeError
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise EnvError(f"{what} {_shown(value)}") from None


def _shown(value: object) -> str:
    """Return 'None' for None, and the type of anything else."""
    return "None" if value is None else f"{reprlib.repr(value)} ({type(value).__name__})"


async def _play_once(context: WorkerContext, opened: OpenSession, ask: GroupAsk) -> _Verdict:
    agent = context.endpoint(opened.api_key)

    def when_over() -> None:
        opened.session.seal("the rollout was ended")

    settings = context.settings
    limit = TimeLimit("run_timeout_s", settings.run_timeout_s, when_over, context.paused_s)
    try:
        transcript = await context.calls.call(limit, context.env.run, ask.task, agent)
        if not isinstance(transcript, Transcript):
            raise TypeError(f"run gave {type(transcript).__name__} and not a Transcript")
    except OvertimeError as error:
        return _Verdict(Outcome.TRUNCATED, str(error))
    except InfraError as error:
        return _blame(opened, fault_of(error, context.env.run), is_agents=False)
    except AgentFailed as error:
        return _blame(opened, fault_of(error, context.env.run))
    except Exception as error:  # door: env and agent code may raise anything
        if not opened.session.spent_because:
            rollout_id = str(opened.session.rollout_id)
            log.exception("rollout.failed", rollout_id=rollout_id, task_id=ask.task.id)
        return _blame(opened, fault_of(error, context.env.run))
    if opened.session.engine_fault:
        # An agent may ignore a failed call and then lose: that is no reward of zero.
        return _blame(opened, NO_FAULT)
    return await _score(context, opened, ask, transcript)


def _blame(opened: OpenSession, fault: EnvFault, *, is_agents: bool = True) -> _Verdict:
    """Judge a failed run: a limit of rollmesh ended it, its last call got no answer, or the
    environment or its agent is at fault.
    """
    if spent := opened.session.spent_because:
        return _Verdict(Outcome.TRUNCATED, spent)
    if not is_agents:
        return _infra_error(fault)
    if engine_fault := opened.session.engine_fault:
        return _infra_error(EnvFault(engine_fault[:MAX_ERROR_CHARS], None))
    return _Verdict(Outcome.AGENT_ERROR, fault.text, place=fault.place)


def _infra_error(fault: EnvFault, *, is_worth_retry: bool = True) -> _Verdict:
    return _Verdict(
        Outcome.INFRA_ERROR, fault.text, place=fault.place, is_worth_retry=is_worth_retry
    )


async def _score(
    context: WorkerContext, opened: OpenSession, ask: GroupAsk, transcript: Transcript
) -> _Verdict:
    try:
        limit = score_limit(context.settings)
        found = await context.calls.call(limit, context.env.score, ask.task, transcript)
        score = check_score(found, f"{type(context.env).__name__}.score")
    except Exception as error:  # door: env code may raise anything
        is_worth_retry = isinstance(error, InfraError)
        if not is_worth_retry:
            log.exception("score.failed", task_id=ask.task.id)
        fault = fault_of(error, context.env.score)
        fault = fault._replace(text=f"score: {fault.text}")
        return _infra_error(fault, is_worth_retry=is_worth_retry)
    spent = opened.session.spent_because
    outcome = Outcome.TRUNCATED if transcript.truncated or spent else Outcome.COMPLETED
    return _Verdict(outcome, spent, score, transcript)
