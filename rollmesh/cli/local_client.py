"""Rollouts without a mesh: in this process, with model calls through a gateway of our own.

    eval --base-url, play --base-url    gateway --capture relay, before the endpoint
    play                                gateway --capture tokens, before an engine

- Child processes end with the block that started them, and with this process.
- The agent gets a session's key; the endpoint's own key stays with the gateway.
- An environment is called as a worker calls it: the same limits, retries and outcomes. A rollout
  whose last model call got no answer is `infra_error`.
"""

import argparse
import asyncio
import os
import subprocess
import tempfile
import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

import httpx
import msgspec

from rollmesh.cli.gateway import UPSTREAM_KEY_VARIABLE
from rollmesh.core.child_process import ManagedProcess, launched_environment
from rollmesh.core.config import WorkerConfig
from rollmesh.core.errors import AddressError, ConfigError, InfraError, UserError
from rollmesh.core.ids import GroupId, new_id
from rollmesh.core.process import Ready
from rollmesh.core.redaction import register_secret
from rollmesh.core.types import GroupRecord, Outcome, RolloutRecord, Score, Task
from rollmesh.envs.calls import EnvCalls, OvertimeError, TimeLimit
from rollmesh.envs.env import Endpoint, Env, Sibling, Transcript
from rollmesh.launch.plan import ROLLMESH
from rollmesh.serve.client.gateway import Gateway, GatewaySession
from rollmesh.serve.server.rollouts import EnvFault, check_score, fault_of, give_score, score_limit

if TYPE_CHECKING:
    from rollmesh.serve.client.arrivals import Arrival
    from rollmesh.serve.client.async_client import CallOptions

ANSWER_S = 10.0
STOP_TIMEOUT_S = 3.0


class ThirdPartyEndpoint(msgspec.Struct, frozen=True):
    """An OpenAI-style endpoint of a third party."""

    base_url: str
    model: str
    """The model name that requests carry."""
    key: str
    """'' if it needs none."""


def add_upstream(parser: argparse.ArgumentParser) -> None:
    """Add `--base-url`, `--model` and `--api-key-env`, for `upstream_of`."""
    parser.add_argument(
        "--base-url", metavar="URL", help="an OpenAI-style endpoint, such as https://HOST/v1"
    )
    parser.add_argument(
        "--model", metavar="NAME", help="with --base-url: its model (default: the first it lists)"
    )
    parser.add_argument(
        "--api-key-env",
        metavar="VARIABLE",
        default=UPSTREAM_KEY_VARIABLE,
        help="with --base-url: environment variable that holds its key (default: %(default)s)",
    )


def upstream_of(options: argparse.Namespace) -> ThirdPartyEndpoint | None:
    """Return the endpoint of `--base-url`; None without one. UserError if it does not answer."""
    if not options.base_url:
        if options.model:
            raise ConfigError(f"--model {options.model}: needs --base-url")
        return None
    key = os.environ.get(options.api_key_env, "")
    register_secret(key)
    if not key and options.api_key_env != UPSTREAM_KEY_VARIABLE:
        raise ConfigError(f"--api-key-env {options.api_key_env}: the variable is not set")
    names = model_names(options.base_url, key)
    if options.model or names:
        return ThirdPartyEndpoint(options.base_url, options.model or names[0], key)
    raise ConfigError(f"--base-url {options.base_url}: lists no models; name one by --model")


def model_names(base_url: str, key: str) -> list[str]:
    """Return the models that the endpoint lists; AddressError if it does not answer or refuses the
    key.
    """
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    url = f"{base_url.rstrip('/').removesuffix('/v1')}/v1/models"
    try:
        reply = httpx.get(url, headers=headers, timeout=ANSWER_S, follow_redirects=True)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        why = str(error) or type(error).__name__
        raise AddressError(f"--base-url {base_url}: does not answer: {why}") from None
    if reply.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
        raise AddressError(
            f"--base-url {base_url}: refuses the key ({reply.status_code}); "
            "name the environment variable of the key by --api-key-env"
        )
    try:
        return [str(each["id"]) for each in msgspec.json.decode(reply.content)["data"]]
    except (msgspec.MsgspecError, KeyError, TypeError):
        return []


@contextmanager
def relay(upstream: ThirdPartyEndpoint) -> Iterator[Gateway]:
    """Yield a gateway that forwards calls to the endpoint and records them."""
    words = ("--capture", "relay", "--engine", upstream.base_url)
    with gateway(words, {UPSTREAM_KEY_VARIABLE: upstream.key} if upstream.key else {}) as found:
        yield found


