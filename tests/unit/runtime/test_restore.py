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
from tests.unit.runtime.event_writer_world import ListEventWriter
from tests.unit.runtime.random_chats import RandomAgent
from tests.unit.runtime.session_world import (
    MORE,
    TOOLS,
    USER,
    Message,
    Say,
    call,
    open_session,
    restored_session,
    said,
    trained,
    turn,
    with_fields,
)


def shape(session: Session) -> list[object]:
    """The trie of a session: each node once, with its message and its graph node."""
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


def told(session: Session) -> object:
    """The record of a session as JSON values; seals the session."""
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
async def test_random_talks_go_on_as_if_nothing_had_happened(
    prompts: Prompts, tokenizer: Tokenizer, seed: int
) -> None:
    event_writer = ListEventWriter()
    calm = RandomAgent(prompts, tokenizer, seed)
    shaken = RandomAgent(prompts, tokenizer, seed, event_writer=event_writer)
    for number in range(60):
        await calm.step()
        await shaken.step()
        if number % 7 == seed % 7 and not shaken.session.sampling:
            event_writer.schedule_flush()
            before = shaken.session
            event_writer = event_writer.next_process()
            shaken.session = restored_session(before, event_writer)
            assert shape(shaken.session) == shape(before)
    assert told(shaken.session) == told(calm.session)


@pytest.mark.parametrize("seed", range(12))
async def test_a_kill_at_any_moment_leaves_a_session_that_knows_what_was_settled(
    prompts: Prompts, tokenizer: Tokenizer, seed: int
) -> None:
    """Running generations are lost; prompts continue from exactly what was stored, or start
    again."""
    event_writer = ListEventWriter()
    talks = RandomAgent(prompts, tokenizer, seed, event_writer=event_writer)
    for number in range(80):
        await talks.step()
        if number % 5 == seed % 5:
            before = talks.session
            event_writer = event_writer.next_process()
            talks.session = restored_session(before, event_writer)
            known = {reply.node for replies in talks.session._replies.all() for reply in replies}  # noqa: SLF001 - likewise
            assert NO_NODE not in known
    nodes = told(talks.session)
    assert nodes


@pytest.fixture
def say(tokenizer: Tokenizer) -> Say:
    return lambda text: tokenizer.encode(text) + tokenizer.encode("<|im_end|>")


async def test_fall_backs_are_counted_alike_after_a_restart(prompts: Prompts, say: Say) -> None:
    event_writer = ListEventWriter()
    sampler = ScriptedSampler(lambda _: (*say("a"),))
    sampler.has_publisher = False
    session, talk = open_session(sampler, prompts, event_writer=event_writer), [USER]
    for served in (7, 3, -1, 2, 2):
        sampler.policy_version = served
        await call(session, turn(*talk))
        talk += [said("a"), MORE]
    assert session.num_fell_back == 2, "from 7 to 3 and from 3 to 2"
    after = restored_session(session, event_writer.next_process())
    assert after.num_fell_back == 2
    sampler.policy_version = 1
    await call(after, turn(*talk))
    assert after.num_fell_back == 3


async def test_a_call_of_which_one_choice_alone_was_written_is_made_anew(
    prompts: Prompts, say: Say
) -> None:
    event_writer = ListEventWriter()
    sampler = ScriptedSampler()
    session = open_session(sampler, prompts, event_writer=event_writer)
    asked = with_fields(turn(USER), num_choices=2)
    one, _ = await session.attach(asked)
    sampler.generations[0].end(*say("a"))
    session.finish(one)
    await session.recorder.written()
    after = restored_session(session, event_writer.next_process())
    again = await after.attach(with_fields(turn(USER), num_choices=2))
    assert [reply.is_running for reply in again] == [True, True]
    assert again[0].source.node == one.source.node, "after the same tokens"
    for generation in sampler.generations[2:]:
        generation.end(*say("b"))
    for reply in again:
        after.finish(reply)
        after.delivered(reply)
    assert [finish for _, _, finish in trained(after)] == ["void", "stop", "stop"]


async def test_an_answer_that_nobody_took_is_void_until_somebody_does(
    prompts: Prompts, say: Say
) -> None:
    event_writer = ListEventWriter()
    session = open_session(ScriptedSampler(lambda _: say("a")), prompts, event_writer=event_writer)
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


