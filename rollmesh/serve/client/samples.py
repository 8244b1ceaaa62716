"""From a rollout's node table to training samples: paths cut so that no token trains twice.

    token_ids int32 [T] | logprobs float32 [T] | policy_versions int32 [T] | loss_mask bool [T]

- A sample is the path from a root to one sampled node, all its tokens in the order of the model's
  context. Each sampled token that trains has mask 1 in exactly one sample. Every other sampled
  token is counted in `Cut.unused` with its reason. Memory is linear in the paths.
- The weights of one rollout's samples add up to 1 and are proportional to their trained tokens, so
  sum(weight * mean over the sample's trained tokens) is the mean over the rollout's tokens.
- The arrays of a sample are one piece of memory, in a place that the taker chooses (plain or shared
  memory), and are written once.
- Runs say where trained tokens come from: engine, policy version, dialect and fork.

Shapes: T is the number of tokens of one sample.
"""

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from rollmesh.core.errors import WireError
from rollmesh.core.ids import GroupId, RolloutId
from rollmesh.core.types import (
    TRAINED_OUTCOMES,
    Branch,
    DialectName,
    GroupRecord,
    NodeRow,
    RolloutRecord,
    reward_fault,
)
from rollmesh.runtime.conversation.token_graph import (
    SamplePath,
    images_on,
    reasons_of,
    sample_paths,
    temperature_of,
)
from rollmesh.tensors.handles import RTensor