@contextmanager
def gateway(words: tuple[str, ...], variables: Mapping[str, str] = {}) -> Iterator[Gateway]:
    """Yield a client of a gateway with these arguments, on loopback."""
    with tempfile.TemporaryDirectory(prefix="rollmesh-") as folder:
        token = Path(folder) / "token"
        more = ("--port", "0", "--no-journal", "--admin-token-file", str(token))
        settings = ("--set", f"run.folder={folder}")
        with (
            child("gateway", (*words, *more, *settings), variables) as ready,
            Gateway(ready.address, token) as found,
        ):
            yield found


@contextmanager
def child(verb: str, words: tuple[str, ...], variables: Mapping[str, str] = {}) -> Iterator[Ready]:
    """Run a verb as a child process while the block runs; UserError if it does not start."""
    process = ManagedProcess(
        (*ROLLMESH, verb, *words),
        reports=True,
        environment=launched_environment(variables),
        stdout=subprocess.DEVNULL,
    )
    try:
        ready = process.wait_ready()
        if ready is None:
            raise UserError(f"rollmesh {verb} did not start; its output is above")
        yield ready
    finally:
        process.stop(STOP_TIMEOUT_S)


SEEDS = 2**63


class LocalRollout(msgspec.Struct):
    """One rollout, and what scoring its group needs."""

    record: RolloutRecord
    transcript: Transcript | None = None
    score: Score | None = None
    is_worth_retry: bool = False
    """Whether an infrastructure fault ended it, so that it may run again."""


class LocalRollouts:
    """Runs rollouts of one environment."""

    def __init__(
        self, env: Env, gateway: Gateway, model: str, settings: WorkerConfig, *, is_relay: bool
    ) -> None:
        """A relay forwards sampling parameters unchanged; else those of evaluation are used."""
        self._is_relay = is_relay
        self._env = env
        self._gateway = gateway
        self._model = model
        self._settings = settings
        self._calls = EnvCalls()
        self._slots = asyncio.Semaphore(settings.max_rollouts)

    async def play(self, task: Task, index: int, seed: int) -> LocalRollout:
        """Run and score one rollout; retry after an infrastructure fault, up to the configured
        limit.
        """
        async with self._slots:
            started_s, started_unix_s = time.monotonic(), time.time()
            for retries_left in range(self._settings.num_infra_retries, -1, -1):
                played = await self._once(task, index, (seed + index) % SEEDS)
                if not (played.is_worth_retry and retries_left):
                    break
            played.record.started_s = started_unix_s
            played.record.duration_s = time.monotonic() - started_s
            return played

    async def score_together(self, task: Task, scored: list[LocalRollout]) -> str:
        """Let the environment compare the siblings; return why that failed, or ''."""
        kind = type(self._env)
        if not scored or (
            kind.score_siblings is Env.score_siblings and kind.score_group is Env.score_group
        ):
            return ""
        try:
            found = await self._scores(task, scored)
            if len(found) != len(scored):
                raise ValueError(f"returned {len(found)} scores for {len(scored)} siblings")
            for each, score in zip(scored, found, strict=True):
                give_score(each.record, check_score(score, f"{kind.__name__}.score_group"))
        except Exception as error:  # noqa: BLE001 - door: env code may raise anything
            return f"infra_error: score_group: {fault_of(error, self._env.score_group).text}"
        return ""

    async def _scores(self, task: Task, scored: list[LocalRollout]) -> list[Score]:
        limit = score_limit(self._settings)
        scores = [each.score for each in scored if each.score]
        if type(self._env).score_siblings is Env.score_siblings:
            return await self._calls.call(limit, self._env.score_group, task, scores)
        session = await self._open(task, seed=None)
        agent = self._endpoint(session)
        siblings = [
            Sibling(each.record.index, each.score, each.transcript, agent, agent)
            for each in scored
            if each.score and each.transcript
        ]
        try:
            return await self._calls.call(limit, self._env.score_siblings, task, siblings)
        finally:
            await asyncio.to_thread(session.delete)

    async def _once(self, task: Task, index: int, seed: int) -> LocalRollout:
        try:
            return await self._in_session(task, index, seed)
        except AddressError as error:  # a failed gateway call ends one rollout at most
            return _failed(
                index, Outcome.INFRA_ERROR, EnvFault(str(error), None), is_worth_retry=True
            )

    async def _in_session(self, task: Task, index: int, seed: int) -> LocalRollout:
        session = await self._open(task, seed)
        played = await self._run(task, index, self._endpoint(session))
        account = await asyncio.to_thread(session.finish)
        await asyncio.to_thread(session.delete)
        record = played.record
        if account["outcome"] == Outcome.INFRA_ERROR:
            record.outcome = Outcome.INFRA_ERROR
            record.error, record.place = _last_error(account) or record.error, None
            played.score = record.reward = None
            played.is_worth_retry = True
        record.num_calls = account["num_calls"]
        record.messages = msgspec.Raw(msgspec.json.encode(account["messages"]))
        return played

    async def _run(self, task: Task, index: int, agent: Endpoint) -> LocalRollout:
        limit = TimeLimit("run_timeout_s", self._settings.run_timeout_s)
        try:
            transcript = await self._calls.call(limit, self._env.run, task, agent)
            if not isinstance(transcript, Transcript):
                raise TypeError(f"run returned {type(transcript).__name__} and not a Transcript")
        except OvertimeError as error:
            return LocalRollout(
                RolloutRecord(index=index, outcome=Outcome.TRUNCATED, error=str(error))
            )
        except Exception as error:  # noqa: BLE001 - door: env and agent code may raise anything
            is_infra = isinstance(error, InfraError)
            outcome = Outcome.INFRA_ERROR if is_infra else Outcome.AGENT_ERROR
            return _failed(index, outcome, fault_of(error, self._env.run), is_infra)
        return await self._score(task, index, transcript)

    async def _score(self, task: Task, index: int, transcript: Transcript) -> LocalRollout:
        try:
            limit = score_limit(self._settings)
            found = await self._calls.call(limit, self._env.score, task, transcript)
            score = check_score(found, f"{type(self._env).__name__}.score")
        except Exception as error:  # noqa: BLE001 - door: env code may raise anything
            fault = fault_of(error, self._env.score)
            fault = fault._replace(text=f"score: {fault.text}")
            return _failed(index, Outcome.INFRA_ERROR, fault, isinstance(error, InfraError))
        outcome = Outcome.TRUNCATED if transcript.truncated else Outcome.COMPLETED
        record = RolloutRecord(index=index, outcome=outcome)
        give_score(record, score)
        return LocalRollout(record, transcript, score)

    async def _open(self, task: Task, seed: int | None) -> GatewaySession:
        metadata = {"task": task.id}
        if self._is_relay:
            return await asyncio.to_thread(self._gateway.open, metadata=metadata)
        return await asyncio.to_thread(
            self._gateway.open, metadata=metadata, sampling="eval", seed=seed
        )

    def _endpoint(self, session: GatewaySession) -> Endpoint:
        return Endpoint(session.base_url, session.api_key, self._model)


