"""Restore a session from its events.

    events --SessionReplay.take, in order--> ... --restored--> a Session that continues

- Events are applied by the code that applied them first (conversation, history, reply table).
- Tokens come from the events alone. A reply that was written counts as delivered, since its client
  may have read it, unless a DeliveryChanged event says otherwise.
- A call of which not all choices were written has no reply: its request, sent again, is a new call.
"""

from array import array
from collections.abc import Callable
from typing import assert_never

import msgspec

from rollmesh.runtime.chat import read_held
from rollmesh.runtime.conversation.conversation import (
    Conversation,
    Prompt,
    RawPrompt,
    shared_tools,
)
from rollmesh.runtime.conversation.forks import ForkCause, ForkLog
from rollmesh.runtime.conversation.history import tools_key_of
from rollmesh.runtime.conversation.message_trie import (
    NO_NODE,
    NO_NUMBER,
    Lookup,
    Match,
    MessageNode,
    read_chat,
)
from rollmesh.runtime.conversation.shared_prefixes import SAME_BYTES
from rollmesh.runtime.conversation.token_graph import Sampled
from rollmesh.runtime.generation.events import fall_back
from rollmesh.runtime.images import ImageRef, images
from rollmesh.runtime.replies import (
    VOID_FINISH,
    AnswerIndex,
    Reply,
    ReplyHead,
    ReplySource,
    ReplyState,
    ReplyTable,
    number_of,
)
from rollmesh.runtime.session_deps import KeyDigests, SessionDeps
from rollmesh.runtime.session_log import (
    AnyEvent,
    CallBegan,
    ChoiceEnded,
    DeliveryChanged,
    EventWriter,
    FaultsChanged,
    NewMessages,
    NewRawText,
    RepeatedNode,
    Text,
)


class RestoredState(msgspec.Struct):
    """The state from which a session continues."""

    held: Conversation
    answers: AnswerIndex
    replies: ReplyTable
    num_calls: int = 0
    min_policy_version: int = -1
    num_fell_back: int = 0
    engine_fault: str = ""
    spent_because: str = ""


class StoredSession(msgspec.Struct, frozen=True):
    """A session that outlives its process."""

    session_id: str
    event_writer: EventWriter
    locks: KeyDigests | None = None
    """Digests of the secrets that open it already."""
    restored: RestoredState | None = None


