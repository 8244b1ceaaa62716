"""The conversation of a session: continued replies, prefills, token counts, raw prompts,
resends."""

import asyncio
import random
import weakref
from collections.abc import Awaitable, Sequence

import msgspec
import pytest

from rollmesh.core.errors import SessionError
from rollmesh.core.types import EVAL_SAMPLING, SamplingParams
from rollmesh.runtime.chat import RequestedSampling, ToolChoice, Turn
from rollmesh.runtime.conversation.conversation import (
    KEPT_FROM_TOKENS,
    Conversation,
    Prompt,
    PromptJson,
    encode,
)
from rollmesh.runtime.conversation.forks import ForkCause
from rollmesh.runtime.conversation.history import MESSAGE_NODE_BYTES
from rollmesh.runtime.conversation.token_graph import (
    NODE_BYTES,
    ROOT,
    Sampled,
    TokenGraph,
    reasons_of,
    sample_paths,
)
from rollmesh.runtime.images import hold_image
from rollmesh.runtime.session import OFF_LOOP_BYTES, Session
from rollmesh.runtime.tokens.prompts import Prompts
from rollmesh.runtime.tokens.tokenizer import Tokenizer
from rollmesh.testing.sampler import ScriptedSampler
from tests.unit.runtime.random_chats import RandomAgent
from tests.unit.runtime.session_calls import (
    MORE,
    SYSTEM,
    TO_THE_END,
    TOOLS,
    USER,
    Message,
    ReplyIds,
    assistant,
    call,
    call_all,
    open_session,
    trained,
    turn,
    with_fields,
)


async def test_a_named_reply_is_continued_without_its_history(
    prompts: Prompts, tokenizer: Tokenizer, reply_ids: ReplyIds
) -> None:
    sampler = ScriptedSampler([reply_ids("4"), reply_ids("5"), reply_ids("6")])
    session = open_session(sampler, prompts)
    first, _ = await call(session, turn(SYSTEM, USER))
    named = with_fields(turn(MORE), previous_reply=first.head.id)
    second, _ = await call(session, named)
    before = [*sampler.requests[0].prompt_ids, *reply_ids("4")]
    assert list(sampler.requests[1].prompt_ids)[: len(before)] == before
    with_system = with_fields(
        turn(SYSTEM, USER), previous_reply=second.head.id, replaces_system=True
    )
    await call(session, with_system)
    text = tokenizer.decode(list(sampler.requests[2].prompt_ids))
    assert text.count("Be brief.") == 1
    assert not session.fork_report().forks
    session.seal("done")
    shown = [each["content"] for each in msgspec.json.decode(session.record().messages)]
    assert shown == ["Be brief.", "guess", "4", "higher", "5", "guess", "6"]


async def test_new_instructions_replace_those_of_the_conversation(
    prompts: Prompts, tokenizer: Tokenizer, reply_ids: ReplyIds
) -> None:
    sampler = ScriptedSampler([reply_ids("4"), reply_ids("5")])
    session = open_session(sampler, prompts)
    first, _ = await call(session, turn(SYSTEM, USER))
    other: Message = {"role": "system", "content": "Be loud."}
    named = with_fields(turn(other, MORE), previous_reply=first.head.id, replaces_system=True)
    await call(session, named)
    text = tokenizer.decode(list(sampler.requests[1].prompt_ids))
    assert "Be loud." in text
    assert "Be brief." not in text
    assert text.index("guess") < text.index("higher")
    assert [row.cause for row in session.fork_report().forks] == [ForkCause.SYSTEM_CHANGED]


async def test_a_developer_message_after_a_named_reply_keeps_its_position(
    prompts: Prompts, tokenizer: Tokenizer, reply_ids: ReplyIds
) -> None:
    sampler = ScriptedSampler([reply_ids("4"), reply_ids("5")])
    session = open_session(sampler, prompts)
    first, _ = await call(session, turn(SYSTEM, USER))
    word: Message = {"role": "developer", "content": "Now be loud."}
    await call(session, with_fields(turn(word, MORE), previous_reply=first.head.id))
    before = [*sampler.requests[0].prompt_ids, *reply_ids("4")]
    after = list(sampler.requests[1].prompt_ids)
    assert after[: len(before)] == before
    assert "Now be loud." in tokenizer.decode(after[len(before) :])
    assert not session.fork_report().forks


