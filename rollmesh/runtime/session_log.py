"""The events of a session, which are enough to restore it, token by token, in another process.

    attach --CallBegan--> ... --ChoiceEnded--> finish --written--> the last byte is sent
    a limit, an engine fault --FaultsChanged-->    a reply not delivered --DeliveryChanged-->

- Events refer to message nodes and graph nodes by number, so they are replayed in order, from the
  first.
- Tokens are those that the engine received and returned; nothing is rendered or tokenised again.
- Events are on disk when `written` returns, before the last byte of the reply is sent.
  DeliveryChanged and FaultsChanged delay no reply when the disk is full; they are written later.
"""

from array import array
from collections.abc import Iterable, Sequence
from typing import Literal, Protocol, get_args

import msgspec

from rollmesh.core.types import SamplingParams, VersionRun
from rollmesh.runtime.blobs import Blob
from rollmesh.runtime.chat import RequestedSampling, Turn
from rollmesh.runtime.conversation.conversation import Conversation, Prompt
from rollmesh.runtime.conversation.message_trie import (
    NO_NUMBER,
    Match,
    MessageNode,
    unit_key,
)
from rollmesh.runtime.conversation.shared_prefixes import UnitEnd
from rollmesh.runtime.conversation.token_graph import ROOT, Sampled
from rollmesh.runtime.images import ImageRef
from rollmesh.runtime.replies import VOID_FINISH, Reply, ReplyState, number_of

Text = bytes | int
"""A text, or the number under which a long one is stored."""


JournaledDialect = Literal["", "chat", "completions", "responses", "messages", "relay"]
"""Dialects that the journal's format has names for; others are journaled as ''."""
_JOURNALED_DIALECTS = frozenset(get_args(JournaledDialect))


class SessionEvent(msgspec.Struct, frozen=True, array_like=True, tag_field="kind"):
    """Something that happened in a session."""


class ImageShown(msgspec.Struct, frozen=True, array_like=True):
    """An image that appears in a session for the first time."""

    digest: str
    address: str | int
    """Its address, or the number under which the address is stored."""


class AliasAdded(msgspec.Struct, frozen=True, array_like=True):
    """A unit with new bytes and a known meaning, which leads from one node to another."""

    start: int
    key: int
    end: int


class NewMessages(msgspec.Struct, frozen=True, array_like=True, tag="chat"):
    """New messages after stored ones; nodes are given by number, -1 is the root of the tools."""

    message_node: int
    deepest: int
    is_held: bool
    messages: tuple[Text, ...] = ()
    ends: tuple[UnitEnd, ...] = ()
    ways: tuple[AliasAdded, ...] = ()
    images: tuple[ImageShown, ...] = ()
    healed: dict[str, int] = {}
    """Healed differences by kind."""
    cause: str = ""
    """Cause of a fork that was known without comparing the history."""


class NewRawText(msgspec.Struct, frozen=True, array_like=True, tag="raw"):
    """A raw prompt; its text follows the text of the answer that it continues."""

    text: Text | None


class RepeatedNode(msgspec.Struct, frozen=True, array_like=True, tag="again"):
    """The prompt that ends with a stored node, again; a raw prompt's is given by its node alone."""

    message_node: int
    node: int


class CallBegan(SessionEvent, frozen=True, tag="asked"):
    """A call began: the new part of its prompt, and the parameters of its choices."""

    call: int
    """Number of its first choice."""
    digest: int
    place: NewMessages | NewRawText | RepeatedNode
    parent: int
    """The node that its new tokens follow."""
    token_ids: bytes
    """Bytes of int32."""
    prefill: tuple[int, ...]
    tools: Text
    params: tuple[SamplingParams, ...]
    sampling: RequestedSampling
    created_s: int
    reads_calls: bool
    is_raw: bool
    dialect: JournaledDialect


class ChoiceEnded(SessionEvent, frozen=True, tag="answered"):
    """A choice ended, with an answer or `void`; a void one without tokens has no node."""

    call: int
    token_ids: bytes
    logprobs: bytes
    """Bytes of float32."""
    policy_versions: tuple[VersionRun, ...]
    engines: tuple[str, ...]
    finish_reason: str
    matched_stop: str | None = None
    top_logprobs: tuple[tuple[tuple[float, int], ...], ...] = ()


