"""The environment interface: provide tasks, run an agent against an endpoint, score the result.

    tasks() -> Task -> run(task, agent) -> Transcript -> score(task, transcript) -> Score
        all siblings scored -> score_siblings(task, siblings) -> score_group(task, scores)

- Plain values in and out, so that an environment may run in a process of its own. The session, not
  the environment, records model calls.
- Rewards come from `score`, `score_siblings` and `score_group` only.
- All OpenAI clients of an event loop share a connection pool: an `AsyncOpenAI` with its own takes
  0.1 s of the loop to load certificates, one that shares it at most a millisecond.
"""

import abc
import asyncio
from collections.abc import Awaitable, Iterator
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakKeyDictionary

import msgspec

from rollmesh.core.errors import EnvError
from rollmesh.core.types import Json, Score, Task

if TYPE_CHECKING:
    from openai import AsyncOpenAI

_pools: WeakKeyDictionary[asyncio.AbstractEventLoop, Any] = WeakKeyDictionary()


def openai_client(base_url: str, api_key: str, **options: Any) -> "AsyncOpenAI":
    """Return a client for one endpoint; `options` are AsyncOpenAI's, such as `max_retries`.

    Call it on the event loop that will use the client. EnvError if `openai` is not installed.
    """
    try:
        from openai import AsyncOpenAI  # noqa: PLC0415 - takes seconds, and is used by few
    except ModuleNotFoundError:
        raise EnvError("agent.openai() needs the package openai: pip install openai") from None
    loop = asyncio.get_running_loop()
    if loop not in _pools:
        _pools[loop] = _pool_class()(trust_env=False)
    return AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=_pools[loop], **options)


async def close_pool() -> None:
    """Close the pool of the running loop; a later client opens a new one."""
    pool = _pools.pop(asyncio.get_running_loop(), None)
    if pool is not None:
        await pool.end()


@cache
def _pool_class() -> Any:
    from openai import DefaultAsyncHttpxClient  # noqa: PLC0415 - as above

    class Pool(DefaultAsyncHttpxClient):
        """A pool that stays open when one rollout's client is closed."""

        async def aclose(self) -> None:
            return

        async def end(self) -> None:
            await super().aclose()

    return Pool


class Endpoint(msgspec.Struct, frozen=True):
    """The model endpoint of one rollout's agent; valid until the rollout ends."""

    base_url: str
    """OpenAI style, ends in `/v1`; by the setting interception.public_url it can be reached from
    containers and other machines."""
    api_key: str
    """The session's secret; send it as a Bearer token or x-api-key, never log it."""
    model: str
    """Value for a request's `model` field."""
    local_url: str = ""
    """`base_url` for this machine, where they differ."""

    @property
    def root_url(self) -> str:
        """Base URL for clients that append `/v1` themselves, such as Anthropic's."""
        return self.base_url.removesuffix("/v1")

    def on_this_machine(self) -> "Endpoint":
        """Return the endpoint for a program on this machine."""
        return msgspec.structs.replace(self, base_url=self.local_url or self.base_url)

    def openai(self, **options: Any) -> "AsyncOpenAI":
        """Return an `openai.AsyncOpenAI` for this endpoint; rollouts of a worker share connections.

        Use `agent.model` as the model. `options` are AsyncOpenAI's. It need not be closed.
        """
        return openai_client(self.on_this_machine().base_url, self.api_key, **options)


class Transcript(msgspec.Struct, kw_only=True):
    """Result of `run` for `score`; JSON values, so that it can cross processes."""

    data: dict[str, Json] = {}
    """Data for the environment's `score`."""
    truncated: bool = False
    """True if a limit, not the agent, ended the rollout; its outcome is `truncated`."""


class Sibling(msgspec.Struct, frozen=True):
    """A scored rollout of a group, with endpoints for child tasks.

    Both endpoints answer while the group is scored, and return 410 afterwards.
    """

    index: int
    """Index in its group."""
    score: Score
    transcript: Transcript
    line: Endpoint
    """Continues this rollout's messages: calls become turns of it, and train with it."""
    model: Endpoint
    """The plain model: calls are not recorded, and sampled as requested."""


class Env(abc.ABC):
    """An environment; the constructor takes the keyword settings of the config's env table.

    One object serves all rollouts of a worker, many at a time: keep per-rollout state in `run`.
    `run` raises `AgentFailed` for the agent's own faults (outcome `agent_error`) and `InfraError`
    for others (the rollout runs again, up to a bound, then `infra_error`); any other exception
    counts as the agent's fault and is reported with its traceback.
    """

    secret_settings: ClassVar[tuple[str, ...]] = ()
    """Secret settings besides `*_key`, `*_token`, `*_secret` and `*password*`."""

    @abc.abstractmethod
    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        """Yield the tasks of `split` in an order that `seed` decides.

        `train` may end: training then repeats its tasks in rounds, shuffled by the run's seed.
        """

    @abc.abstractmethod
    async def run(self, task: Task, agent: Endpoint) -> Transcript:
        """Drive one agent through `task`; every model call goes to `agent.base_url`."""

    @abc.abstractmethod
    def score(self, task: Task, transcript: Transcript) -> Score | Awaitable[Score]:
        """Return the reward of a finished rollout; a plain method runs in a thread."""

    def score_siblings(
        self, task: Task, siblings: list[Sibling]
    ) -> list[Score] | Awaitable[list[Score]]:
        """Score siblings with child tasks: calls to the model, or continuations of a sibling.

        Return one score per sibling, in order. Default: `score_group` of their scores.
        """
        return self.score_group(task, [sibling.score for sibling in siblings])

    def score_group(self, task: Task, scores: list[Score]) -> list[Score] | Awaitable[list[Score]]:
        """Return rewards that depend on the siblings, one per score, in order. Default:
        unchanged."""
        del task
        return scores

    async def close(self) -> None:
        """Release resources (pools, files); called once, on the same loop."""
        return
