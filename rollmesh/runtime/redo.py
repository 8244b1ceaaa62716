"""A session made again from its deeds, as it was when the last of them was written.

    deeds --Redo.take, in their order--> ... --past--> what a Session goes on from

Owns the doing again of each deed (deeds.py), by the same holdings, history and reply table that did
it first, so that what follows is what would have followed. Invariants: tokens come from the deeds
alone; an answer that was written counts as delivered, since its client may have seen it, unless a
deed says that nobody took it; a call whose choices were not all written is as if it had not been
answered: its request, sent again, is a call anew after the same tokens. Driven by scopes.py.
"""

from array import array
from collections.abc import Callable
from typing import assert_never

import msgspec

from rollmesh.runtime.answers import Answers
from rollmesh.runtime.chat import read_held
from rollmesh.runtime.deeds import (
    Again,
    Answered,
    AnyDeed,
    Asked,
    Chat,
    Noted,
    Raw,
    Scribe,
    Text,
    Untaken,
)
from rollmesh.runtime.doors import Locks
from rollmesh.runtime.forks import ForkCause, ForkLog
from rollmesh.runtime.graph import Sampled
from rollmesh.runtime.history import tools_key_of
from rollmesh.runtime.holdings import Holdings, Prompt, shared_tools
from rollmesh.runtime.images import ImageRef, images
from rollmesh.runtime.kit import SessionKit
from rollmesh.runtime.match import Match, read_chat
from rollmesh.runtime.openings import SAME_BYTES
from rollmesh.runtime.raw_prompts import RawPrompt
from rollmesh.runtime.reply import VOID_FINISH, Reply, ReplyHead, ReplySource, ReplyState, number_of
from rollmesh.runtime.reply_table import ReplyTable
from rollmesh.runtime.sampled import fall_back
from rollmesh.runtime.spot import NO_NODE, NO_NUMBER, Spot
from rollmesh.runtime.walk import Walk


class Past(msgspec.Struct):
    """What a session goes on from."""

    held: Holdings
    answers: Answers
    replies: ReplyTable
    num_calls: int = 0
    min_policy_version: int = -1
    num_fell_back: int = 0
    engine_fault: str = ""
    spent_because: str = ""


class KeptSession(msgspec.Struct, frozen=True):
    """A session that outlives its process."""

    session_id: str
    scribe: Scribe
    locks: Locks | None = None
    """Of the secrets that lead to it already."""
    past: Past | None = None