class DeliveryChanged(SessionEvent, frozen=True, tag="untaken"):
    """A reader left before the last byte of a choice (True), or it was sent after all (False)."""

    call: int
    is_undelivered: bool


class FaultsChanged(SessionEvent, frozen=True, tag="noted"):
    """Why the newest call has no answer ('' if it has one), and the limit that ended the
    session."""

    engine_fault: str
    spent_because: str


AnyEvent = CallBegan | ChoiceEnded | DeliveryChanged | FaultsChanged


class EventWriter(Protocol):
    """Writes the events of one session."""

    def check(self) -> None:
        """SessionError 503 or 507 while nothing more can be written."""

    def text(self, text: bytes | Blob) -> Text:
        """Store a text that may be long; return its form in an event."""

    def same(self, text: bytes) -> Text:
        """Store a text that many events repeat; return its form in an event."""

    def image(self, image: ImageRef) -> ImageShown | None:
        """The event part of an image; None if an earlier event has it."""

    def put(self, event: AnyEvent) -> None:
        """Queue an event for the next write."""

    def schedule_flush(self) -> None:
        """Request a write soon, without waiting for it."""

    async def written(self) -> None:
        """Wait until all queued events are written; SessionError 507 if the write fails."""


class PromptChanges:
    """Records the state before a prompt is stored, to find what that changed."""

    def __init__(self, event_writer: EventWriter, held: Conversation) -> None:
        self.event_writer = event_writer
        self.held = held
        self._healed = dict(held.fork_log.healed) if held.fork_log else {}
        """Counts before."""

    def healed(self) -> dict[str, int]:
        """Healed differences by kind."""
        now = self.held.fork_log.healed if self.held.fork_log else {}
        before = self._healed
        return {kind: n - before.get(kind, 0) for kind, n in now.items() if n != before.get(kind)}

    def shown(self, images: Iterable[ImageRef]) -> tuple[ImageShown, ...]:
        """The `images` that no event has yet."""
        changes = (self.event_writer.image(image) for image in images)
        return tuple([each for each in changes if each is not None])


def call_began(
    turn: Turn, prompt: Prompt, replies: Sequence[Reply], changes: PromptChanges
) -> CallBegan:
    """The event of a call whose `prompt` is stored."""
    head, source = replies[0].head, replies[0].source
    new_ids = (
        prompt.token_ids if prompt.line is None else changes.held.graph.ids_of(source.context.node)
    )
    return CallBegan(
        call=number_of(replies[0]),
        digest=source.digest,
        place=_place_of(turn, prompt, source.context, changes),
        parent=prompt.parent if prompt.line is None else ROOT,
        token_ids=_bytes_of("i", new_ids),
        prefill=source.prefill,
        tools=changes.event_writer.same(source.tools),
        params=tuple([reply.head.params for reply in replies]),
        sampling=head.sampling,
        created_s=head.created_s,
        reads_calls=head.reads_calls,
        is_raw=source.is_raw,
        dialect=head.dialect if head.dialect in _JOURNALED_DIALECTS else "",  # type: ignore[arg-type]
    )


def choice_ended(reply: Reply, sampled: Sampled) -> ChoiceEnded:
    """The event of a choice that has ended and is in the graph."""
    top = reply.top_logprobs()
    return ChoiceEnded(
        call=number_of(reply),
        token_ids=_bytes_of("i", sampled.token_ids),
        logprobs=_bytes_of("f", sampled.logprobs),
        policy_versions=sampled.policy_versions,
        engines=tuple(sampled.engines),
        finish_reason=sampled.finish_reason,
        matched_stop=reply.matched_stop,
        top_logprobs=tuple(top) if top else (),
    )


def _bytes_of(kind: Literal["i", "f"], values: Sequence[float]) -> bytes:
    """The bytes of values as int32 or float32, which most arrays are already."""
    return (values if isinstance(values, array) else array(kind, values)).tobytes()