async def test_other_tools_after_a_named_reply_are_a_fork(
    prompts: Prompts, reply_ids: ReplyIds
) -> None:
    session = open_session(ScriptedSampler([reply_ids("4"), reply_ids("5")]), prompts)
    first, _ = await call(session, turn(USER))
    await call(session, with_fields(turn(MORE, tools=TOOLS), previous_reply=first.head.id))
    assert [row.cause for row in session.fork_report().forks] == [ForkCause.TOOLS_CHANGED]


async def test_an_unknown_reply_is_refused_by_name(prompts: Prompts) -> None:
    session = open_session(ScriptedSampler(), prompts)
    await session.attach(turn(USER))
    own = session.session_id
    for name in ("resp_1", f"{own}-0", f"{own}-9", "x-0", f"{own}-" + "9" * 5000):
        with pytest.raises(SessionError, match="not found") as caught:
            await session.attach(with_fields(turn(MORE), previous_reply=name))
        assert (caught.value.status, caught.value.code) == (400, "previous_response_not_found")


async def test_the_opening_of_a_required_call_is_context(
    prompts: Prompts, tokenizer: Tokenizer, reply_ids: ReplyIds
) -> None:
    sampler = ScriptedSampler(lambda _: reply_ids(' {"a": 1}}\n</tool_call>'))
    session = open_session(sampler, prompts)
    asked = with_fields(turn(USER, tools=TOOLS), tool_choice=ToolChoice("required"), num_choices=2)
    answered = await call_all(session, asked)
    prefill = prompts.prefill(ToolChoice("required"), None, TOOLS)
    assert list(sampler.requests[0].prompt_ids)[-len(prefill) :] == list(prefill)
    for reply, answer in answered:
        assert [made.name for made in answer.tool_calls] == ["f"], tokenizer.decode(prefill)
        assert reply.head.num_prompt_tokens == len(sampler.requests[0].prompt_ids)
    assert trained(session) == [(1, False, "tool_calls")] * 2


async def test_a_prefill_counts_as_prompt_tokens_everywhere(
    prompts: Prompts, reply_ids: ReplyIds
) -> None:
    sampler = ScriptedSampler(lambda _: reply_ids("}"))
    free = open_session(sampler, prompts)
    asked = with_fields(turn(USER, tools=TOOLS), tool_choice=ToolChoice("required"))
    num_lead = len(prompts.prefill(asked.tool_choice, None, TOOLS))
    num_prompt = await free.count(turn(USER, tools=TOOLS)) + num_lead
    assert await free.count(asked) == num_prompt
    session = open_session(sampler, prompts, max_context_tokens=num_prompt + 3)
    reply, _ = await call(session, asked)
    assert (reply.head.num_prompt_tokens, reply.head.params.max_tokens) == (num_prompt, 3)
    full = open_session(sampler, prompts, max_context_tokens=num_prompt)
    with pytest.raises(SessionError, match=f"resulted in {num_prompt} tokens"):
        await full.attach(asked)


async def test_a_turn_is_extended_after_its_prefill_unchanged(
    prompts: Prompts, tokenizer: Tokenizer
) -> None:
    """Text that opens reasoning at the start of a turn does not do so inside a call."""
    sampler = ScriptedSampler()
    session = open_session(sampler, prompts)
    asked = with_fields(turn(USER, tools=TOOLS), tool_choice=ToolChoice("required"))
    cut = tokenizer.encode("<think>hm")
    (reply,) = await session.attach(asked)
    sampler.generations[0].end(*cut, reason="length")
    session.finish(reply)
    session.delivered(reply)
    named = with_fields(turn(MORE, tools=TOOLS), previous_reply=reply.head.id)
    await session.attach(named)
    before, after = (list(request.prompt_ids) for request in sampler.requests)
    assert after[: len(before) + len(cut)] == [*before, *cut]
    rest = tokenizer.decode(after[len(before) + len(cut) :])
    assert rest == "<|im_end|>\n<|im_start|>user\nhigher<|im_end|>\n<|im_start|>assistant\n"