class LocalClient:
    """Groups of local rollouts, with the methods of AsyncRolloutClient that an evaluation uses."""

    num_ended = 0
    reopened: Mapping[GroupId, Task] = {}

    def __init__(self, rollouts: LocalRollouts) -> None:
        self._rollouts = rollouts
        self._run_id = new_id("e")
        self._num_asked = 0
        self._groups: dict[GroupId, asyncio.Task[Arrival]] = {}

    async def ask(self, task: Task, num_samples: int, **options: "Unpack[CallOptions]") -> GroupId:
        """Start a group."""
        group_id = GroupId(self._run_id, self._num_asked)
        self._num_asked += 1
        work = self._run(group_id, task, num_samples, options.get("seed", 0))
        self._groups[group_id] = asyncio.create_task(work, name=f"group {group_id}")
        return group_id

    async def stream(self) -> "AsyncGenerator[Arrival, None]":
        """Yield groups as they end, until none is open."""
        while self._groups:
            await asyncio.wait(self._groups.values(), return_when=asyncio.FIRST_COMPLETED)
            for group_id in [each for each, work in self._groups.items() if work.done()]:
                yield self._groups.pop(group_id).result()

    async def cancel(self, group_id: GroupId, reason: str = "no longer wanted") -> None:
        """Stop a group; its result is discarded."""
        del reason
        work = self._groups.pop(group_id, None)
        if work is not None:
            work.cancel()
            await asyncio.wait([work])

    async def _run(self, group_id: GroupId, task: Task, num_samples: int, seed: int) -> "Arrival":
        # numpy comes with these, and stays out of the command line.
        from rollmesh.serve.client.arrivals import (  # noqa: PLC0415 - see above
            Dropped,
            without_tokens,
        )

        plays = (self._rollouts.play(task, index, seed) for index in range(num_samples))
        played = await asyncio.gather(*plays)
        fault = await self._rollouts.score_together(task, [each for each in played if each.score])
        records = [each.record for each in played]
        if not fault and all(each.outcome is Outcome.INFRA_ERROR for each in records):
            fault = f"infra_error: {records[0].error}"
        record = GroupRecord(task=task, rollouts=records, reason=fault, is_eval=True)
        if fault:
            return Dropped(group_id, fault, record)
        return without_tokens(group_id, record)


def _failed(index: int, outcome: Outcome, fault: EnvFault, is_worth_retry: bool) -> LocalRollout:
    record = RolloutRecord(index=index, outcome=outcome, error=fault.text, place=fault.place)
    return LocalRollout(record, is_worth_retry=is_worth_retry)


def _last_error(account: Mapping[str, object]) -> str:
    """Return the error of the session's last call, if it has one."""
    calls = account.get("calls")
    last = calls[-1] if isinstance(calls, list) and calls else {}
    return str(last.get("error") or last.get("unread") or f"status {last.get('status')}")
