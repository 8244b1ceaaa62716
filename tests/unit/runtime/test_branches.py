"""Branches by kind of chat."""

from rollmesh.core.types import SamplingParams
from rollmesh.runtime.branches import RootKind, branches_of
from rollmesh.runtime.graph import ROOT, Sampled, TokenGraph


def tree(graph: TokenGraph, num_turns: int) -> int:
    """A root with a chain of turns; returns the root."""
    root = node = graph.add_context(ROOT, [1])
    for _ in range(num_turns):
        params = SamplingParams(max_tokens=1)
        node = graph.add_sampled(node, Sampled([2], [0.0], (), params, "stop"))
        node = graph.add_context(node, [3])
    return root


def test_the_kind_that_sampled_most_is_main_over_all_its_roots() -> None:
    graph = TokenGraph()
    main = RootKind(5, 1)
    agent, compacted = tree(graph, 2), tree(graph, 2)
    helper, title = tree(graph, 3), tree(graph, 1)
    kinds = {agent: main, compacted: main, helper: RootKind(6, 2), title: RootKind(0, 3)}
    branches = branches_of(graph, kinds)
    assert branches == {agent: "main", compacted: "main", helper: "subagent", title: "side"}


def test_without_tools_on_the_main_line_nothing_is_a_side_call() -> None:
    graph = TokenGraph()
    a, b = tree(graph, 2), tree(graph, 1)
    kinds = {a: RootKind(0, 1), b: RootKind(0, 2)}
    assert branches_of(graph, kinds) == {a: "main", b: "subagent"}