async def test_tokens_are_counted_without_a_trace(prompts: Prompts, reply_ids: ReplyIds) -> None:
    sampler = ScriptedSampler([reply_ids("4"), reply_ids("5")])
    session = open_session(sampler, prompts)
    num_first = await session.count(turn(USER))
    reply, _ = await call(session, turn(USER))
    assert num_first == reply.head.num_prompt_tokens
    num_tokens = await session.count(turn(USER, assistant("4"), MORE))
    held = session.held_bytes
    await call(session, turn(USER, assistant("4"), MORE))
    assert num_tokens == len(sampler.requests[1].prompt_ids)
    assert held < session.held_bytes
    assert session.num_calls == 2


async def test_a_sealed_session_counts_nothing_before_or_after_a_long_text(
    prompts: Prompts,
) -> None:
    session = open_session(ScriptedSampler(), prompts)
    long = "x " * OFF_LOOP_BYTES
    async with asyncio.TaskGroup() as group:
        waiting = [
            group.create_task(_status(asked))
            for asked in (
                session.count(turn({"role": "user", "content": long})),
                session.attach(turn({"role": "user", "content": long})),
                session.attach(Turn(messages=[], prompt_text=long, digest=1)),
            )
        ]
        group.create_task(_end(session))
    assert [task.result() for task in waiting] == [410] * 3
    assert await _status(session.count(turn(USER))) == 410


async def _status(asked: Awaitable[object]) -> int:
    with pytest.raises(SessionError) as caught:
        await asked
    return caught.value.status


async def _end(session: Session) -> None:
    session.seal("the rollout ended")
    session.forget()


def test_an_image_is_stored_once_and_freed_with_its_last_session(prompts: Prompts) -> None:
    address = "data:image/png;base64," + "aW1hZ2Vz" * 70
    part = {"type": "image_url", "image_url": {"url": address}}
    asked = Turn(messages=[msgspec.json.encode({"role": "user", "content": [part]})])
    sessions = [Conversation(prompts, None) for _ in range(2)]
    for held in sessions:
        match = held.match(asked, None).match
        message_node = held.hold(Prompt(match, ROOT, (1,)), 0)
        assert len(message_node.raw) < 200
        assert held.images(message_node.node) == (hold_image(address).address,)
        counts = held.held()
        assert (counts["graph"], counts["blobs"]) == (NODE_BYTES + 4, len(address))
        assert counts["history"] == MESSAGE_NODE_BYTES + len(message_node.raw)
    left = weakref.ref(hold_image(address))
    assert sessions[0].history.images == sessions[1].history.images
    del match, message_node, held
    for held in sessions:
        held.history.forget()
    held, sessions = sessions[0], []
    assert left() is not None
    del held
    assert left() is None


async def test_a_fork_reports_where_its_tokens_differ_and_what_it_cost(
    prompts: Prompts, reply_ids: ReplyIds
) -> None:
    sampler = ScriptedSampler([reply_ids("4"), reply_ids("5")])
    session = open_session(sampler, prompts)
    await call(session, turn(SYSTEM, USER))
    await call(session, turn(SYSTEM, USER, assistant("7"), MORE))
    (row,) = session.fork_report().forks
    before, after = (list(request.prompt_ids) for request in sampler.requests)
    left = [*before, *reply_ids("4")]
    assert (row.call, row.node, row.message) == (1, 2, 2)
    assert (row.held, row.got) == ("4", "7")
    assert left[: row.token] == after[: row.token]
    assert left[row.token] != after[row.token]
    assert row.num_tokens == len(after)


async def test_a_fork_row_shows_the_calls_of_the_message_that_differs(
    prompts: Prompts, reply_ids: ReplyIds
) -> None:
    markup = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    session = open_session(ScriptedSampler([reply_ids(markup), reply_ids("5")]), prompts)
    await call(session, turn(USER, tools=TOOLS))
    other = {"id": "x", "function": {"name": "f", "arguments": '{"a": 2}'}}
    rewritten: Message = {"role": "assistant", "tool_calls": [other]}
    result: Message = {"role": "tool", "tool_call_id": "x", "content": "42"}
    await call(session, turn(USER, rewritten, result, tools=TOOLS))
    (row,) = session.fork_report().forks
    assert (row.held, row.got) == ('f({"a":1})', 'f({"a":2})')