def _place_of(
    turn: Turn, prompt: Prompt, context: MessageNode, changes: PromptChanges
) -> NewMessages | NewRawText | RepeatedNode:
    if prompt.line is not None:
        return NewMessages(
            NO_NUMBER,
            NO_NUMBER,
            is_held=False,
            messages=tuple([changes.event_writer.text(raw) for raw in prompt.line.raws]),
            ends=prompt.line.ends,
            images=changes.shown(prompt.line.images.values()),
        )
    if prompt.match is not None:
        return _chat_of(prompt, prompt.match, changes)
    if prompt.raw is None or prompt.parent == context.node:
        changes.held.history.catch_up()  # this gives the message_node its number
        return RepeatedNode(context.number, context.node)
    if turn.prompt_text is None:
        return NewRawText(None)
    return NewRawText(changes.event_writer.text(turn.prompt_text[prompt.raw.num_chars :].encode()))


def _chat_of(prompt: Prompt, match: Match, changes: PromptChanges) -> NewMessages:
    ways = [
        AliasAdded(alias.start.number, unit_key(alias.unit), alias.message_node.number)
        for alias in match.lookup.aliases
    ]
    images = [image for m in match.new if isinstance(m.content, list) for image in m.images()]
    return NewMessages(
        match.message_node.number,
        match.deepest.number,
        match.is_held,
        messages=tuple([changes.event_writer.text(raw) for raw in match.raws]),
        ends=() if match.is_held else match.unit_ends(),
        ways=tuple(ways),
        images=changes.shown(images),
        healed=changes.healed() if ways else {},
        cause=prompt.cause or "",
    )


class NullRecorder:
    """Recorder of a session that does not outlive its process."""

    __slots__ = ()

    def check(self) -> None:
        """SessionError 503 or 507 while no call may begin."""

    def before_prompt(self, held: Conversation) -> PromptChanges | None:
        """The state before a prompt is stored."""

    def call_began(
        self, turn: Turn, prompt: Prompt, replies: tuple[Reply, ...], changes: PromptChanges | None
    ) -> None:
        """A call has begun; `changes` is the state before."""

    def ended(self, reply: Reply, sampled: Sampled | None) -> None:
        """A choice has ended; None if it is void and nothing was sampled."""

    def faults_changed(self, engine_fault: str, spent_because: str) -> None:
        """The newest call has no answer, or a limit ended the session."""

    def left(self, reply: Reply) -> None:
        """A reader has left."""

    def delivered(self, reply: Reply) -> None:
        """The last byte was sent."""

    async def written(self) -> None:
        """Wait until all events are on disk; SessionError 507 if the write fails."""


NO_RECORDER = NullRecorder()


class EventRecorder(NullRecorder):
    """Recorder of a session with an event writer."""

    __slots__ = ("_event_writer",)

    def __init__(self, event_writer: EventWriter) -> None:
        self._event_writer = event_writer

    def check(self) -> None:
        self._event_writer.check()

    def before_prompt(self, held: Conversation) -> PromptChanges:
        return PromptChanges(self._event_writer, held)

    def call_began(
        self, turn: Turn, prompt: Prompt, replies: tuple[Reply, ...], changes: PromptChanges | None
    ) -> None:
        assert changes is not None
        self._event_writer.put(call_began(turn, prompt, replies, changes))

    def ended(self, reply: Reply, sampled: Sampled | None) -> None:
        if sampled is not None:
            self._event_writer.put(choice_ended(reply, sampled))
        else:
            number = number_of(reply)
            self._event_writer.put(ChoiceEnded(number, b"", b"", (), (), VOID_FINISH))

    def faults_changed(self, engine_fault: str, spent_because: str) -> None:
        self._event_writer.put(FaultsChanged(engine_fault, spent_because))
        self._event_writer.schedule_flush()

    def left(self, reply: Reply) -> None:
        if reply.state is ReplyState.COMMITTED and not reply.is_undelivered:
            self._mark(reply, is_undelivered=True)

    def delivered(self, reply: Reply) -> None:
        if reply.is_undelivered:
            self._mark(reply, is_undelivered=False)

    def _mark(self, reply: Reply, *, is_undelivered: bool) -> None:
        reply.is_undelivered = is_undelivered
        self._event_writer.put(DeliveryChanged(number_of(reply), is_undelivered))
        self._event_writer.schedule_flush()

    async def written(self) -> None:
        await self._event_writer.written()
