"""Plain values that rooms exchange: tasks, outcomes, scores, sampling, token nodes.

Values only: nothing needs a clock, a socket or a tensor, and everything can be sent over the wire.
"""

import enum
import math
from pathlib import PurePath
from typing import Any, Literal

import msgspec

Json = Any
"""JSON values; code that looks inside says so in its docstring."""


class Outcome(enum.StrEnum):
    """How a rollout ended. Only `completed` and `truncated` have a reward that trains."""

    COMPLETED = "completed"
    TRUNCATED = "truncated"
    AGENT_ERROR = "agent_error"
    INFRA_ERROR = "infra_error"
    CANCELLED = "cancelled"
    STALE = "stale"


TRAINED_OUTCOMES = (Outcome.COMPLETED, Outcome.TRUNCATED)


class Task(msgspec.Struct, frozen=True):
    """One problem of an environment."""

    id: str
    """Id of the problem within its environment; the same problem has the same id."""
    data: dict[str, Json] = {}
    """The problem's data for the environment; JSON values."""


MAX_REWARD = 1e30
"""Largest absolute reward. Beyond it, sums of squares and float32 gradients overflow."""


def reward_fault(reward: float) -> str:
    """Return why `reward` cannot be trained on, or '' if it can."""
    if not math.isfinite(reward):
        return f"{reward} is no finite number"
    if abs(reward) > MAX_REWARD:
        return f"{reward:g} is larger than {MAX_REWARD:g}; scale it down"
    return ""


class Score(msgspec.Struct, frozen=True):
    """An environment's score of one rollout."""

    reward: float
    """A finite number, at most MAX_REWARD in size."""
    metrics: dict[str, float] = {}
    """Metrics for people, which do not train. Values that are not finite are left out."""


class ErrorPlace(msgspec.Struct, frozen=True):
    """The place where an exception left environment code: the innermost frame in a file of the
    user's.
    """

    kind: str
    """The exception's type, `ValueError`."""
    file: str
    """Path of the source file."""
    line: int
    function: str

    def __str__(self) -> str:
        """`my_env.py:15 in score`."""
        return f"{PurePath(self.file).name}:{self.line} in {self.function}"


class FieldPolicy(enum.StrEnum):
    """Treatment of a sampling field that the agent sends."""

    FORCE = "force"
    DEFAULT = "default"
    ALLOW = "allow"


class SamplingRule(msgspec.Struct, frozen=True):
    """A session's rule for one sampling field: `force` ours, `default` to ours, `allow` theirs."""

    policy: FieldPolicy
    value: float | int | None = None


class SamplingPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """A session's rule for each sampling field; the defaults are those of training.

    Training forces temperature 1 and top_p 1 and replaces client seeds: agents send
    `temperature: 0` or a fixed seed, which would make all siblings of a group equal.
    """

    temperature: SamplingRule = SamplingRule(FieldPolicy.FORCE, 1.0)
    top_p: SamplingRule = SamplingRule(FieldPolicy.FORCE, 1.0)
    top_k: SamplingRule = SamplingRule(FieldPolicy.FORCE, -1)
    penalties: SamplingRule = SamplingRule(FieldPolicy.FORCE, 0.0)
    """Frequency, presence and repetition penalties together; forced means none."""
    seed: SamplingRule = SamplingRule(FieldPolicy.FORCE, None)
    """Forced to None means: derived from (rollout, generation)."""
    max_tokens: SamplingRule = SamplingRule(FieldPolicy.DEFAULT, 512)
    """Forced or defaulted tokens per turn; always capped by the context length."""
    min_p: SamplingRule = SamplingRule(FieldPolicy.FORCE, 0.0)
    logit_bias: SamplingRule = SamplingRule(FieldPolicy.FORCE)
    """Forced to none in training."""
    grammar: SamplingRule = SamplingRule(FieldPolicy.ALLOW)
    """Response formats and the like; forced means none, and then nothing holds answers to them."""


EVAL_SAMPLING = SamplingPolicy(
    temperature=SamplingRule(FieldPolicy.DEFAULT, 1.0),
    top_p=SamplingRule(FieldPolicy.DEFAULT, 1.0),
    top_k=SamplingRule(FieldPolicy.DEFAULT, -1),
    penalties=SamplingRule(FieldPolicy.ALLOW),
    seed=SamplingRule(FieldPolicy.ALLOW),
    min_p=SamplingRule(FieldPolicy.DEFAULT, 0.0),
    logit_bias=SamplingRule(FieldPolicy.ALLOW),
)
"""The policy of evaluations: the agent's own values apply."""


