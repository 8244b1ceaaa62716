"""Sessions that begin like an earlier one start from its stored state, within bounds."""

import weakref
from collections.abc import Callable

import msgspec
import pytest

from rollmesh.runtime.chat import ChatMessage, Turn
from rollmesh.runtime.conversation.shared_prefixes import (
    MAX_BYTES,
    MAX_PREFIX_BYTES,
    MAX_PREFIXES,
    SharedPrefix,
    SharedPrefixes,
)
from rollmesh.runtime.conversation.token_graph import RootKind
from rollmesh.runtime.session import SessionRecord
from rollmesh.runtime.tokens.prompts import Prompts
from rollmesh.runtime.tokens.tokenizer import Tokenizer
from rollmesh.testing.sampler import ScriptedSampler
from tests.unit.runtime.random_chats import RandomAgent
from tests.unit.runtime.session_calls import (
    MORE,
    SYSTEM,
    TOOLS,
    USER,
    Message,
    ReplyIds,
    assistant,
    call,
    open_session,
    turn,
)
from tests.unit.runtime.stored_chat import StoredChat
from tests.unit.runtime.stored_chat import turn as history_turn


def as_array(*messages: Message, tools: bytes = b"") -> Turn:
    raw = msgspec.json.encode(messages)
    return Turn(messages=[], messages_raw=raw, digest=hash((raw, tools)), tools=tools)


def two_in_one(raw: bytes, _: int) -> list[ChatMessage]:
    """Read a unit as two messages."""
    text = msgspec.json.decode(raw)["content"]
    return [ChatMessage("user", text), ChatMessage("assistant", "I see.")]


def of_pairs(*messages: Message) -> Turn:
    return msgspec.structs.replace(turn(*messages), read=two_in_one)


async def run_session(
    prompts: Prompts, reply_ids: ReplyIds, ask: Callable[..., Turn], shared_prefixes: SharedPrefixes
) -> tuple[SessionRecord, list[list[int]]]:
    """Send three requests, one of them twice; return the record and the prompts that were
    sampled.
    """
    sampler = ScriptedSampler(lambda _: reply_ids("4"))
    session = open_session(sampler, prompts, shared_prefixes=shared_prefixes)
    first = (SYSTEM, USER)
    for asked in (first, (*first, assistant("4"), MORE), first):
        await call(session, ask(*asked))
    session.seal("done")
    asked_ids = [list(request.prompt_ids) for request in sampler.requests]
    for ids, request in zip(asked_ids, sampler.requests, strict=True):
        assert msgspec.json.decode(b"[%b]" % bytes(request.prompt_json)) == ids
    return session.record(), asked_ids


@pytest.mark.parametrize(
    "ask",
    [
        turn,
        as_array,
        of_pairs,
        lambda *messages: turn(*messages, tools=TOOLS),
        lambda *messages: as_array(*messages, tools=TOOLS),
    ],
    ids=["units", "array", "pairs", "tools", "array with tools"],
)
async def test_a_session_with_a_shared_prefix_has_the_same_record(
    prompts: Prompts, reply_ids: ReplyIds, ask: Callable[..., Turn]
) -> None:
    shared_prefixes = SharedPrefixes()
    alone = await run_session(prompts, reply_ids, ask, shared_prefixes)
    assert shared_prefixes.find(ask(SYSTEM, USER)) is not None
    assert await run_session(prompts, reply_ids, ask, shared_prefixes) == alone


@pytest.mark.parametrize("seed", range(12))
async def test_a_shared_prefix_changes_no_later_turn(
    prompts: Prompts, tokenizer: Tokenizer, seed: int
) -> None:
    shared_prefixes, records = SharedPrefixes(), []
    for _ in range(3):
        agent = RandomAgent(prompts, tokenizer, seed, shared_prefixes)
        for _ in range(25):
            await agent.step()
        agent.session.seal("done")
        records.append(agent.session.record())
    assert records[0] == records[1] == records[2]


async def test_a_groups_first_prompt_is_rendered_once(
    prompts: Prompts, reply_ids: ReplyIds
) -> None:
    shared_prefixes, sampler = SharedPrefixes(), ScriptedSampler(lambda _: reply_ids("4"))
    for _ in range(3):
        await call(open_session(sampler, prompts, shared_prefixes=shared_prefixes), turn(USER))
    first, *others = [request.prompt_json for request in sampler.requests]
    assert all(other is first for other in others)


