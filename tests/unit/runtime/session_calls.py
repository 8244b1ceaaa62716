"""A session, and the operations of an exchange on it without HTTP."""

from collections.abc import Callable, Sequence

import msgspec

from rollmesh.core.ids import GroupId, RolloutId
from rollmesh.core.types import SamplingPolicy
from rollmesh.runtime.chat import ParsedReply, Rotating, Turn
from rollmesh.runtime.conversation.shared_prefixes import SharedPrefixes
from rollmesh.runtime.replies import Reply
from rollmesh.runtime.restore import SessionReplay
from rollmesh.runtime.session import Session
from rollmesh.runtime.session_deps import RuntimeCounters, SessionDeps, SessionOptions
from rollmesh.runtime.session_log import EventWriter
from rollmesh.runtime.tokens.prompts import Prompts
from rollmesh.testing.sampler import ScriptedSampler
from tests.unit.runtime.list_event_writer import ListEventWriter

Message = dict[str, object]
ReplyIds = Callable[[str], Sequence[int]]

USER: Message = {"role": "user", "content": "guess"}
MORE: Message = {"role": "user", "content": "higher"}
SYSTEM: Message = {"role": "system", "content": "Be brief."}
TOOLS = b'[{"type":"function","function":{"name":"f"}}]'
TO_THE_END = 1 << 62


def assistant(content: str) -> Message:
    return {"role": "assistant", "content": content}


def turn(*messages: Message, is_retry: bool = False, tools: bytes = b"") -> Turn:
    raws = [msgspec.json.encode(message) for message in messages]
    return Turn(messages=raws, digest=hash((*raws, tools)), is_retry=is_retry, tools=tools)


def with_fields(asked: Turn, **fields: object) -> Turn:
    """Return a changed request; it is the same request only if only marked as a retry."""
    same = fields.keys() == {"is_retry"}
    digest = asked.digest if same else hash((asked.digest, repr(fields)))
    return msgspec.structs.replace(asked, digest=digest, **fields)


def open_session(
    sampler: ScriptedSampler,
    prompts: Prompts,
    max_context_tokens: int = 4096,
    sampling: SamplingPolicy | None = None,
    rotating: Rotating = None,
    shared_prefixes: SharedPrefixes | None = None,
    event_writer: EventWriter | None = None,
) -> Session:
    deps = SessionDeps(
        sampler,
        prompts,
        sampler.clock,
        max_context_tokens,
        RuntimeCounters(),
        shared_prefixes or SharedPrefixes(),
        rotating,
    )
    rollout_id = RolloutId(GroupId("r", 0), 0)
    return Session(
        SessionOptions("s1", rollout_id, sampling or SamplingPolicy(), 7, event_writer), deps
    )


def restored_session(before: Session, event_writer: ListEventWriter) -> Session:
    """Return the session as another process restores it, with the same event writer."""
    deps = msgspec.structs.replace(before._deps, shared_prefixes=SharedPrefixes())  # noqa: SLF001 - another process has its own
    ask = msgspec.structs.replace(before._options, event_writer=event_writer)  # noqa: SLF001 - likewise
    redo = SessionReplay(ask.session_id, deps, event_writer.read)
    for event in event_writer.events():
        redo.take(event)
    return Session(ask, deps, redo.restored())


async def call(session: Session, asked: Turn) -> tuple[Reply, ParsedReply]:
    """Run a turn of one choice up to its last byte."""
    ((reply, answer),) = await call_all(session, asked)
    return reply, answer


async def call_all(session: Session, asked: Turn) -> list[tuple[Reply, ParsedReply]]:
    """Run a turn up to the last byte of all its choices."""
    replies = await session.attach(asked)
    for reply in replies:
        reply.join()
    try:
        for reply in replies:
            await reply.wait(TO_THE_END)
        answers = [(reply, session.finish(reply)) for reply in replies]
        await session.recorder.written()
        for reply in replies:
            session.delivered(reply)
        return answers
    finally:
        for reply in replies:
            session.left(reply)


def trained(session: Session) -> list[tuple[int, bool, str]]:
    """Return (parent, superseded, finish reason) of the sampled rows; seals the session."""
    session.seal("done")
    rows = [row for row in session.record().nodes if row.sampled]
    return [(row.parent, row.superseded, row.finish_reason) for row in rows]