class OutputGrammar(msgspec.Struct, frozen=True):
    """A constraint on an answer's text, enforced by the engine's grammar backend."""

    kind: Literal["json_schema", "regex", "ebnf"]
    text: str


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """The sampling parameters of one generation, after the session's policy; recorded on its
    node.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop: tuple[str, ...] = ()
    """Stop strings; matched by us across engine requests, not by the engine."""
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_p: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, logit bias)"""
    grammar: OutputGrammar | None = None


class VersionRun(msgspec.Struct, frozen=True, array_like=True):
    """`num_tokens` consecutive tokens sampled by `policy_version`."""

    policy_version: int
    num_tokens: int
    engine: int = -1
    """Index in the rollout's `engines`; -1 if not recorded."""


Branch = Literal["main", "subagent", "side"]

DialectName = str
"""Name of the API by which a turn was requested (serve/interception/dialects): chat, completions,
responses, messages; relay for relayed calls; '' in older records.
"""


class NodeRow(msgspec.Struct, frozen=True, array_like=True):
    """One node of a rollout's token graph as the wire carries it.

    A node holds only new tokens. Rows come in creation order; a node's tokens follow those of the
    rows before it in the rollout's flat token array, its log-probs (sampled nodes only) likewise.
    """

    parent: int
    """Row index of the parent, -1 at a root."""
    num_tokens: int
    sampled: bool
    policy_versions: tuple[VersionRun, ...] = ()
    """Runs that add up to num_tokens; empty if not sampled."""
    branch: Branch = "main"
    params: SamplingParams | None = None
    """Sampling parameters of a sampled node."""
    finish_reason: str = ""
    """`stop`, `length`, `tool_calls` or `void` (never delivered); empty where not sampled."""
    superseded: bool = False
    """A retry of the same request replaced this sampled node."""
    images: tuple[str, ...] = ()
    """Digests (blobs.py) of the images whose placeholders are among its tokens, in order."""
    dialect: DialectName = ""
    """The API by which a sampled node was requested."""


class ForkRow(msgspec.Struct, frozen=True):
    """One place where a session's history did not extend what was sampled."""

    call: int
    """Number of the call that brought it, from 0."""
    node: int
    """Row of the node that has the new prompt tokens."""
    cause: str
    """One of the causes in runtime/conversation/forks.py."""
    message: int
    """Index of the first message that differs from the stored ones."""
    held: str = ""
    """The stored and the received message, cut to where they differ; '' if there is none."""
    got: str = ""
    token: int = -1
    """Index of the first token that differs from the abandoned branch; -1 if there is none."""
    num_tokens: int = 0
    """Prompt tokens that were computed again."""


class RolloutRecord(msgspec.Struct, kw_only=True):
    """The result of one rollout; its arrays are sent beside it as raw buffers."""

    index: int
    outcome: Outcome
    reward: float | None = None
    """None if the outcome has no reward."""
    metrics: dict[str, float] = {}
    error: str = ""
    """Why the outcome is not `completed`, in one line."""
    nodes: list[NodeRow] = []
    num_tokens: int = 0
    """Length of this rollout's part of the group's flat int32 token buffer."""
    num_logprobs: int = 0
    """Length of this rollout's part of the group's flat float32 log-prob buffer."""
    engines: list[str] = []
    """Addresses of the engines that sampled its nodes."""
    messages: msgspec.Raw = msgspec.Raw(b"[]")
    """The main branch's messages as a JSON array, for people."""
    num_calls: int = 0
    num_forks: int = 0
    forks: list[ForkRow] = []
    healed: dict[str, int] = {}
    """Differences between stored and received history that did not fork, by kind."""
    started_s: float = 0.0
    """Unix time."""
    duration_s: float = 0.0
    place: ErrorPlace | None = None
    """The place in environment code that raised `error`; None for engine faults and limits."""


class GroupRecord(msgspec.Struct, kw_only=True):
    """All siblings of one group, or the reason why there are none."""

    task: Task
    rollouts: list[RolloutRecord] = []
    reason: str = ""
    """Why there are no rollouts: `cancelled`, `env_failed: ...`, `attempts_exhausted: ...`."""
    is_eval: bool = False
    place: ErrorPlace | None = None
    """The place in environment code that raised what `reason` names."""


UNVERSIONED = -1
"""Policy version of weights that carry no number, such as SGLang's `default`."""


def policy_version_of(text: str) -> int:
    """Return the number that a weight version reads as; UNVERSIONED if it is none."""
    return int(text) if text.isdecimal() else UNVERSIONED