class SessionReplay:
    """Rebuilds one session: `take` its events, then read `restored`."""

    def __init__(self, session_id: str, deps: SessionDeps, read: Callable[[int], bytes]) -> None:
        """`read` returns the text that is stored under a number."""
        self._restored = RestoredState(
            Conversation(deps.prompts, deps.rotating),
            AnswerIndex(session_id, deps.prompts),
            ReplyTable(),
        )
        self._message_nodes = self._restored.held.history.restore()
        self._raw: dict[int, tuple[MessageNode, str | None]] = {}
        """Raw prompts by node, with their text if they were sent as text."""
        self._of_node: dict[int, Reply] = {}
        self._calls: dict[int, tuple[Reply, ...]] = {}
        """All choices of a request, by the number of each, while they may change."""
        self._older: dict[int, set[int]] = {}
        """Nodes that the delivery of these replies has superseded, by the replies' keys."""
        self._read = read
        self._prompts = deps.prompts

    def take(self, event: AnyEvent) -> None:
        """Apply one event."""
        match event:
            case CallBegan():
                self._ask(event)
            case ChoiceEnded():
                self._answer(event)
            case DeliveryChanged():
                self._take_back(event)
            case FaultsChanged():
                self._restored.engine_fault = event.engine_fault
                self._restored.spent_because = event.spent_because
            case _:
                assert_never(event)

    def restored(self) -> RestoredState:
        """The restored state, after the last event; unanswered calls stay unanswered."""
        for replies in list(self._restored.replies.all()):
            if any(reply.node == NO_NODE for reply in replies):
                self._withdraw(replies)
        return self._restored

    # a call

    def _ask(self, event: CallBegan) -> None:
        restored, held = self._restored, self._restored.held
        tools = shared_tools(self._text(event.tools)) if event.tools != b"" else b""
        prompt, text = self._prompt(event, tools)
        context = held.hold(prompt, event.call)
        if event.is_raw:
            self._raw[context.node] = context, text
        source = ReplySource(
            context,
            held.prefill_node(context.node, event.prefill),
            event.prefill,
            tools,
            event.is_raw,
            text,
            event.digest,
        )
        replies = tuple([self._reply(event, source, choice) for choice in range(len(event.params))])
        restored.replies.put_again(event.digest, replies)
        self._calls |= {event.call + choice: replies for choice in range(len(replies))}
        restored.num_calls = max(restored.num_calls, event.call + len(replies))

    def _reply(self, event: CallBegan, source: ReplySource, choice: int) -> Reply:
        restored = self._restored
        head = ReplyHead(
            id=restored.answers.begin(),
            created_s=event.created_s,
            num_prompt_tokens=restored.held.graph.depth_of(source.node),
            reads_calls=event.reads_calls,
            params=event.params[choice],
            index=choice,
            sampling=event.sampling,
            dialect=event.dialect,
            min_policy_version=restored.min_policy_version,
        )
        return Reply(head, source, None, restored.held.graph)

    def _prompt(self, event: CallBegan, tools: bytes) -> tuple[Prompt, str | None]:
        """The stored prompt of a call, and its raw prompt, if that was sent as text."""
        token_ids = array("i")
        token_ids.frombytes(event.token_ids)
        place = event.place
        if isinstance(place, NewMessages):
            match = self._match(place, tools_key_of(tools))
            cause = ForkCause(place.cause) if place.cause else None
            return Prompt(match, event.parent, token_ids, cause), None
        if isinstance(place, RepeatedNode):
            message_node = self._node_again(place)
            return self._restored.held.again(message_node), self._raw[message_node.node][
                1
            ] if event.is_raw else None
        text = self._whole_text(place, event.parent)
        key = hash(text) if text is not None else hash(self._ids_to(event.parent, token_ids))
        raw = RawPrompt(key, event.parent, token_ids)
        return Prompt(None, event.parent, token_ids, raw=raw), text

    def _match(self, place: NewMessages, tools_key: int) -> Match:
        history = self._restored.held.history
        history.catch_up()
        root = history.roots.get(tools_key) or MessageNode(None, b"")
        for way in place.ways:
            history.add_way(
                self._message_node(way.start, root), way.key, self._message_node(way.end, root)
            )
        if place.healed:
            log = self._restored.held.fork_log = self._restored.held.fork_log or ForkLog()
            for kind, number in place.healed.items():
                log.healed[kind] = log.healed.get(kind, 0) + number
        shown = {**history.images}
        for each in place.images:
            shown[each.digest] = self._image(each.digest, each.address)
        raws = [self._text(text) for text in place.messages]
        message_node, ends, at = self._message_node(place.message_node, root), [], 0
        for key, end in place.ends:
            ends.append((hash(raws[at]) if key == SAME_BYTES else key, end))
            at = end
        lookup = Lookup(message_node, read_chat, history.rotating, None)
        new = [read_held(raw, shown) for raw in raws]
        deepest = self._message_node(place.deepest, root)
        return Match(message_node, deepest, tools_key, lookup, new, raws, ends)

    # the end of a call

    def _answer(self, event: ChoiceEnded) -> None:
        restored, graph = self._restored, self._restored.held.graph
        replies = self._calls[event.call]
        reply = next(each for each in replies if number_of(each) == event.call)
        is_void = event.finish_reason == VOID_FINISH
        reply.state = ReplyState.VOID if is_void else ReplyState.COMMITTED
        if event.token_ids or not is_void:
            token_ids, logprobs = array("i"), array("f")
            token_ids.frombytes(event.token_ids)
            logprobs.frombytes(event.logprobs)
            sampled = Sampled(
                token_ids,
                logprobs,
                event.policy_versions,
                reply.head.params,
                event.finish_reason,
                event.engines,
                reply.head.dialect,
            )
            node = graph.add_sampled(reply.source.node, sampled)
            reply.settle(node, event.matched_stop, event.top_logprobs)
            self._of_node[reply.node] = reply
            answer = restored.answers.read(reply)
            restored.held.hold_answer(reply.source, answer, reply.node, is_void)
            last, num_falls = fall_back(event.policy_versions, reply.head.min_policy_version)
            restored.num_fell_back += num_falls
            restored.min_policy_version = (
                last if num_falls else max(restored.min_policy_version, last)
            )
        if is_void:
            self._withdraw(replies)
            return
        restored.answers.put(reply)
        restored.engine_fault = ""
        if all(each.node != NO_NODE for each in replies):
            for each in replies:
                self._deliver(each, replies)

    def _take_back(self, event: DeliveryChanged) -> None:
        replies = self._calls[event.call]
        reply = next(each for each in replies if number_of(each) == event.call)
        if reply.state is ReplyState.VOID:
            return
        reply.is_undelivered = event.is_undelivered
        if not event.is_undelivered:
            self._deliver(reply, replies)
        elif reply.state is ReplyState.DELIVERED:
            reply.state = ReplyState.COMMITTED
            older = self._older.pop(id(replies), set())
            self._restored.replies.take_back(reply, older)
            self._supersede(older, is_so=False)

    def _deliver(self, reply: Reply, replies: tuple[Reply, ...]) -> None:
        older = set(self._restored.replies.delivered(reply))
        self._older.setdefault(id(replies), set()).update(older)
        self._supersede(older, is_so=True)

    def _supersede(self, nodes: set[int], *, is_so: bool) -> None:
        for node in nodes:
            self._restored.held.graph.nodes[node].superseded = is_so

    def _withdraw(self, replies: tuple[Reply, ...]) -> None:
        """Void all choices of a request, which are valid only together."""
        restored = self._restored
        if restored.replies.newest(replies[0].source.digest) is replies:
            restored.replies.pop(replies[0].source.digest)
        for reply in replies:
            if reply.state is not ReplyState.VOID and reply.node != NO_NODE:
                restored.held.graph.nodes[reply.node].finish_reason = VOID_FINISH
            reply.state = ReplyState.VOID

    # lookups by number

    def _message_node(self, number: int, root: MessageNode) -> MessageNode:
        return root if number == NO_NUMBER else self._message_nodes[number]

    def _node_again(self, place: RepeatedNode) -> MessageNode:
        self._restored.held.history.catch_up()
        if place.message_node == NO_NUMBER:
            return self._raw[place.node][0]
        return self._message_nodes[place.message_node]

    def _text(self, text: Text) -> bytes:
        return self._read(text) if isinstance(text, int) else text

    def _image(self, digest: str, address: str | int) -> ImageRef:
        if isinstance(address, str):
            return images.restore(digest, address)
        return images.restore(digest, self._read(address))

    def _whole_text(self, place: NewRawText, parent: int) -> str | None:
        if place.text is None:
            return None
        rest = self._text(place.text).decode()
        if parent == NO_NODE:
            return rest
        answer = self._of_node[parent]
        sampled_text = self._prompts.text(answer.token_ids())
        return (answer.source.prompt_text or "") + sampled_text + rest

    def _ids_to(self, parent: int, token_ids: "array[int]") -> tuple[int, ...]:
        return (*self._restored.held.graph.path_ids(parent), *token_ids)
