"""Samples: each sampled token trains once, in its original sequence, in one block of four
arrays."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmesh.core.errors import StoreFull, WireError
from rollmesh.core.ids import GroupId
from rollmesh.core.types import (
    Branch,
    GroupRecord,
    NodeRow,
    Outcome,
    RolloutRecord,
    SamplingParams,
    Task,
    VersionRun,
)
from rollmesh.serve.client.samples import (
    BYTES_PER_TOKEN,
    Cut,
    Fill,
    Laid,
    Lay,
    SampleArrays,
    arrays_in,
    cut,
    lay_plainly,
)
from rollmesh.tensors.handles import UNTAGGED, RTensor

GROUP = GroupId("r1", 7)
MAIN: tuple[Branch, ...] = ("main", "subagent")


def context(parent: int, num_tokens: int) -> NodeRow:
    return NodeRow(parent, num_tokens, sampled=False)


def turn(
    parent: int,
    num_tokens: int,
    *,
    branch: Branch = "main",
    finish_reason: str = "stop",
    superseded: bool = False,
    temperature: float = 1.0,
    policy_version: int = 3,
) -> NodeRow:
    return NodeRow(
        parent,
        num_tokens,
        sampled=True,
        policy_versions=(VersionRun(policy_version, num_tokens),),
        branch=branch,
        params=SamplingParams(max_tokens=8, temperature=temperature),
        finish_reason=finish_reason,
        superseded=superseded,
    )


def cut_rollouts(
    *tables: list[NodeRow], branches: tuple[Branch, ...] = MAIN, lay: Lay = lay_plainly
) -> Cut:
    """Token k of the group is 100 + k and its log-prob is -(k + 1) / 8: all values are distinct."""
    rollouts = [
        RolloutRecord(
            index=index,
            outcome=Outcome.COMPLETED,
            reward=float(index),
            nodes=nodes,
            num_tokens=sum(node.num_tokens for node in nodes),
            num_logprobs=sum(node.num_tokens for node in nodes if node.sampled),
        )
        for index, nodes in enumerate(tables)
    ]
    return cut_record(rollouts, branches, lay)


def cut_record(
    rollouts: list[RolloutRecord], branches: tuple[Branch, ...] = MAIN, lay: Lay = lay_plainly
) -> Cut:
    record = GroupRecord(task=Task(id="t"), rollouts=rollouts)
    token_ids = np.arange(sum(r.num_tokens for r in rollouts), dtype=np.int32) + 100
    num_logprobs = sum(r.num_logprobs for r in rollouts)
    logprobs = np.arange(-1, -num_logprobs - 1, -1).astype(np.float32) / np.float32(8)
    return cut(GROUP, record, token_ids, logprobs, branches, lay)


class DirtyMemory:
    """Stores samples in reused memory and returns views."""

    def __init__(self) -> None:
        self.memory = np.full(2**12, 0xAB, np.uint8)
        self.asked: list[list[int]] = []

    def lay(self, lengths: Sequence[int], fill: Fill) -> list[Laid]:
        self.asked.append([*lengths])
        pieces = np.split(self.memory, BYTES_PER_TOKEN * np.cumsum(lengths))[:-1]
        fill([arrays_in(piece) for piece in pieces])
        laid = []
        for number, piece in enumerate(pieces):
            piece.flags.writeable = False
            handle = RTensor(number, "", UNTAGGED, "uint8", piece.shape, piece.nbytes)
            laid.append(Laid(arrays_in(piece), handle))
        return laid


def test_a_linear_rollout_is_one_sample_with_its_exact_tokens() -> None:
    [sample] = cut_rollouts([context(-1, 2), turn(0, 2), context(1, 1), turn(2, 1)]).samples
    assert sample.token_ids.tolist() == [100, 101, 102, 103, 104, 105]
    assert sample.loss_mask.tolist() == [False, False, True, True, False, True]
    assert sample.logprobs.tolist() == [0, 0, -1 / 8, -2 / 8, 0, -3 / 8]
    assert sample.policy_versions.tolist() == [-1, -1, 3, 3, -1, 3]
    assert sample.token_ids.dtype == np.int32
    assert sample.logprobs.dtype == np.float32
    assert sample.weight == 1.0
    assert str(sample.rollout_id) == "r1/7/0"
    assert sample.group_id == GROUP


def test_a_group_is_written_directly_to_the_memory_that_the_caller_provides() -> None:
    tables = [context(-1, 2), turn(0, 3), turn(0, 2)], [context(-1, 1), turn(0, 1)]
    plain = cut_rollouts(*tables).samples
    dirty = DirtyMemory()
    laid = cut_rollouts(*tables, lay=dirty.lay).samples
    assert dirty.asked == [[5, 4, 2]]
    for one, other in zip(laid, plain, strict=True):
        for name in SampleArrays._fields:
            array = getattr(one, name)
            assert np.array_equal(array, getattr(other, name)), name
            assert np.shares_memory(array, dirty.memory)
            assert not array.flags.writeable
    assert [sample.handle and sample.handle.shard_id for sample in laid] == [0, 1, 2]
    assert [sample.handle for sample in plain] == [None] * 3


def test_a_group_in_which_nothing_trains_requests_no_memory() -> None:
    dirty = DirtyMemory()
    assert cut_rollouts([context(-1, 2)], lay=dirty.lay).samples == []
    assert dirty.asked == []


def test_an_error_of_the_memory_is_raised() -> None:
    def refuse(lengths: Sequence[int], fill: Fill) -> list[Laid]:
        raise StoreFull(sum(lengths), 0, 0)

    with pytest.raises(StoreFull):
        cut_rollouts([context(-1, 2), turn(0, 2)], lay=refuse)


def test_context_after_the_last_turn_is_not_in_the_sample() -> None:
    [sample] = cut_rollouts([context(-1, 2), turn(0, 2), context(1, 9)]).samples
    assert len(sample.token_ids) == 4


def test_version_runs_are_expanded_to_their_tokens() -> None:
    node = NodeRow(-1, 3, True, (VersionRun(4, 1), VersionRun(5, 2)))
    [sample] = cut_rollouts([node]).samples
    assert sample.policy_versions.tolist() == [4, 5, 5]


def test_a_fork_trains_its_shared_prefix_once_and_weights_add_up() -> None:
    nodes = [context(-1, 2), turn(0, 3), context(1, 1), turn(2, 1), context(1, 1), turn(4, 4)]
    first, second = cut_rollouts(nodes).samples
    assert first.loss_mask.sum() == 1
    assert second.loss_mask.sum() == 7
    assert (first.weight, second.weight) == (1 / 8, 7 / 8)


def test_a_superseded_childless_turn_is_dropped_with_its_reason() -> None:
    result = cut_rollouts([context(-1, 1), turn(0, 4, superseded=True), turn(0, 2)])
    [sample] = result.samples
    assert sample.token_ids.tolist() == [100, 105, 106]
    assert [(unused.num_tokens, unused.reason) for unused in result.unused] == [(4, "superseded")]


def test_a_superseded_turn_with_children_trains() -> None:
    nodes = [context(-1, 1), turn(0, 2, superseded=True), context(1, 1), turn(2, 1)]
    result = cut_rollouts(nodes)
    assert result.samples[0].loss_mask.sum() == 3
    assert not result.unused


def test_a_void_turn_never_trains_and_remains_context_of_its_children() -> None:
    result = cut_rollouts([turn(-1, 2, finish_reason="void"), context(0, 1), turn(1, 1)])
    [sample] = result.samples
    assert sample.loss_mask.tolist() == [False, False, False, True]
    assert result.unused[0].reason == "void"


def test_branches_that_the_setting_excludes_do_not_train() -> None:
    nodes = [context(-1, 1), turn(0, 2), context(-1, 1), turn(2, 3, branch="side")]
    result = cut_rollouts(nodes)
    assert [sample.branch for sample in result.samples] == ["main"]
    assert [(unused.num_tokens, unused.reason) for unused in result.unused] == [(3, "branch: side")]


@pytest.mark.parametrize("outcome", [Outcome.AGENT_ERROR, Outcome.INFRA_ERROR, Outcome.CANCELLED])
def test_a_rollout_without_a_trained_outcome_gives_no_sample(outcome: Outcome) -> None:
    rollout = RolloutRecord(
        index=0, outcome=outcome, reward=0.0, nodes=[turn(-1, 2)], num_tokens=2, num_logprobs=2
    )
    result = cut_record([rollout])
    assert not result.samples
    assert result.unused[0].reason == f"outcome: {outcome.value}"


def test_a_truncated_rollout_without_a_reward_gives_no_sample() -> None:
    rollout = RolloutRecord(
        index=0, outcome=Outcome.TRUNCATED, nodes=[turn(-1, 2)], num_tokens=2, num_logprobs=2
    )
    assert cut_record([rollout]).unused[0].reason == "no reward"


def test_turns_of_other_temperatures_train_in_separate_samples() -> None:
    nodes = [turn(-1, 1, temperature=0.5), turn(0, 2), turn(1, 1)]
    cold, warm = cut_rollouts(nodes).samples
    assert (cold.temperature, cold.loss_mask.tolist()) == (0.5, [True])
    assert (warm.temperature, warm.loss_mask.tolist()) == (1.0, [False, True, True, True])


@pytest.mark.parametrize(
    "nodes",
    [
        [NodeRow(0, 1, False)],  # the node is its own parent
        [NodeRow(-2, 1, False)],
        [NodeRow(-1, 2, True, (VersionRun(1, 1),))],  # the mask counts a token that was not sampled
        [NodeRow(-1, 3, False), NodeRow(0, -1, False)],
    ],
)
def test_an_inconsistent_node_table_is_refused(nodes: list[NodeRow]) -> None:
    with pytest.raises(WireError):
        cut_rollouts(nodes)


def test_buffers_of_a_wrong_length_are_refused() -> None:
    record = GroupRecord(task=Task(id="t"), rollouts=[])
    with pytest.raises(WireError):
        cut(GROUP, record, np.zeros(1, np.int32), np.zeros(0, np.float32), MAIN)
    with pytest.raises(WireError):
        cut(GROUP, record, np.zeros(0, np.int32), np.zeros(1, np.float32), MAIN)


@st.composite
def tables(draw: st.DrawFn) -> list[NodeRow]:
    """Generate node tables: forks, retries, void turns, all branches, two temperatures, empty
    nodes."""
    nodes: list[NodeRow] = []
    for row in range(draw(st.integers(0, 12))):
        parent = draw(st.integers(-1, row - 1))
        if draw(st.booleans()):
            nodes.append(context(parent, draw(st.integers(0, 3))))
            continue
        nodes.append(
            turn(
                parent,
                draw(st.integers(0, 4)),
                branch=draw(st.sampled_from(("main", "subagent", "side"))),
                finish_reason=draw(st.sampled_from(("stop", "length", "void"))),
                superseded=draw(st.booleans()),
                temperature=draw(st.sampled_from((1.0, 0.5))),
                policy_version=draw(st.integers(0, 3)),
            )
        )
    return nodes


@given(st.lists(tables(), max_size=3))
def test_each_sampled_token_trains_in_one_sample_or_has_a_drop_reason(
    group: list[list[NodeRow]],
) -> None:
    result = cut_rollouts(*group)
    trained = [t for s in result.samples for t in s.token_ids[s.loss_mask].tolist()]
    assert len(trained) == len(set(trained))
    num_sampled = sum(node.num_tokens for nodes in group for node in nodes if node.sampled)
    assert len(trained) + sum(unused.num_tokens for unused in result.unused) == num_sampled
    logprobs = [x for s in result.samples for x in s.logprobs[s.loss_mask].tolist()]
    assert len(set(logprobs)) == len(trained)


@given(tables())
def test_the_weights_of_a_rollout_add_up_to_one(nodes: list[NodeRow]) -> None:
    samples = cut_rollouts(nodes).samples
    if samples:
        assert sum(sample.weight for sample in samples) == pytest.approx(1)
        assert all(sample.weight > 0 for sample in samples)


@given(tables())
def test_each_sample_is_a_path_from_a_root(nodes: list[NodeRow]) -> None:
    starts = np.cumsum([0, *(node.num_tokens for node in nodes)])
    for sample in cut_rollouts(nodes).samples:
        last_token = int(sample.token_ids[-1]) - 100
        row = int(np.searchsorted(starts, last_token, side="right")) - 1
        path: list[int] = []
        while row >= 0:
            path = [*range(starts[row] + 100, starts[row + 1] + 100), *path]
            row = nodes[row].parent
        assert sample.token_ids.tolist() == path


def test_a_sample_names_the_images_of_its_path_in_order() -> None:
    nodes = [
        NodeRow(-1, 2, sampled=False, images=("a", "b")),
        turn(0, 1),
        NodeRow(1, 1, sampled=False, images=("a",)),
        turn(2, 1),
        NodeRow(1, 1, sampled=False, images=("c",)),
        turn(4, 1),
    ]
    assert [sample.images for sample in cut_rollouts(nodes).samples] == [
        ("a", "b", "a"),
        ("a", "b", "c"),
    ]


def test_each_sample_has_the_rewards_of_all_successful_siblings() -> None:
    prompt = context(-1, 2)
    rollouts = [
        RolloutRecord(index=0, outcome=Outcome.COMPLETED, reward=1.0, nodes=[prompt, turn(0, 1)]),
        RolloutRecord(index=1, outcome=Outcome.COMPLETED, reward=0.0, nodes=[prompt]),
        RolloutRecord(index=2, outcome=Outcome.TRUNCATED, reward=None, nodes=[prompt]),
        RolloutRecord(index=3, outcome=Outcome.AGENT_ERROR, reward=9.0, nodes=[prompt]),
    ]
    for each in rollouts:
        each.num_tokens = sum(node.num_tokens for node in each.nodes)
        each.num_logprobs = sum(node.num_tokens for node in each.nodes if node.sampled)
    [sample] = cut_record(rollouts, MAIN, lay_plainly).samples
    assert sample.sibling_rewards == (1.0, 0.0)


@pytest.mark.parametrize("reward", [1e308, float("nan")])
def test_a_rollout_whose_reward_cannot_be_trained_on_gives_no_sample(reward: float) -> None:
    nodes = [context(-1, 2), turn(0, 1)]
    rollouts = [
        RolloutRecord(
            index=index,
            outcome=Outcome.COMPLETED,
            reward=each,
            nodes=nodes,
            num_tokens=3,
            num_logprobs=1,
        )
        for index, each in enumerate((1.0, reward))
    ]
    made = cut_record(rollouts, MAIN)
    assert [each.rollout_id.index for each in made.samples] == [0]
    assert made.samples[0].sibling_rewards == (1.0,)
    assert [each.reason.partition(":")[0] for each in made.unused] == ["reward"]


DTYPES = SampleArrays(np.int32, np.float32, np.int32, np.bool_)  # type: ignore[arg-type]


@given(num_tokens=st.integers(0, 100), offset=st.integers(0, 4))
def test_every_byte_of_a_piece_belongs_to_one_array(num_tokens: int, offset: int) -> None:
    memory = np.zeros(BYTES_PER_TOKEN * num_tokens + 64 * offset, np.uint8)[64 * offset :]
    for array, dtype in zip(arrays_in(memory), DTYPES, strict=True):
        assert (array.dtype, array.shape) == (np.dtype(dtype), (num_tokens,))
        array.view(np.uint8)[:] += 1
    assert memory.tolist() == [1] * len(memory)


def test_the_arrays_of_a_read_only_piece_are_read_only() -> None:
    memory = np.zeros(BYTES_PER_TOKEN * 4, np.uint8)
    memory.flags.writeable = False
    assert not any(array.flags.writeable for array in arrays_in(memory))


def test_plain_memory_is_not_shared_with_other_samples() -> None:
    def fill(arrays: list[SampleArrays]) -> None:
        for number, each in enumerate(arrays):
            for array in each:
                array[:] = number

    laid = lay_plainly([3, 0, 5], fill)  # type: ignore[arg-type]
    assert [each.handle for each in laid] == [None] * 3
    assert [each.arrays.token_ids.tolist() for each in laid] == [[0] * 3, [], [2] * 5]
    assert [each.arrays.loss_mask.tolist() for each in laid] == [[False] * 3, [], [True] * 5]
