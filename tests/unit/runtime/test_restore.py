"""A session that is restored from its events continues like the one that wrote them."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from rollmesh.core.errors import SessionError
from rollmesh.runtime.chat import RequestedSampling, Turn
from rollmesh.runtime.conversation.history import LONG_BYTES
from rollmesh.runtime.conversation.message_trie import NO_NODE, MessageNode
from rollmesh.runtime.session import Session, SessionState
from rollmesh.runtime.tokens.families import choose_family
from rollmesh.runtime.tokens.prompts import Prompts
from rollmesh.runtime.tokens.tokenizer import Tokenizer, load_tokenizer
from rollmesh.runtime.tokens.tool_calls import StopStrings
from rollmesh.testing.model_folder import CHAT_TEMPLATE, write_model_folder
from rollmesh.testing.sampler import ScriptedSampler
from tests.unit.runtime.list_event_writer import ListEventWriter
from tests.unit.runtime.random_chats import RandomAgent
from tests.unit.runtime.session_calls import (
    MORE,
    TOOLS,
    USER,
    Message,
    ReplyIds,
    assistant,
    call,
    open_session,
    restored_session,
    trained,
    turn,
    with_fields,
)


def shape(session: Session) -> list[object]:
    """Return the trie of a session: each node once, with its message and its graph node."""
    history = session._conversation.history  # noqa: SLF001 - no public method shows it
    history.catch_up()
    found: dict[int, MessageNode] = {}
    waiting = list(history.roots.values())
    while waiting:
        message_node = waiting.pop()
        for child in (message_node.children or {}).values():
            if child.number not in found:
                found[child.number] = child
                waiting.append(child)
    return [
        (n, s.raw, s.node, s.sampled, s.continued, s.depth, s.parent.number if s.parent else None)
        for n, s in sorted(found.items())
    ]


def record_of(session: Session) -> object:
    """Return the record of a session as comparable values; seals the session."""
    session.seal("done")
    record = session.record()
    return (
        record.nodes,
        bytes(record.token_ids),
        bytes(record.logprobs),
        record.engines,
        bytes(record.messages),
        record.num_calls,
        record.forks,
        record.healed,
    )


@pytest.mark.parametrize("seed", range(30))
async def test_random_chats_continue_identically_after_restarts(
    prompts: Prompts, tokenizer: Tokenizer, seed: int
) -> None:
    event_writer = ListEventWriter()
    undisturbed = RandomAgent(prompts, tokenizer, seed)
    restarted = RandomAgent(prompts, tokenizer, seed, event_writer=event_writer)
    for number in range(60):
        await undisturbed.step()
        await restarted.step()
        if number % 7 == seed % 7 and not restarted.session.sampling:
            event_writer.schedule_flush()
            before = restarted.session
            event_writer = event_writer.next_process()
            restarted.session = restored_session(before, event_writer)
            assert shape(restarted.session) == shape(before)
    assert record_of(restarted.session) == record_of(undisturbed.session)


@pytest.mark.parametrize("seed", range(12))
async def test_a_kill_at_any_moment_leaves_a_session_with_all_settled_turns(
    prompts: Prompts, tokenizer: Tokenizer, seed: int
) -> None:
    """Running generations are lost; prompts continue from exactly the stored tokens or start
    again.
    """
    event_writer = ListEventWriter()
    agent = RandomAgent(prompts, tokenizer, seed, event_writer=event_writer)
    for number in range(80):
        await agent.step()
        if number % 5 == seed % 5:
            before = agent.session
            event_writer = event_writer.next_process()
            agent.session = restored_session(before, event_writer)
            known = {reply.node for replies in agent.session._replies.all() for reply in replies}  # noqa: SLF001 - likewise
            assert NO_NODE not in known
    nodes = record_of(agent.session)
    assert nodes


@pytest.fixture
def reply_ids(tokenizer: Tokenizer) -> ReplyIds:
    return lambda text: tokenizer.encode(text) + tokenizer.encode("<|im_end|>")


async def test_fall_backs_are_counted_alike_after_a_restart(
    prompts: Prompts, reply_ids: ReplyIds
) -> None:
    event_writer = ListEventWriter()
    sampler = ScriptedSampler(lambda _: (*reply_ids("a"),))
    sampler.has_publisher = False
    session, messages = open_session(sampler, prompts, event_writer=event_writer), [USER]
    for served in (7, 3, -1, 2, 2):
        sampler.policy_version = served
        await call(session, turn(*messages))
        messages += [assistant("a"), MORE]
    assert session.num_fell_back == 2, "from 7 to 3 and from 3 to 2"
    after = restored_session(session, event_writer.next_process())
    assert after.num_fell_back == 2
    sampler.policy_version = 1
    await call(after, turn(*messages))
    assert after.num_fell_back == 3


async def test_a_call_with_only_one_written_choice_is_sampled_again(
    prompts: Prompts, reply_ids: ReplyIds
) -> None:
    event_writer = ListEventWriter()
    sampler = ScriptedSampler()
    session = open_session(sampler, prompts, event_writer=event_writer)
    asked = with_fields(turn(USER), num_choices=2)
    one, _ = await session.attach(asked)
    sampler.generations[0].end(*reply_ids("a"))
    session.finish(one)
    await session.recorder.written()
    after = restored_session(session, event_writer.next_process())
    again = await after.attach(with_fields(turn(USER), num_choices=2))
    assert [reply.is_running for reply in again] == [True, True]
    assert again[0].source.node == one.source.node, "after the same tokens"
    for generation in sampler.generations[2:]:
        generation.end(*reply_ids("b"))
    for reply in again:
        after.finish(reply)
        after.delivered(reply)
    assert [finish for _, _, finish in trained(after)] == ["void", "stop", "stop"]


async def test_an_undelivered_answer_is_void_until_it_is_delivered(
    prompts: Prompts, reply_ids: ReplyIds
) -> None:
    event_writer = ListEventWriter()
    session = open_session(
        ScriptedSampler(lambda _: reply_ids("a")), prompts, event_writer=event_writer
    )
    (reply,) = await session.attach(turn(USER))
    session.finish(reply)
    await session.recorder.written()
    session.left(reply)
    lost = restored_session(session, event_writer.next_process())
    assert [finish for _, _, finish in trained(lost)] == ["void"]
    event_writer = event_writer.next_process()
    found = restored_session(session, event_writer)
    await call(found, turn(USER))
    assert [
        finish for _, _, finish in trained(restored_session(found, event_writer.next_process()))
    ] == ["stop"]


async def test_a_repeated_answer_has_the_same_likeliest_tokens_and_stop_string(
    prompts: Prompts, tokenizer: Tokenizer
) -> None:
    event_writer = ListEventWriter()
    sampler = ScriptedSampler(
        lambda _: tokenizer.encode("ab stop"),
        new_matcher=lambda stops: StopStrings(stops, tokenizer.stream()),
    )
    session = open_session(sampler, prompts, event_writer=event_writer)
    asked = with_fields(turn(USER), sampling=RequestedSampling(stop=("stop",)))
    reply, answer = await call(session, asked)
    after = restored_session(session, event_writer.next_process())
    (again,) = await after.attach(msgspec.structs.replace(asked, is_retry=True))
    assert (again.matched_stop, again.head) == ("stop", reply.head)
    assert after.finish(again) == answer
    assert list(again.token_ids()) == list(reply.token_ids())
    assert list(again.logprobs()) == list(reply.logprobs())


async def test_raw_prompts_continue_from_texts_and_from_tokens(
    prompts: Prompts, tokenizer: Tokenizer, reply_ids: ReplyIds
) -> None:
    event_writer = ListEventWriter()
    session = open_session(
        ScriptedSampler(lambda _: reply_ids("a")), prompts, event_writer=event_writer
    )
    reply, _ = await call(session, Turn(messages=[], prompt_text="guess", digest=1))
    text = "guess" + tokenizer.decode(list(reply.token_ids()))
    await call(session, Turn(messages=[], prompt_text=text + " higher", digest=2))
    await call(session, Turn(messages=[], prompt_ids=(5, 6, 7), digest=3))
    for each in (session, restored_session(session, event_writer.next_process())):
        more = Turn(messages=[], prompt_text=text + " lower", digest=4)
        again, _ = await call(each, more)
        assert each._conversation.graph.nodes[again.source.node].parent == reply.node  # noqa: SLF001 - likewise
        ids, _ = await call(each, Turn(messages=[], prompt_ids=(5, 6, 7), digest=5))
        assert list(ids.prompt_ids()) == [5, 6, 7]


async def test_an_answer_is_restored_with_its_name_and_a_limit_with_its_message(
    prompts: Prompts, reply_ids: ReplyIds
) -> None:
    event_writer = ListEventWriter()
    sampler = ScriptedSampler()
    session = open_session(sampler, prompts, event_writer=event_writer)
    running = asyncio.ensure_future(call(session, turn(USER)))
    await sampler.moved.wait()
    sampler.generations[0].end(*reply_ids("a"))
    reply, _ = await running
    (lost,) = await session.attach(turn(USER, assistant("a"), MORE))
    lost.join()
    session.end_early("too much")
    after = restored_session(session, event_writer.next_process())
    assert after.node_of(reply.head.id) == reply.node
    assert (after.state, after.spent_because) == (SessionState.SPENT, "too much")
    with pytest.raises(SessionError, match="too much"):
        await after.attach(turn(USER, assistant("a"), MORE, MORE))


async def test_long_texts_tools_and_images_are_written_once(
    prompts: Prompts, reply_ids: ReplyIds
) -> None:
    event_writer = ListEventWriter()
    session = open_session(
        ScriptedSampler(lambda _: reply_ids("a")), prompts, 10**6, event_writer=event_writer
    )
    long: Message = {"role": "user", "content": "x " * LONG_BYTES}
    await call(session, turn(long, tools=TOOLS))
    await call(session, turn(long, assistant("a"), MORE, tools=TOOLS))
    assert len(event_writer.texts) == 2
    assert sum(map(len, event_writer.records)) < 10 * LONG_BYTES
    after = restored_session(session, event_writer.next_process())
    reply, _ = await call(
        after, turn(long, assistant("a"), MORE, assistant("a"), MORE, tools=TOOLS)
    )
    assert (reply.source.tools, after.fork_report().forks) == (TOOLS, [])
    assert record_of(after) == record_of(await _with_one_more(session, long))


async def _with_one_more(session: Session, long: Message) -> Session:
    await call(session, turn(long, assistant("a"), MORE, assistant("a"), MORE, tools=TOOLS))
    return session


COUNTS = "{{ messages | length }}" + CHAT_TEMPLATE
"""A template that writes the number of messages first, so that no prompt begins like an earlier
one.
"""


async def test_a_fork_caused_by_a_template_has_the_same_cause_and_texts(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path, model_type="unknown", chat_template=COUNTS)
    tokenizer = load_tokenizer(folder)
    prompts = Prompts(choose_family(folder, "auto", tokenizer), tokenizer)
    ids = tokenizer.encode("a<|im_end|>")
    event_writer = ListEventWriter()
    session = open_session(ScriptedSampler(lambda _: ids), prompts, event_writer=event_writer)
    await call(session, turn(USER))
    await call(session, turn(USER, assistant("a"), MORE))
    after = restored_session(session, event_writer.next_process())
    [fork] = after.fork_report().forks
    assert (fork.cause, [fork]) == ("template", session.fork_report().forks)
    assert record_of(after) == record_of(session)