class Redo:
    """One per session; `take` its deeds, then ask for its `past`."""

    def __init__(self, session_id: str, kit: SessionKit, read: Callable[[int], bytes]) -> None:
        """`read` gives the text that is kept under a number."""
        self._past = Past(
            Holdings(kit.prompts, kit.rotating),
            Answers(session_id, kit.prompts),
            ReplyTable(),
        )
        self._spots = self._past.held.history.regain()
        self._raw: dict[int, tuple[Spot, str | None]] = {}
        """Raw prompts by their nodes, with their texts where they came as text."""
        self._of_node: dict[int, Reply] = {}
        self._calls: dict[int, tuple[Reply, ...]] = {}
        """All choices of a request, by the number of each; those that may still change."""
        self._older: dict[int, set[int]] = {}
        """Nodes that the delivery of these replies has superseded, by who they are."""
        self._read = read
        self._prompts = kit.prompts

    def take(self, deed: AnyDeed) -> None:
        """Do one again."""
        match deed:
            case Asked():
                self._ask(deed)
            case Answered():
                self._answer(deed)
            case Untaken():
                self._take_back(deed)
            case Noted():
                self._past.engine_fault = deed.engine_fault
                self._past.spent_because = deed.spent_because
            case _:
                assert_never(deed)

    def past(self) -> Past:
        """After the last: calls that nobody has answered yet will not be."""
        for replies in list(self._past.replies.all()):
            if any(reply.node == NO_NODE for reply in replies):
                self._withdraw(replies)
        return self._past

    # a call

    def _ask(self, deed: Asked) -> None:
        past, held = self._past, self._past.held
        tools = shared_tools(self._text(deed.tools)) if deed.tools != b"" else b""
        prompt, text = self._prompt(deed, tools)
        context = held.hold(prompt, deed.call)
        if deed.is_raw:
            self._raw[context.node] = context, text
        source = ReplySource(
            context,
            held.lead_to(context.node, deed.lead),
            deed.lead,
            tools,
            deed.is_raw,
            text,
            deed.digest,
        )
        replies = tuple([self._reply(deed, source, choice) for choice in range(len(deed.params))])
        past.replies.put_again(deed.digest, replies)
        self._calls |= {deed.call + choice: replies for choice in range(len(replies))}
        past.num_calls = max(past.num_calls, deed.call + len(replies))

    def _reply(self, deed: Asked, source: ReplySource, choice: int) -> Reply:
        past = self._past
        head = ReplyHead(
            id=past.answers.begin(),
            created_s=deed.created_s,
            num_prompt_tokens=past.held.graph.depth_of(source.node),
            reads_calls=deed.reads_calls,
            params=deed.params[choice],
            index=choice,
            ask=deed.ask,
            dialect=deed.dialect,
            min_policy_version=past.min_policy_version,
        )
        return Reply(head, source, None, past.held.graph)

    def _prompt(self, deed: Asked, tools: bytes) -> tuple[Prompt, str | None]:
        """What was held for a call, and the raw prompt as text, if it came as text."""
        token_ids = array("i")
        token_ids.frombytes(deed.token_ids)
        place = deed.place
        if isinstance(place, Chat):
            match = self._match(place, tools_key_of(tools))
            cause = ForkCause(place.cause) if place.cause else None
            return Prompt(match, deed.parent, token_ids, cause), None
        if isinstance(place, Again):
            spot = self._spot_again(place)
            return self._past.held.again(spot), self._raw[spot.node][1] if deed.is_raw else None
        text = self._whole_text(place, deed.parent)
        key = hash(text) if text is not None else hash(self._ids_to(deed.parent, token_ids))
        raw = RawPrompt(key, deed.parent, token_ids)
        return Prompt(None, deed.parent, token_ids, raw=raw), text

    def _match(self, place: Chat, tools_key: int) -> Match:
        history = self._past.held.history
        history.catch_up()
        root = history.roots.get(tools_key) or Spot(None, b"")
        for way in place.ways:
            history.add_way(self._spot(way.start, root), way.key, self._spot(way.end, root))
        if place.healed:
            log = self._past.held.fork_log = self._past.held.fork_log or ForkLog()
            for kind, number in place.healed.items():
                log.healed[kind] = log.healed.get(kind, 0) + number
        shown = {**history.images}
        for each in place.images:
            shown[each.digest] = self._image(each.digest, each.address)
        raws = [self._text(text) for text in place.messages]
        spot, ends, at = self._spot(place.spot, root), [], 0
        for key, end in place.ends:
            ends.append((hash(raws[at]) if key == SAME_BYTES else key, end))
            at = end
        walk = Walk(spot, read_chat, history.rotating, None)
        new = [read_held(raw, shown) for raw in raws]
        deepest = self._spot(place.deepest, root)
        return Match(spot, deepest, tools_key, walk, new, raws, ends)

    # its end

    def _answer(self, deed: Answered) -> None:
        past, graph = self._past, self._past.held.graph
        replies = self._calls[deed.call]
        reply = next(each for each in replies if number_of(each) == deed.call)
        is_void = deed.finish_reason == VOID_FINISH
        reply.state = ReplyState.VOID if is_void else ReplyState.COMMITTED
        if deed.token_ids or not is_void:
            token_ids, logprobs = array("i"), array("f")
            token_ids.frombytes(deed.token_ids)
            logprobs.frombytes(deed.logprobs)
            sampled = Sampled(
                token_ids,
                logprobs,
                deed.policy_versions,
                reply.head.params,
                deed.finish_reason,
                deed.engines,
                reply.head.dialect,
            )
            node = graph.add_sampled(reply.source.node, sampled)
            reply.settle(node, deed.matched_stop, deed.top_logprobs)
            self._of_node[reply.node] = reply
            answer = past.answers.read(reply)
            past.held.hold_answer(reply.source, answer, reply.node, is_void)
            last, num_falls = fall_back(deed.policy_versions, reply.head.min_policy_version)
            past.num_fell_back += num_falls
            past.min_policy_version = last if num_falls else max(past.min_policy_version, last)
        if is_void:
            self._withdraw(replies)
            return
        past.answers.put(reply)
        past.engine_fault = ""
        if all(each.node != NO_NODE for each in replies):
            for each in replies:
                self._deliver(each, replies)

    def _take_back(self, deed: Untaken) -> None:
        replies = self._calls[deed.call]
        reply = next(each for each in replies if number_of(each) == deed.call)
        if reply.state is ReplyState.VOID:
            return
        reply.is_untaken = deed.is_untaken
        if not deed.is_untaken:
            self._deliver(reply, replies)
        elif reply.state is ReplyState.DELIVERED:
            reply.state = ReplyState.COMMITTED
            older = self._older.pop(id(replies), set())
            self._past.replies.take_back(reply, older)
            self._supersede(older, is_so=False)

    def _deliver(self, reply: Reply, replies: tuple[Reply, ...]) -> None:
        older = set(self._past.replies.delivered(reply))
        self._older.setdefault(id(replies), set()).update(older)
        self._supersede(older, is_so=True)

    def _supersede(self, nodes: set[int], *, is_so: bool) -> None:
        for node in nodes:
            self._past.held.graph.nodes[node].superseded = is_so

    def _withdraw(self, replies: tuple[Reply, ...]) -> None:
        """The choices of a request stand or fall together."""
        past = self._past
        if past.replies.newest(replies[0].source.digest) is replies:
            past.replies.pop(replies[0].source.digest)
        for reply in replies:
            if reply.state is not ReplyState.VOID and reply.node != NO_NODE:
                past.held.graph.nodes[reply.node].finish_reason = VOID_FINISH
            reply.state = ReplyState.VOID

    # what deeds name

    def _spot(self, number: int, root: Spot) -> Spot:
        return root if number == NO_NUMBER else self._spots[number]

    def _spot_again(self, place: Again) -> Spot:
        self._past.held.history.catch_up()
        if place.spot == NO_NUMBER:
            return self._raw[place.node][0]
        return self._spots[place.spot]

    def _text(self, text: Text) -> bytes:
        return self._read(text) if isinstance(text, int) else text

    def _image(self, digest: str, address: str | int) -> ImageRef:
        if isinstance(address, str):
            return images.regain(digest, address)
        return images.regain(digest, self._read(address))

    def _whole_text(self, place: Raw, parent: int) -> str | None:
        if place.text is None:
            return None
        rest = self._text(place.text).decode()
        if parent == NO_NODE:
            return rest
        answer = self._of_node[parent]
        said = self._prompts.text(answer.token_ids())
        return (answer.source.prompt_text or "") + said + rest

    def _ids_to(self, parent: int, token_ids: "array[int]") -> tuple[int, ...]:
        return (*self._past.held.graph.path_ids(parent), *token_ids)
