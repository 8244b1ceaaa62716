"""The environment interface: pose tasks, drive an agent against an endpoint, score what it did.

    tasks() -> Task -> run(task, agent) -> Transcript -> score(task, transcript) -> Score
        all siblings scored -> score_siblings(task, siblings) -> score_group(task, scores)

Invariant: plain values in and out, so that an environment may run in the worker's process or in
one of its own; what the agent said to the model is recorded by the session, not here. Rewards
come from `score`, `score_siblings` and `score_group` alone. Driven by the worker; written by users.
"""

import abc
from collections.abc import Awaitable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from rollmesh.core.types import Json, Score, Task
from rollmesh.envs.openai_client import openai_client

if TYPE_CHECKING:
    from openai import AsyncOpenAI


class Endpoint(msgspec.Struct, frozen=True):
    """Where the agent of one rollout finds its model; valid until the rollout ends."""

    base_url: str
    """OpenAI style, ends in `/v1`."""
    api_key: str
    """The session's secret; send it as a Bearer token or x-api-key, never log it."""
    model: str
    """What to put into a request's `model` field."""

    @property
    def root_url(self) -> str:
        """For clients that append `/v1` themselves, as Anthropic's do."""
        return self.base_url.removesuffix("/v1")

    def openai(self, **options: Any) -> "AsyncOpenAI":
        """An `openai.AsyncOpenAI` for this endpoint; all rollouts of a worker share connections.

        Use `agent.model` as the model. `options` are AsyncOpenAI's. It need not be closed.
        """
        return openai_client(self.base_url, self.api_key, **options)


class Transcript(msgspec.Struct, kw_only=True):
    """What `run` hands to `score`; JSON values, so that it can cross a process."""

    data: dict[str, Json] = {}
    """Whatever the environment's `score` needs."""
    truncated: bool = False
    """True where a limit, not the agent, ended the rollout; its outcome is `truncated`."""


class Sibling(msgspec.Struct, frozen=True):
    """A scored rollout of a group, and what a child task may borrow of it.

    Both endpoints answer as long as the group is scored, and 410 from then on.
    """

    index: int
    """In its group."""
    score: Score
    transcript: Transcript
    line: Endpoint
    """Calls that go on from this rollout's messages: they become turns of it, and train with it."""
    model: Endpoint
    """The model alone: nothing of it is recorded, and it is sampled as it is asked."""


class Env(abc.ABC):
    """An environment; the constructor takes the keyword settings of the config's env table.

    One object serves all rollouts of a worker, many at a time: keep per-rollout state in `run`.
    `run` raises `AgentFailed` where the agent itself is at fault (outcome `agent_error`) and
    `InfraError` where it is not (the rollout runs again, up to a bound, then `infra_error`);
    any other exception counts as the agent's fault and is reported with its traceback.
    """

    secret_settings: ClassVar[tuple[str, ...]] = ()
    """Secrets among the settings, besides `*_key`, `*_token`, `*_secret` and `*password*`."""

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
        """The reward of one finished rollout; `async def` where it waits, else run in a thread."""

    def score_siblings(
        self, task: Task, siblings: list[Sibling]
    ) -> list[Score] | Awaitable[list[Score]]:
        """The same for rewards that take child tasks: calls to the model, or on a sibling's line.

        One score per given sibling, in order. Default: `score_group` of their scores.
        """
        return self.score_group(task, [sibling.score for sibling in siblings])

    def score_group(self, task: Task, scores: list[Score]) -> list[Score] | Awaitable[list[Score]]:
        """Rewards that depend on the siblings; one per given score, in order. Default: as given."""
        del task
        return scores

    async def close(self) -> None:
        """Give back what the environment holds (pools, files); called once, on the same loop."""
        return