class SampledRun(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive trained tokens of a sample that have all of this in common."""

    num_tokens: int
    policy_version: int
    engine: str = ""
    """Address of the engine; '' if it was not recorded, as in older records."""
    dialect: DialectName = ""
    cause: str = ""
    """Cause of the fork that its prompt follows (ForkRow); '' if there is none."""

    @property
    def origin(self) -> tuple[int, str, str, str]:
        """(policy version, engine, dialect, cause)"""
        return self.policy_version, self.engine, self.dialect, self.cause


def causes_of(rollout: RolloutRecord) -> list[str]:
    """Return for each row of its table the cause of the nearest fork at or above it, or ''."""
    forked = {fork.node: fork.cause for fork in rollout.forks}
    causes: list[str] = []
    for row, node in enumerate(rollout.nodes):
        above = causes[node.parent] if node.parent >= 0 else ""
        causes.append(forked.get(row, above))
    return causes


def runs_of(
    rollout: RolloutRecord, causes: Sequence[str], claim: SamplePath
) -> tuple[SampledRun, ...]:
    """Return the runs of a claim's trained tokens; `causes` are those of the rollout's rows."""
    runs: list[SampledRun] = []
    for row in claim.path:
        node = rollout.nodes[row]
        for run in node.policy_versions if row in claim.trained else ():
            engine = rollout.engines[run.engine] if run.engine >= 0 else ""
            origin = run.policy_version, engine, node.dialect, causes[row]
            if runs and runs[-1].origin == origin:
                runs[-1] = SampledRun(runs[-1].num_tokens + run.num_tokens, *origin)
            elif run.num_tokens:
                runs.append(SampledRun(run.num_tokens, *origin))
    return tuple(runs)


Int32s = npt.NDArray[np.int32]
Float32s = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]

BYTES_PER_TOKEN = 13


class SampleArrays(NamedTuple):
    """The arrays of one sample; each [T]."""

    token_ids: Int32s
    logprobs: Float32s
    policy_versions: Int32s
    loss_mask: Bools


class Laid(NamedTuple):
    """One sample's arrays, filled."""

    arrays: SampleArrays
    handle: RTensor | None = None
    """Handle of the memory, if other processes may fetch it."""


Fill = Callable[[Sequence[SampleArrays]], None]
"""Writes all elements of all arrays."""


class Lay(Protocol):
    """An allocator of sample memory."""

    def __call__(self, lengths: Sequence[int], fill: Fill) -> list[Laid]:
        """Return the arrays of samples of these lengths, filled by `fill`; if that raises, all are
        freed.
        """


def arrays_in(memory: npt.NDArray[np.uint8]) -> SampleArrays:
    """Return the arrays in a block of memory, uint8 [13 * T], as views."""
    num_tokens = len(memory) // BYTES_PER_TOKEN
    words = memory[: 12 * num_tokens].reshape(3, 4 * num_tokens)
    token_ids, logprobs, policy_versions = words
    return SampleArrays(
        token_ids.view(np.int32),
        logprobs.view(np.float32),
        policy_versions.view(np.int32),
        memory[12 * num_tokens :].view(np.bool_),
    )


def lay_plainly(lengths: Sequence[int], fill: Fill) -> list[Laid]:
    """Allocates in the memory of this process."""
    arrays = [arrays_in(np.empty(BYTES_PER_TOKEN * each, np.uint8)) for each in lengths]
    fill(arrays)
    return [Laid(each) for each in arrays]


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to train on."""

    rollout_id: RolloutId
    branch: Branch
    """Id of its last node."""
    token_ids: Int32s
    """[T]"""
    logprobs: Float32s
    """[T]: as recorded when sampled, natural log; 0 where loss_mask is False."""
    loss_mask: Bools
    """[T]: True for tokens that were sampled and train here."""
    policy_versions: Int32s
    """[T]: policy version that sampled the token; -1 where loss_mask is False."""
    reward: float
    """Reward of the rollout."""
    sibling_rewards: tuple[float, ...] = ()
    """Rewards of all rollouts of its group that have one, with its own and with those that have no
    samples. Empty: the group is the samples that are given together.
    """
    weight: float
    """This sample's share of its rollout, in (0, 1]; one rollout's shares add up to 1."""
    temperature: float
    """Sampling parameters of all its trained tokens; their log-probs are of that distribution."""
    images: tuple[str, ...] = ()
    """SHA-256 of each image that the tokens have a placeholder for, in order; see NodeRow."""
    runs: tuple[SampledRun, ...] = ()
    """Runs of its trained tokens in order: their counts add up to those of loss_mask."""
    handle: RTensor | None = None
    """Handle of its arrays, if other processes may fetch them."""

    @property
    def group_id(self) -> GroupId:
        """The group whose siblings this sample's reward is compared with."""
        return self.rollout_id.group_id


class Unused(msgspec.Struct, frozen=True):
    """Sampled tokens that do not train, and why."""

    rollout_id: RolloutId
    num_tokens: int
    reason: str
    """`superseded`, `void`, `branch: NAME`, `outcome: NAME`, `no reward` or `reward: WHY`."""


class Cut(msgspec.Struct, frozen=True):
    """The samples of a group and its unused tokens."""

    samples: list[Sample]
    unused: list[Unused]


def cut(
    group_id: GroupId,
    record: GroupRecord,
    token_ids: Int32s,
    logprobs: Float32s,
    branches: Collection[Branch],
    lay: Lay = lay_plainly,
) -> Cut:
    """Cut the samples of a group in the order of its rollouts; `branches` says which of them train.

    `token_ids` and `logprobs` are the group's flat buffers. All samples are allocated by `lay` at
    once, and its errors are raised. WireError if the record's counts do not add up to the buffers.
    """
    check_counts(record, len(token_ids), len(logprobs))
    drafts: list[_Draft] = []
    unused: list[Unused] = []
    rewards = sibling_rewards(record)
    token_at = logprob_at = 0
    for rollout in record.rollouts:
        rollout_id = RolloutId(group_id, rollout.index)
        token_end, logprob_end = token_at + rollout.num_tokens, logprob_at + rollout.num_logprobs
        paths = _Paths(rollout, token_ids[token_at:token_end], logprobs[logprob_at:logprob_end])
        reasons = _reasons(rollout, branches)
        unused += _unused(rollout_id, rollout, reasons)
        drafts += _drafts(rollout_id, rollout, paths, reasons)
        token_at, logprob_at = token_end, logprob_end

    def fill(arrays: Sequence[SampleArrays]) -> None:
        for draft, each in zip(drafts, arrays, strict=True):
            draft.paths.write(draft.claim, each)

    laid = lay([draft.num_tokens for draft in drafts], fill) if drafts else []
    samples = [draft.sample(each, rewards) for draft, each in zip(drafts, laid, strict=True)]
    return Cut(samples, unused)


def sibling_rewards(record: GroupRecord) -> tuple[float, ...]:
    """Return the rewards that a rollout's own is compared with: of all siblings that ended well."""
    return tuple(
        rollout.reward
        for rollout in record.rollouts
        if rollout.outcome in TRAINED_OUTCOMES
        and rollout.reward is not None
        and not reward_fault(rollout.reward)
    )


def check_counts(record: GroupRecord, num_tokens: int, num_logprobs: int) -> None:
    """Raise WireError unless every count in `record` agrees with its nodes and with the buffers."""
    for rollout in record.rollouts:
        if not _adds_up(rollout):
            raise WireError(f"rollout {rollout.index}: its node table does not add up")
    if sum(rollout.num_tokens for rollout in record.rollouts) != num_tokens:
        raise WireError("the token buffer is not as long as the rollouts say")
    if sum(rollout.num_logprobs for rollout in record.rollouts) != num_logprobs:
        raise WireError("the log-prob buffer is not as long as the rollouts say")


def _adds_up(rollout: RolloutRecord) -> bool:
    """One pass, since each result is checked before it is taken."""
    num_in_rollout = num_sampled = 0
    num_engines = len(rollout.engines)
    for row, node in enumerate(rollout.nodes):
        num_tokens = node.num_tokens
        if num_tokens < 0 or not -1 <= node.parent < row:
            return False
        num_in_rollout += num_tokens
        if node.sampled:
            num_sampled += num_tokens
            for run in node.policy_versions:
                num_tokens -= run.num_tokens
                if run.num_tokens < 0 or run.engine >= num_engines:
                    return False
            if num_tokens:
                return False
    return (num_in_rollout, num_sampled) == (rollout.num_tokens, rollout.num_logprobs)


class _Paths:
    """One rollout's node table with the place of each node in the flat arrays."""

    def __init__(self, rollout: RolloutRecord, token_ids: Int32s, logprobs: Float32s) -> None:
        self.nodes = rollout.nodes
        self.token_ids = token_ids
        self.logprobs = logprobs
        self.token_starts: list[int] = []
        self.logprob_starts: list[int] = []
        token_at = logprob_at = 0
        for node in rollout.nodes:
            self.token_starts.append(token_at)
            self.logprob_starts.append(logprob_at)
            token_at += node.num_tokens
            logprob_at += node.num_tokens if node.sampled else 0

    def write(self, claim: SamplePath, arrays: SampleArrays) -> None:
        """Everything that a claim's path knows of its tokens."""
        token_ids, logprobs, policy_versions, loss_mask = arrays
        at = 0
        for row in claim.path:
            node, token_start = self.nodes[row], self.token_starts[row]
            end = at + node.num_tokens
            token_ids[at:end] = self.token_ids[token_start : token_start + node.num_tokens]
            loss_mask[at:end] = row in claim.trained
            if row in claim.trained:
                logprob_start = self.logprob_starts[row]
                logprobs[at:end] = self.logprobs[logprob_start : logprob_start + node.num_tokens]
                policy_versions[at:end] = _versions(node)
            else:
                logprobs[at:end] = 0.0
                policy_versions[at:end] = -1
            at = end


class _Draft(msgspec.Struct, frozen=True):
    """A sample that has no memory yet."""

    rollout_id: RolloutId
    paths: _Paths
    claim: SamplePath
    num_tokens: int
    reward: float
    weight: float
    runs: tuple[SampledRun, ...]

    def sample(self, laid: Laid, rewards: tuple[float, ...]) -> Sample:
        """Return the sample, with arrays that were written and the rewards of its group."""
        nodes, path = self.paths.nodes, self.claim.path
        last = nodes[path[-1]]
        return Sample(
            rollout_id=self.rollout_id,
            branch=last.branch,
            reward=self.reward,
            sibling_rewards=rewards,
            weight=self.weight,
            temperature=temperature_of(last),
            images=images_on(nodes, path),
            runs=self.runs,
            handle=laid.handle,
            **laid.arrays._asdict(),
        )


def _unused(rollout_id: RolloutId, rollout: RolloutRecord, reasons: Sequence[str]) -> list[Unused]:
    unused: dict[str, int] = {}
    for node, reason in zip(rollout.nodes, reasons, strict=True):
        if node.sampled and reason and node.num_tokens:
            unused[reason] = unused.get(reason, 0) + node.num_tokens
    return [Unused(rollout_id, num_tokens, reason) for reason, num_tokens in unused.items()]


def _drafts(
    rollout_id: RolloutId, rollout: RolloutRecord, paths: _Paths, reasons: Sequence[str]
) -> list[_Draft]:
    nodes = rollout.nodes
    claims = sample_paths(nodes, [not reason for reason in reasons])
    trained = [sum(nodes[row].num_tokens for row in claim.trained) for claim in claims]
    causes = causes_of(rollout)
    drafts = []
    for claim, num_trained in zip(claims, trained, strict=True):
        assert rollout.reward is not None
        num_tokens = sum(nodes[row].num_tokens for row in claim.path)
        weight = num_trained / sum(trained)
        runs = runs_of(rollout, causes, claim)
        drafts.append(_Draft(rollout_id, paths, claim, num_tokens, rollout.reward, weight, runs))
    return drafts


def _reasons(rollout: RolloutRecord, branches: Collection[Branch]) -> list[str]:
    """Return why each row does not train; '' for those that do."""
    whole = ""
    if rollout.outcome not in TRAINED_OUTCOMES:
        whole = f"outcome: {rollout.outcome}"
    elif rollout.reward is None:
        whole = "no reward"
    elif fault := reward_fault(rollout.reward):
        whole = f"reward: {fault}"
    return [whole or reason for reason in reasons_of(rollout.nodes, branches)]


def _versions(node: NodeRow) -> Int32s:
    runs = node.policy_versions
    return np.repeat(
        np.array([run.policy_version for run in runs], np.int32),
        [run.num_tokens for run in runs],
    )
