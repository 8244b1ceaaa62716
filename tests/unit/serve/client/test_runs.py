"""Runs of a sample: each trained token has one engine, version, dialect and fork cause."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmesh.core.errors import WireError
from rollmesh.core.ids import GroupId
from rollmesh.core.types import (
    Branch,
    DialectName,
    ForkRow,
    GroupRecord,
    NodeRow,
    Outcome,
    RolloutRecord,
    Task,
    VersionRun,
)
from rollmesh.serve.client.samples import Sample, SampledRun, cut

ENGINES = ["http://a", "http://b"]


def context(parent: int, num_tokens: int = 1) -> NodeRow:
    return NodeRow(parent, num_tokens, sampled=False)


def turn(parent: int, *runs: VersionRun, dialect: DialectName = "chat") -> NodeRow:
    num_tokens = sum(run.num_tokens for run in runs)
    return NodeRow(parent, num_tokens, True, runs, finish_reason="stop", dialect=dialect)


def samples_of(nodes: list[NodeRow], *forks: tuple[int, str]) -> list[Sample]:
    num_tokens = sum(node.num_tokens for node in nodes)
    num_logprobs = sum(node.num_tokens for node in nodes if node.sampled)
    rollout = RolloutRecord(
        index=0,
        outcome=Outcome.COMPLETED,
        reward=1.0,
        nodes=nodes,
        num_tokens=num_tokens,
        num_logprobs=num_logprobs,
        engines=ENGINES,
        forks=[ForkRow(call, node, cause, 0) for call, (node, cause) in enumerate(forks)],
    )
    record = GroupRecord(task=Task(id="t"), rollouts=[rollout])
    branches: tuple[Branch, ...] = ("main",)
    buffers = np.zeros(num_tokens, np.int32), np.zeros(num_logprobs, np.float32)
    return cut(GroupId("r", 0), record, *buffers, branches).samples


def test_a_turn_over_two_engines_and_versions_has_a_run_for_each() -> None:
    node = turn(0, VersionRun(3, 2, 0), VersionRun(3, 1, 1), VersionRun(4, 5, 1))
    [sample] = samples_of([context(-1), node])
    assert sample.runs == (
        SampledRun(2, 3, "http://a", "chat"),
        SampledRun(1, 3, "http://b", "chat"),
        SampledRun(5, 4, "http://b", "chat"),
    )


def test_turns_of_one_origin_are_one_run_per_dialect() -> None:
    nodes = [context(-1), turn(0, VersionRun(3, 2, 0)), context(1), turn(2, VersionRun(3, 4, 0))]
    nodes += [context(3), turn(4, VersionRun(3, 1, 0), dialect="responses")]
    [sample] = samples_of(nodes)
    assert sample.runs == (
        SampledRun(6, 3, "http://a", "chat"),
        SampledRun(1, 3, "http://a", "responses"),
    )


def test_a_token_has_the_cause_of_the_nearest_fork_before_it() -> None:
    nodes = [context(-1), turn(0, VersionRun(3, 1, 0))]  # above any fork
    nodes += [context(-1), turn(2, VersionRun(3, 2, 0)), context(3), turn(4, VersionRun(3, 3, 0))]
    nodes += [context(3), turn(6, VersionRun(3, 4, 0))]  # nodes that fork from an earlier fork
    plain, *forked = samples_of(nodes, (2, "compaction"), (6, "rewind"))
    assert [run.cause for run in plain.runs] == [""]
    runs = sorted([(run.cause, run.num_tokens) for run in each.runs] for each in forked)
    assert runs == [[("compaction", 2), ("rewind", 4)], [("compaction", 3)]]


def test_records_of_older_releases_have_runs_without_names() -> None:
    [sample] = samples_of([context(-1), turn(0, VersionRun(3, 2), dialect="")])
    assert sample.runs == (SampledRun(2, 3),)


def test_a_run_of_an_engine_missing_in_the_record_is_refused() -> None:
    with pytest.raises(WireError):
        samples_of([turn(-1, VersionRun(3, 2, 2))])


@st.composite
def tables(draw: st.DrawFn) -> list[NodeRow]:
    nodes: list[NodeRow] = []
    for row in range(draw(st.integers(1, 10))):
        parent = draw(st.integers(-1, row - 1))
        if draw(st.booleans()):
            nodes.append(context(parent))
            continue
        runs = st.builds(VersionRun, st.integers(0, 2), st.integers(0, 3), st.integers(-1, 1))
        dialects: tuple[DialectName, ...] = ("chat", "messages")
        dialect = draw(st.sampled_from(dialects))
        nodes.append(turn(parent, *draw(st.lists(runs, max_size=3)), dialect=dialect))
    return nodes


@given(tables(), st.lists(st.integers(0, 9), max_size=3))
def test_runs_cover_the_trained_tokens_in_order(nodes: list[NodeRow], forked: list[int]) -> None:
    for sample in samples_of(nodes, *((row, f"cause {row}") for row in forked)):
        versions = [run.policy_version for run in sample.runs for _ in range(run.num_tokens)]
        assert versions == sample.policy_versions[sample.loss_mask].tolist()
        assert all(run.num_tokens for run in sample.runs)
        origins = [run.origin for run in sample.runs]
        assert all(one != two for one, two in itertools.pairwise(origins))