async def test_a_repeated_answer_is_the_same_to_its_likeliest_tokens_and_stop_strings(
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


async def test_raw_prompts_go_on_from_their_texts_and_from_their_tokens(
    prompts: Prompts, tokenizer: Tokenizer, say: Say
) -> None:
    event_writer = ListEventWriter()
    session = open_session(ScriptedSampler(lambda _: say("a")), prompts, event_writer=event_writer)
    reply, _ = await call(session, Turn(messages=[], prompt_text="guess", digest=1))
    text = "guess" + tokenizer.decode(list(reply.token_ids()))
    await call(session, Turn(messages=[], prompt_text=text + " higher", digest=2))
    await call(session, Turn(messages=[], prompt_ids=(5, 6, 7), digest=3))
    for life in (session, restored_session(session, event_writer.next_process())):
        more = Turn(messages=[], prompt_text=text + " lower", digest=4)
        again, _ = await call(life, more)
        assert life._conversation.graph.nodes[again.source.node].parent == reply.node  # noqa: SLF001 - likewise
        ids, _ = await call(life, Turn(messages=[], prompt_ids=(5, 6, 7), digest=5))
        assert list(ids.prompt_ids()) == [5, 6, 7]


async def test_an_answer_is_known_by_its_name_and_a_fault_by_its_words(
    prompts: Prompts, say: Say
) -> None:
    event_writer = ListEventWriter()
    sampler = ScriptedSampler()
    session = open_session(sampler, prompts, event_writer=event_writer)
    running = asyncio.ensure_future(call(session, turn(USER)))
    await sampler.moved.wait()
    sampler.generations[0].end(*say("a"))
    reply, _ = await running
    (lost,) = await session.attach(turn(USER, said("a"), MORE))
    lost.join()
    session.end_early("too much")
    after = restored_session(session, event_writer.next_process())
    assert after.node_of(reply.head.id) == reply.node
    assert (after.state, after.spent_because) == (SessionState.SPENT, "too much")
    with pytest.raises(SessionError, match="too much"):
        await after.attach(turn(USER, said("a"), MORE, MORE))


async def test_long_texts_tools_and_images_are_told_once(prompts: Prompts, say: Say) -> None:
    event_writer = ListEventWriter()
    session = open_session(
        ScriptedSampler(lambda _: say("a")), prompts, 10**6, event_writer=event_writer
    )
    long: Message = {"role": "user", "content": "x " * LONG_BYTES}
    await call(session, turn(long, tools=TOOLS))
    await call(session, turn(long, said("a"), MORE, tools=TOOLS))
    assert len(event_writer.texts) == 2
    assert sum(map(len, event_writer.records)) < 10 * LONG_BYTES
    after = restored_session(session, event_writer.next_process())
    reply, _ = await call(after, turn(long, said("a"), MORE, said("a"), MORE, tools=TOOLS))
    assert (reply.source.tools, after.fork_report().forks) == (TOOLS, [])
    assert told(after) == told(await _with_one_more(session, long))


async def _with_one_more(session: Session, long: Message) -> Session:
    await call(session, turn(long, said("a"), MORE, said("a"), MORE, tools=TOOLS))
    return session


COUNTS = "{{ messages | length }}" + CHAT_TEMPLATE
"""Writes the number of messages first, so that no chat begins like an earlier one."""


async def test_a_fork_that_a_template_made_has_the_same_cause_and_words(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path, model_type="unheard", chat_template=COUNTS)
    tokenizer = load_tokenizer(folder)
    prompts = Prompts(choose_family(folder, "auto", tokenizer), tokenizer)
    ids = tokenizer.encode("a<|im_end|>")
    event_writer = ListEventWriter()
    session = open_session(ScriptedSampler(lambda _: ids), prompts, event_writer=event_writer)
    await call(session, turn(USER))
    await call(session, turn(USER, said("a"), MORE))
    after = restored_session(session, event_writer.next_process())
    [fork] = after.fork_report().forks
    assert (fork.cause, [fork]) == ("template", session.fork_report().forks)
    assert told(after) == told(session)