async def test_other_tools_or_another_parser_are_another_prefix(
    prompts: Prompts, reply_ids: ReplyIds
) -> None:
    shared_prefixes, sampler = SharedPrefixes(), ScriptedSampler(lambda _: reply_ids("4"))
    for asked in (turn(USER), turn(USER, tools=TOOLS), of_pairs(USER), turn(SYSTEM, USER)):
        await call(open_session(sampler, prompts, shared_prefixes=shared_prefixes), asked)
    assert len({bytes(request.prompt_json) for request in sampler.requests}) == 4


def test_the_images_of_a_shared_prefix_are_stored_too() -> None:
    address = "data:image/png;base64,iVBORw0KGgo="
    shown: Message = {
        "role": "user",
        "content": [{"type": "image_url", "image_url": {"url": address}}],
    }
    stored = StoredChat()
    match, context = stored.ask(history_turn(shown))
    other = StoredChat()
    other.history.begin(stored.history.line(match, context), 0)
    assert other.history.images == stored.history.images != {}
    assert other.history.match(history_turn(shown)).is_held


async def test_a_shared_prefix_retains_no_image_and_is_dropped_with_its_last_image() -> None:
    address = "data:image/png;base64," + "aW1hZ2Vz" * 70
    shown: Message = {
        "role": "user",
        "content": [{"type": "image_url", "image_url": {"url": address}}],
    }
    stored, asked, shared_prefixes = StoredChat(), history_turn(shown), SharedPrefixes()
    match, context = stored.ask(asked)
    line = stored.history.line(match, context)
    shared_prefixes.keep(asked, SharedPrefix(line, RootKind(0, 0), [1], b"1", tuple(line.images)))
    found = shared_prefixes.find(asked)
    assert found is not None
    assert (found.line, shared_prefixes.num_openings) == (line, 1)
    image = weakref.ref(next(iter(line.images.values())))
    del stored, match, context, line, found
    assert image() is None
    assert shared_prefixes.find(asked) is None
    assert (shared_prefixes.num_openings, shared_prefixes.num_bytes) == (0, 0)


async def test_shared_prefixes_are_bounded_in_bytes(prompts: Prompts, reply_ids: ReplyIds) -> None:
    shared_prefixes = SharedPrefixes()
    for n in range(2 * MAX_BYTES // MAX_PREFIX_BYTES):
        asked = turn({"role": "user", "content": f"{n} " + "a " * (MAX_PREFIX_BYTES // 20)})
        session = open_session(
            ScriptedSampler([reply_ids("4")]), prompts, 10**6, shared_prefixes=shared_prefixes
        )
        await call(session, asked)
        assert shared_prefixes.find(asked) is not None
        assert shared_prefixes.num_bytes <= MAX_BYTES
    assert shared_prefixes.num_bytes > 0.9 * MAX_BYTES


async def test_shared_prefixes_are_bounded_in_number_and_size(
    prompts: Prompts, reply_ids: ReplyIds
) -> None:
    shared_prefixes = SharedPrefixes()
    asked = [turn({"role": "user", "content": str(n)}) for n in range(MAX_PREFIXES + 1)]
    large = turn({"role": "user", "content": "a" * MAX_PREFIX_BYTES})
    for each in (*asked, large):
        sampler = ScriptedSampler([reply_ids("4")])
        session = open_session(sampler, prompts, 10**6, shared_prefixes=shared_prefixes)
        await call(session, each)
    assert [shared_prefixes.find(each) is None for each in (asked[0], asked[1], large)] == [
        True, False, True,
    ]  # fmt: skip


async def test_only_a_sessions_first_request_is_a_shared_prefix(
    prompts: Prompts, reply_ids: ReplyIds
) -> None:
    shared_prefixes = SharedPrefixes()
    session = open_session(
        ScriptedSampler(lambda _: reply_ids("4")), prompts, shared_prefixes=shared_prefixes
    )
    await call(session, turn(USER))
    await call(session, turn(SYSTEM, USER))
    assert shared_prefixes.find(turn(USER)) is not None
    assert shared_prefixes.find(turn(SYSTEM, USER)) is None
