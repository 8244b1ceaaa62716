"""Which chats of a session are its main line."""

from rollmesh.core.types import SamplingParams
from rollmesh.runtime.prompts import Prompts
from rollmesh.runtime.token_graph import (
    ROOT,
    RootChat,
    RootKind,
    Sampled,
    TokenGraph,
    assign,
    branches_of,
)
from rollmesh.testing.sampler import ScriptedSampler
from tests.unit.runtime.session_world import Message, Say, call, open_session, said, turn

MAIN, HELPER, TITLE = RootKind(5, 1), RootKind(6, 2), RootKind(0, 3)


def grow(graph: TokenGraph, node: int, num_tokens: int = 1) -> int:
    """A turn behind `node`: a prompt and so many sampled tokens."""
    params = SamplingParams(max_tokens=num_tokens)
    node = graph.add_context(node, [1])
    sampled = Sampled([2] * num_tokens, [0.0] * num_tokens, (), params, "stop")
    return graph.add_sampled(node, sampled)


def test_the_line_with_tools_that_lasts_longest_is_main_whatever_others_sample() -> None:
    graph = TokenGraph()
    grow(graph, ROOT)  # a title
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


def test_without_tools_the_line_of_the_first_call_is_main_and_nothing_is_a_side_call() -> None:
    graph = TokenGraph()
    grow(graph, ROOT)
    other = grow(graph, ROOT)
    grow(graph, other, 50)
    kinds = {0: RootKind(0, 1), 2: RootKind(0, 2)}
    assert branches_of(graph, kinds) == {0: "main", 2: "subagent"}


def test_of_lines_that_last_equally_long_the_last_active_one_is_main() -> None:
    chats = {0: RootChat(MAIN, 0, 4), 1: RootChat(HELPER, 1, 5)}
    assert assign(chats) == {0: "subagent", 1: "main"}


def test_a_last_call_without_tools_stays_on_the_line_that_began_with_them() -> None:
    """The last call of an agent that is out of steps: the same messages, and no tools."""
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


async def test_claude_codes_main_line_is_main_beside_four_busier_sub_agents(
    prompts: Prompts, say: Say
) -> None:
    def system(text: str) -> Message:
        return {"role": "system", "content": text}

    def user(text: str) -> Message:
        return {"role": "user", "content": text}

    lengths = {"main": "4", "title": "4", "helper": "guess a number higher " * 4}
    kind = "title"
    session = open_session(ScriptedSampler(lambda _: say(lengths[kind])), prompts)
    await call(session, turn(system("make a title"), user("fix it"), tools=b"[]"))
    kind = "main"
    line = [system("You are the agent."), user("fix it")]
    await call(session, turn(*line, tools=TOOLS))
    kind = "helper"
    for number in range(4):
        helper = [system("You are a helper."), user(f"look at {number}")]
        for step in range(3):
            await call(session, turn(*helper, tools=HELPER_TOOLS))
            helper += [said(lengths["helper"].strip()), user(f"result {step}")]
    kind = "title"
    await call(session, turn(system("what is the topic"), user("results")))
    kind = "main"
    line += [said("4"), user("all results")]
    await call(session, turn(*line, tools=TOOLS))
    await call(session, turn(*line, said("4"), user("give up"), tools=b""))
    session.seal("done")
    record = session.record()
    branches = [node.branch for node in record.nodes if node.sampled]
    expected = ["side", "main", *["subagent"] * 12, "side", "main", "main"]
    assert branches == expected
    assert b"give up" in bytes(record.messages)
