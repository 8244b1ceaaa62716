"""Nodes of new tokens only, and the paths they make."""

import gc
import random
import tracemalloc
from array import array

from rollmesh.core.types import SamplingParams, VersionRun
from rollmesh.runtime.token_graph import ROOT, Sampled, TokenGraph

PARAMS = SamplingParams(max_tokens=8)


def sampled(*token_ids: int) -> Sampled:
    logprobs = [-float(i) for i in token_ids]
    runs = (VersionRun(3, len(token_ids)),)
    return Sampled(token_ids, logprobs, runs, PARAMS, "stop")


def forked() -> TokenGraph:
    graph = TokenGraph()
    a = graph.add_context(ROOT, [1, 2])
    b = graph.add_sampled(a, sampled(3, 4))
    graph.add_sampled(a, sampled(5))
    c = graph.add_context(b, [6])
    graph.add_sampled(c, sampled(7))
    return graph


def test_a_path_is_what_the_engine_was_given() -> None:
    graph = forked()
    assert list(graph.path_ids(4)) == [1, 2, 3, 4, 6, 7]
    assert list(graph.path_ids(2)) == [1, 2, 5]
    assert graph.depth_of(4) == 6
    assert graph.depth_of(ROOT) == 0


def test_each_token_is_held_once() -> None:
    graph = forked()
    assert graph.token_ids == array("i", [1, 2, 3, 4, 5, 6, 7])
    assert graph.logprobs == array("f", [-3, -4, -5, -7])
    assert list(graph.ids_of(1)) == [3, 4]
    assert list(graph.logprobs_of(4)) == [-7]


def test_rows_come_in_order_with_their_roots_branch() -> None:
    graph = forked()
    other = graph.add_context(ROOT, [9])
    rows = graph.rows({0: "main", other: "side"})
    assert [row.parent for row in rows] == [-1, 0, 0, 1, 3, -1]
    assert [row.branch for row in rows] == ["main"] * 5 + ["side"]
    assert rows[1].policy_versions == (VersionRun(3, 2),)
    assert rows[0].params is None
    assert [node.root for node in graph.nodes] == [0, 0, 0, 0, 0, other]


def test_engines_are_named_once_for_all_nodes() -> None:
    graph = TokenGraph()

    def add(engines: list[str], *runs: VersionRun) -> None:
        num = sum(run.num_tokens for run in runs)
        turn = Sampled([1] * num, [0.0] * num, runs, PARAMS, "stop", engines, "messages")
        graph.add_sampled(graph.add_context(ROOT, [1]), turn)

    add(["http://a"], VersionRun(3, 2, 0))
    add(["http://b", "http://a"], VersionRun(3, 1, 0), VersionRun(4, 1, 1))
    add(["http://a", "http://b"], VersionRun(4, 2, 1))
    add(["http://c", "http://a"], VersionRun(4, 2, 1))  # nothing of what c said was kept
    add([], VersionRun(5, 1))
    assert graph.engines == ["http://a", "http://b"]
    rows = [row for row in graph.rows(dict.fromkeys(range(0, 10, 2), "main")) if row.sampled]
    assert [[run.engine for run in row.policy_versions] for row in rows] == [
        [0],
        [1, 0],
        [1],
        [0],
        [-1],
    ]
    assert [row.dialect for row in rows] == ["messages"] * 5


def test_its_bytes_are_what_it_takes() -> None:
    chance = random.Random(0)
    tracemalloc.start()
    graph, node = TokenGraph(), ROOT
    for n in range(500):
        params = SamplingParams(max_tokens=10_000 + n, seed=2**40 + n)
        ids = [chance.randrange(2**17) for _ in range(40)]
        node = graph.add_context(node, array("i", ids))
        runs = (VersionRun(3, 40, 0),)
        turn = Sampled(array("i", ids), array("f", ids), runs, params, "stop", ["http://a"], "chat")
        node = graph.add_sampled(node, turn)
    del params, ids, runs, turn
    gc.collect()
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 0.75 < graph.num_bytes / taken < 1.25
