"""The events of a relayed session: how they are encoded, written, and replayed.

    CallCompleted         a call ended: its request and its answer
    DeliveryChanged    a reader of a whole answer left before its last byte (True), or not (False)
    LimitReached       a limit ended the session

- An event has the part of the history that no earlier event has; messages are numbered in order.
- A whole answer is written before its last byte is sent; it counts as delivered, unless a
  DeliveryChanged event follows.
- A call without an event did not end in its process, and counts as cut.
- Events are written before the next turn of the event loop. If that fails, the session is notified,
  and they are written again with the next event.
"""

from collections.abc import Callable
from typing import Literal

import msgspec

from rollmesh.core.errors import SessionError
from rollmesh.runtime.session_log import DeliveryChanged, SessionEvent, Text
from rollmesh.serve.interception.journal.gateway_journal import GatewayJournal
from rollmesh.serve.interception.journal.session_writer import SessionTexts
from rollmesh.serve.interception.journal.write_buffer import WriteBuffer
from rollmesh.serve.interception.pieces import Piece, cut
from rollmesh.serve.interception.relay.call import (
    ANSWERED,
    CallRequest,
    CallResult,
    ForwardState,
    RelayCall,
)
from rollmesh.serve.interception.relay.history import HistoryNode, HistoryStore, StoredRequest

Texts = tuple[Text, ...]


class RecordedRequest(msgspec.Struct, frozen=True, array_like=True):
    """A request: messages after a numbered node of the history, and the rest."""

    node: int
    """-1 for the root."""
    messages: tuple[Text, ...]
    settings: Text
    tools: Text
    system: Text
    fork: str


class CallCompleted(SessionEvent, frozen=True, tag="called"):
    """A call ended."""

    number: int
    route: str
    key: str
    asked_s: float
    request: RecordedRequest | None
    body: Texts
    """The body of a request that could not be parsed."""
    state: Literal["whole", "cut"]
    status: int
    lines: bytes
    answer: Text
    failure: tuple[int, str, str] | None


class LimitReached(SessionEvent, frozen=True, tag="spent"):
    """A limit ended the session."""

    because: str


RelayEvent = CallCompleted | DeliveryChanged | LimitReached

decode = msgspec.msgpack.Decoder(list[RelayEvent]).decode


class RelayEventEncoder:
    """Encodes the calls of one session; messages that an earlier event has are given by number."""

    def __init__(self, text: Callable[[bytes], Text], same: Callable[[bytes], Text]) -> None:
        """`text` stores a text for an event, `same` one that many events repeat."""
        self._text = text
        self._same = same
        self.num_nodes = 0
        """Number of nodes in the events so far."""

    def call_ended(self, call: RelayCall) -> CallCompleted:
        """The event of a call that has ended."""
        request, failure = call.request, call.failure
        is_whole = call.state in ANSWERED
        return CallCompleted(
            request.number,
            request.route,
            request.key,
            request.asked_s,
            self._request(request.stored) if request.stored else None,
            tuple([self._text(whole(piece)) for piece in request.body]),
            "whole" if is_whole else "cut",
            call.status,
            call.lines,
            self._text(call.body) if is_whole else b"",
            (failure.status, failure.code, str(failure)) if failure else None,
        )

    def _request(self, request: StoredRequest) -> RecordedRequest:
        new: list[HistoryNode] = []
        node = request.node
        while node.number < 0 and node.parent is not None:
            new.append(node)
            node = node.parent
        for each in reversed(new):
            each.number, self.num_nodes = self.num_nodes, self.num_nodes + 1
        messages = [self._text(b"".join(map(whole, each.pieces))) for each in reversed(new)]
        return RecordedRequest(
            node.number,
            tuple(messages),
            self._same(whole(request.settings)),
            self._same(whole(request.tools)),
            self._same(whole(request.system)),
            request.fork,
        )


class RelayReplay:
    """The state of a session, rebuilt from its events."""

    def __init__(self, read: Callable[[int], bytes], max_bytes: int) -> None:
        self.history = HistoryStore()
        self.calls: list[RelayCall] = []
        self.spent_because = ""
        self.num_nodes = 0
        self._nodes: list[HistoryNode] = []
        self._read = read
        self._max_bytes = max_bytes

    def take(self, event: RelayEvent) -> None:
        """Apply one event."""
        match event:
            case CallCompleted():
                self._call(event)
            case DeliveryChanged(number, is_undelivered):
                self.calls[number].is_delivered = not is_undelivered
                self.calls[number].is_undelivered = is_undelivered
            case LimitReached(because):
                self.spent_because = because

    def _call(self, event: CallCompleted) -> None:
        stored = self._request(event.request) if event.request else None
        body: list[Piece] = [piece for text in event.body for piece in cut(self._text(text))]
        request = CallRequest(event.number, event.route, stored, body, event.key, event.asked_s)
        failure = SessionError(*event.failure) if event.failure else None
        state, answer = ForwardState(event.state), self._text(event.answer)
        ended = CallResult(state, event.status, event.lines, answer, failure)
        call = RelayCall(request, self._max_bytes, lambda _: None, ended)
        while len(self.calls) <= event.number:
            self.calls.append(_lost(len(self.calls), self._max_bytes))
        self.calls[event.number] = call

    def _request(self, recorded: RecordedRequest) -> StoredRequest:
        node = self._nodes[recorded.node] if recorded.node >= 0 else self.history.root
        rest = [self._text(text) for text in (recorded.settings, recorded.tools, recorded.system)]
        messages = [self._text(text) for text in recorded.messages]
        request, new = self.history.restore(node, messages, rest, recorded.fork)
        for each in new:
            each.number = len(self._nodes)
            self._nodes.append(each)
        self.num_nodes = len(self._nodes)
        return request

    def _text(self, text: Text) -> bytes:
        return self._read(text) if isinstance(text, int) else text


def whole(piece: Piece) -> bytes:
    """The bytes of a piece."""
    return piece if isinstance(piece, bytes) else piece.read()


def _lost(number: int, max_bytes: int) -> RelayCall:
    """A call that was running when its process ended."""
    failure = SessionError(503, "upstream_unavailable", "the gateway ended while it ran")
    request = CallRequest(number, "", None, (), "", 0.0)
    result = CallResult(ForwardState.CUT, failure=failure)
    return RelayCall(request, max_bytes, lambda _: None, result)


class RelayEventWriter(WriteBuffer):
    """Writes the events of one session to the gateway's journal."""

    __slots__ = ("_journal", "encoder", "on_written")

    def __init__(self, journal: GatewayJournal, session_id: str) -> None:
        super().__init__(session_id, journal.flush_queue)
        texts = SessionTexts(journal, session_id)
        self.encoder = RelayEventEncoder(texts.text, texts.same)
        self.on_written: Callable[[SessionError | None], None] | None = None
        """Called after each attempt to write, with its failure."""
        self._journal = journal

    def check(self) -> None:
        """SessionError 503 or 507 while no new call may begin."""
        self._journal.check()

    def ended(self, call: RelayCall) -> None:
        """Write the event of a call that has ended."""
        self.write_event(self.encoder.call_ended(call))

    def write_event(self, event: RelayEvent) -> None:
        """Queue an event to be written."""
        self.put(event)
        self.schedule_flush()

    def write(self) -> None:
        """Write the queued events now."""
        self._journal.flush_queue.flush()

    def flushed(self, failure: SessionError | None) -> None:
        super().flushed(failure)
        if self.on_written is not None:
            self.on_written(failure)
