"""Nodes of new tokens only, their paths, and the branches of a session's chats."""

import gc
import random
import tracemalloc
from array import array

from rollmesh.core.types import SamplingParams, VersionRun
from rollmesh.runtime.conversation.token_graph import (
    ROOT,
    RootChat,
    RootKind,
    Sampled,
    TokenGraph,
    assign,
    branches_of,
)
from rollmesh.runtime.tokens.prompts import Prompts
from rollmesh.testing.sampler import ScriptedSampler
from tests.unit.runtime.session_calls import Message, ReplyIds, assistant, call, open_session, turn

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


def test_a_path_is_the_prompt_of_the_engine() -> None:
    graph = forked()
    assert list(graph.path_ids(4)) == [1, 2, 3, 4, 6, 7]
    assert list(graph.path_ids(2)) == [1, 2, 5]
    assert graph.depth_of(4) == 6
    assert graph.depth_of(ROOT) == 0


def test_each_token_is_stored_once() -> None:
    graph = forked()
    assert graph.token_ids == array("i", [1, 2, 3, 4, 5, 6, 7])
    assert graph.logprobs == array("f", [-3, -4, -5, -7])
    assert list(graph.ids_of(1)) == [3, 4]
    assert list(graph.logprobs_of(4)) == [-7]


def test_rows_are_in_order_and_have_the_branch_of_their_root() -> None:
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
    add(["http://c", "http://a"], VersionRun(4, 2, 1))  # no token of engine c was kept
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


def test_its_byte_count_matches_the_allocated_memory() -> None:
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


MAIN, HELPER, TITLE = RootKind(5, 1), RootKind(6, 2), RootKind(0, 3)


def grow(graph: TokenGraph, node: int, num_tokens: int = 1) -> int:
    """Add a turn after `node`: a prompt and sampled tokens."""
    params = SamplingParams(max_tokens=num_tokens)
    node = graph.add_context(node, [1])
    sampled = Sampled([2] * num_tokens, [0.0] * num_tokens, (), params, "stop")
    return graph.add_sampled(node, sampled)


def test_the_longest_conversation_with_tools_is_main() -> None:
    graph = TokenGraph()
    grow(graph, ROOT)  # a title request
    end = grow(graph, ROOT)
    kinds = {0: TITLE, 2: MAIN}
    for _ in range(4):
        kinds[len(graph.nodes)] = HELPER
        helper = grow(graph, ROOT, 100)
        for _ in range(5):
            helper = grow(graph, helper, 100)
    end = grow(graph, end)
    compacted = len(graph.nodes)
    kinds[compacted] = MAIN
    grow(graph, ROOT)
    branches = branches_of(graph, kinds)
    assert branches.pop(0) == "side"
    assert (branches.pop(2), branches.pop(compacted)) == ("main", "main")
    assert set(branches.values()) == {"subagent"}


def test_without_tools_the_first_conversation_is_main_and_nothing_is_a_side_call() -> None:
    graph = TokenGraph()
    grow(graph, ROOT)
    other = grow(graph, ROOT)
    grow(graph, other, 50)
    kinds = {0: RootKind(0, 1), 2: RootKind(0, 2)}
    assert branches_of(graph, kinds) == {0: "main", 2: "subagent"}


def test_of_equally_long_conversations_the_last_active_one_is_main() -> None:
    chats = {0: RootChat(MAIN, 0, 4), 1: RootChat(HELPER, 1, 5)}
    assert assign(chats) == {0: "subagent", 1: "main"}


def test_a_last_call_without_tools_stays_in_its_conversation() -> None:
    """For example the last call of an agent that is out of steps: the same messages, without
    tools.
    """
    chats = {
        0: RootChat(RootKind(5, 1, 9), 0, 3),
        1: RootChat(RootKind(0, 1, 9), 4, 5),
        2: RootChat(RootKind(0, 2, 8), 6, 20),
    }
    assert assign(chats) == {0: "main", 1: "main", 2: "side"}


def test_a_session_without_a_chat_has_no_branch() -> None:
    assert branches_of(TokenGraph(), {}) == {}


TOOLS = b'[{"type":"function","function":{"name":"task"}},{"type":"function"}]'
HELPER_TOOLS = b'[{"type":"function","function":{"name":"read"}}]'


async def test_claude_codes_main_conversation_is_main_beside_four_busier_subagents(
    prompts: Prompts, reply_ids: ReplyIds
) -> None:
    def system(text: str) -> Message:
        return {"role": "system", "content": text}

    def user(text: str) -> Message:
        return {"role": "user", "content": text}

    lengths = {"main": "4", "title": "4", "helper": "guess a number higher " * 4}
    kind = "title"
    session = open_session(ScriptedSampler(lambda _: reply_ids(lengths[kind])), prompts)
    await call(session, turn(system("make a title"), user("fix it"), tools=b"[]"))
    kind = "main"
    line = [system("You are the agent."), user("fix it")]
    await call(session, turn(*line, tools=TOOLS))
    kind = "helper"
    for number in range(4):
        helper = [system("You are a helper."), user(f"look at {number}")]
        for step in range(3):
            await call(session, turn(*helper, tools=HELPER_TOOLS))
            helper += [assistant(lengths["helper"].strip()), user(f"result {step}")]
    kind = "title"
    await call(session, turn(system("what is the topic"), user("results")))
    kind = "main"
    line += [assistant("4"), user("all results")]
    await call(session, turn(*line, tools=TOOLS))
    await call(session, turn(*line, assistant("4"), user("give up"), tools=b""))
    session.seal("done")
    record = session.record()
    branches = [node.branch for node in record.nodes if node.sampled]
    expected = ["side", "main", *["subagent"] * 12, "side", "main", "main"]
    assert branches == expected
    assert b"give up" in bytes(record.messages)