async def test_calls_sent_back_as_text_are_a_fork_with_its_own_cause(
    prompts: Prompts, reply_ids: ReplyIds
) -> None:
    """The requests of smolagents 1.26: calls as a Python list, and their results as a user
    message.
    """
    markup = 'I call<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    session = open_session(ScriptedSampler(lambda _: reply_ids(markup)), prompts)
    line: list[Message] = [USER]
    for step in range(3):
        _, answer = await call(session, turn(*line, tools=TOOLS))
        calls = [
            {"id": each.id, "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
            for each in answer.tool_calls
        ]
        shown = {"type": "text", "text": f"I call\nCalling tools:\n{calls}"}
        line += [
            {"role": "assistant", "content": [shown]},
            {"role": "user", "content": [{"type": "text", "text": f"Observation:\n{step}"}]},
        ]
    rows = session.fork_report().forks
    assert [row.cause for row in rows] == ["calls_as_text"] * 2
    assert [row.held for row in rows] == ['I call f({"a":1})'] * 2
    session.seal("done")
    record = session.record()
    reasons = reasons_of(record.nodes, ["main"])
    assert [reasons[n] for n, node in enumerate(record.nodes) if node.sampled] == [""] * 3


@pytest.mark.parametrize("seed", [*range(24), 302])
async def test_for_any_agent_a_prompt_equals_its_request_and_each_token_trains_once(
    prompts: Prompts, template_prompts: Prompts, tokenizer: Tokenizer, seed: int
) -> None:
    agent = RandomAgent(prompts if seed % 3 else template_prompts, tokenizer, seed)
    for _ in range(40):
        await agent.step()
    assert not {"changed_text", "changed_call"} & set(agent.session.fork_report().healed)
    agent.session.seal("done")
    nodes = agent.session.record().nodes
    reasons = reasons_of(nodes, ["main", "side", "subagent"])
    claims = sample_paths(nodes, [not reason for reason in reasons])
    claimed = sorted(row for claim in claims for row in claim.trained)
    assert claimed == [row for row, reason in enumerate(reasons) if not reason]
    sampled = [row for row, node in enumerate(nodes) if node.sampled and node.num_tokens]
    assert {reasons[row] for row in sampled} <= {"", "void", "superseded"}


def grow(graph: TokenGraph, parent: int, chance: random.Random) -> int:
    """Add a sampled turn and the context after it; return the context."""
    ids = [chance.randrange(150_000) for _ in range(chance.randrange(1, 40))]
    params = SamplingParams(max_tokens=1)
    node = graph.add_sampled(parent, Sampled(ids, [0.0] * len(ids), (), params, "stop"))
    return graph.add_context(node, [chance.randrange(150_000) for _ in range(chance.randrange(9))])


def test_the_cached_text_is_that_of_the_path_whatever_was_requested_before() -> None:
    chance = random.Random(3)
    graph, text = TokenGraph(), PromptJson()
    first = graph.add_context(ROOT, range(KEPT_FROM_TOKENS + 1))
    ends = [first, graph.add_context(ROOT, range(7))]
    for _ in range(200):
        node = ends[-1] if chance.random() < 0.7 else chance.choice(ends)
        node = grow(graph, node, chance) if chance.random() < 0.8 else node
        ends.append(node)
        assert bytes(text.of(graph, node)) == encode(graph.path_ids(node))


def test_a_text_that_is_being_sent_does_not_change() -> None:
    chance = random.Random(4)
    graph, text = TokenGraph(), PromptJson()
    node = graph.add_context(ROOT, range(KEPT_FROM_TOKENS))
    sending = text.of(graph, node)
    before = bytes(sending)
    after = grow(graph, node, chance)
    assert bytes(text.of(graph, after)) == encode(graph.path_ids(after))
    assert bytes(sending) == before


def test_a_short_prompt_is_not_cached() -> None:
    graph, text = TokenGraph(), PromptJson()
    node = graph.add_context(ROOT, [5, 6, 7])
    assert text.of(graph, node) == b"5,6,7"


def raw(text: str = "", ids: tuple[int, ...] | None = None) -> Turn:
    prompt_text = None if ids is not None else text
    return Turn(messages=[], prompt_ids=ids, prompt_text=prompt_text, digest=hash((text, ids)))


async def test_a_raw_prompt_is_its_text_and_nothing_else(
    prompts: Prompts, tokenizer: Tokenizer, reply_ids: ReplyIds
) -> None:
    sampler = ScriptedSampler([reply_ids(" <think> 4 ")])
    session = open_session(sampler, prompts)
    _, answer = await call(session, raw("I guess"))
    assert list(sampler.requests[0].prompt_ids) == tokenizer.encode("I guess")
    assert answer.content == " <think> 4 "


@pytest.mark.parametrize("as_ids", [False, True])
async def test_a_raw_prompt_that_repeats_stored_tokens_continues_from_them(
    prompts: Prompts, tokenizer: Tokenizer, reply_ids: ReplyIds, as_ids: bool
) -> None:
    letters = [i for char in " higher" for i in tokenizer.encode(char)]
    sampler = ScriptedSampler(None)
    session = open_session(sampler, prompts)
    prompt = tokenizer.encode("I guess")
    first = raw(ids=tuple(prompt)) if as_ids else raw("I guess")
    (reply,) = await session.attach(first)
    sampler.generations[0].end(*letters, reason="length")
    session.finish(reply)
    session.delivered(reply)
    more = tokenizer.encode(" lower")
    second = raw(ids=(*prompt, *letters, *more)) if as_ids else raw("I guess higher lower")
    await session.attach(second)
    assert list(sampler.requests[1].prompt_ids) == [*prompt, *letters, *more]
    session.seal("done")
    assert [row.parent for row in session.record().nodes][:3] == [-1, 0, 1]


@pytest.mark.parametrize("as_ids", [False, True])
async def test_a_raw_prompt_continues_the_longest_matching_path(
    prompts: Prompts, tokenizer: Tokenizer, as_ids: bool
) -> None:
    """The newer answer may be a prefix of an older branch."""
    texts = ["I guess", " higher", " or", " lower", " hi", " end"]
    ids = {text: tokenizer.encode(text) for text in texts}
    ids[" hi"] = ids[" higher"][:1]
    texts[4] = tokenizer.decode(ids[" hi"])

    def asked(*parts: str) -> Turn:
        whole = tuple(i for part in parts for i in ids[part])
        return raw(ids=whole) if as_ids else raw("".join(parts))

    sampler = ScriptedSampler(None)
    session = open_session(sampler, prompts)
    for parts, text in [
        (texts[:1], " higher"),
        (texts[:3], " lower"),
        (texts[:1], " hi"),
        (["I guess", " higher", " or", " lower", " end"], " end"),
    ]:
        (reply,) = await session.attach(asked(*parts))
        sampler.generations[-1].end(*ids[text], reason="length")
        session.finish(reply)
        session.delivered(reply)
    session.seal("done")
    assert [row.parent for row in session.record().nodes] == [-1, 0, 1, 2, 0, 3, 5]


async def test_a_prompt_without_a_token_is_refused(prompts: Prompts) -> None:
    with pytest.raises(SessionError, match="prompt: expected") as caught:
        await open_session(ScriptedSampler(), prompts).attach(raw(""))
    assert caught.value.status == 400


async def test_the_same_raw_prompt_is_stored_once(prompts: Prompts, reply_ids: ReplyIds) -> None:
    session = open_session(ScriptedSampler([reply_ids("4"), reply_ids("5")]), prompts)
    await call_all(session, raw("x"))
    await call_all(session, raw("x"))
    assert trained(session) == [(0, True, "stop"), (0, False, "stop")]


async def test_token_ids_outside_the_vocabulary_are_refused(prompts: Prompts) -> None:
    session = open_session(ScriptedSampler(), prompts)
    for ids in ((), (-1,), (prompts.vocab_size,)):
        with pytest.raises(SessionError, match="prompt: expected token ids") as caught:
            await session.attach(raw(ids=ids))
        assert caught.value.status == 400


BEGUN = "<think>\nhm\n</think>\n\n4"
REST = ' or 5\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call><|im_end|>'


def shown(reasoning: str, text: str = "", **more: object) -> Message:
    return {"role": "assistant", "content": text, "reasoning_content": reasoning, **more}


class Stalled:
    """A session whose first turn stalled after BEGUN and whose reader has left."""

    def __init__(self, prompts: Prompts, tokenizer: Tokenizer) -> None:
        self.sampler = ScriptedSampler()
        self.session: Session = open_session(self.sampler, prompts, sampling=EVAL_SAMPLING)
        self.tokens: Sequence[int] = tokenizer.encode(BEGUN)
        self.rest: Sequence[int] = tokenizer.encode(REST)

    async def start(self) -> "Stalled":
        (self.reply,) = await self.session.attach(turn(USER, tools=TOOLS))
        self.reply.join()
        self.sampler.generations[0].show(*self.tokens)
        self.reply.leave()
        return self

    async def is_resumed_by(self, *echo: Message, **fields: object) -> bool:
        asked = turn(USER, *echo, tools=TOOLS)
        (reply,) = await self.session.attach(with_fields(asked, **fields) if fields else asked)
        return reply is self.reply


@pytest.fixture
async def stalled(prompts: Prompts, tokenizer: Tokenizer) -> Stalled:
    return await Stalled(prompts, tokenizer).start()


async def test_a_stalled_turn_continues_when_its_finished_items_are_sent_back(
    stalled: Stalled,
) -> None:
    """Codex repeats the finished items of a stalled turn in its next request."""
    session = stalled.session
    for echo in (shown("hm"), shown("hm\nhm")):
        assert await stalled.is_resumed_by(echo)
    stalled.reply.join()
    stalled.sampler.generations[0].end(*stalled.rest)
    await stalled.reply.wait(TO_THE_END)
    answer = session.finish(stalled.reply)
    assert (answer.reasoning, answer.content, len(answer.tool_calls)) == ("hm", "4 or 5", 1)
    assert await stalled.is_resumed_by(shown("hm", "4 or 5"))
    session.delivered(stalled.reply)
    (made,) = answer.tool_calls
    call = {"id": made.id, "function": {"name": made.name, "arguments": made.arguments}}
    result: Message = {"role": "tool", "tool_call_id": made.id, "content": "6"}
    merged = shown("hm\nhm\nhm", "4 or 54 or 5", tool_calls=[call])
    await session.attach(turn(USER, merged, result, tools=TOOLS))
    exact = [*stalled.reply.prompt_ids(), *stalled.tokens, *stalled.rest]
    assert list(stalled.sampler.requests[1].prompt_ids)[: len(exact)] == exact
    assert session.fork_report().forks == []


@pytest.mark.parametrize(
    "echo",
    [
        [shown("other")],
        [assistant("4")],  # a text that may continue, so it looks like a prefill
        [shown("hm", "4")],
        [shown("hm"), MORE],
        [MORE],
        [],
    ],
)
async def test_unfinished_items_of_a_stalled_turn_do_not_continue_it(
    stalled: Stalled, echo: list[Message]
) -> None:
    assert await stalled.is_resumed_by(*echo) == (not echo)


async def test_a_request_with_other_settings_is_another_turn(stalled: Stalled) -> None:
    assert not await stalled.is_resumed_by(shown("hm"), sampling=RequestedSampling(temperature=0.5))


async def test_a_delivered_turn_is_not_the_answer_to_a_request_that_continues_its_reasoning(
    stalled: Stalled,
) -> None:
    stalled.reply.join()
    stalled.sampler.generations[0].end(*stalled.rest)
    await stalled.reply.wait(TO_THE_END)
    stalled.session.finish(stalled.reply)
    stalled.session.delivered(stalled.reply)
    assert not await stalled.is_resumed_by(shown("hm"))
