"""The events of a relayed session, and how it is restored from them.

    Called             a call ended: its request and its answer
    DeliveryChanged    a reader of a whole answer left before its last byte (True), or not (False)
    Spent              a limit ended the session

- An event has the history from the first message that no earlier event has. Messages are numbered
  in order.
- A whole answer is written before its last byte is sent. It counts as delivered, unless an event
  says otherwise.
- Of a call that did not end in its process only the number is known, and it counts as cut.
"""

from collections.abc import Callable
from typing import Literal

import msgspec

from rollmesh.core.errors import SessionError
from rollmesh.runtime.session_log import DeliveryChanged, SessionEvent, Text
from rollmesh.serve.interception.pieces import Piece, cut
from rollmesh.serve.interception.relay.call import ANSWERED, Asked, CallState, Ended, RelayCall
from rollmesh.serve.interception.relay.threads import Request, Spot, Threads

Texts = tuple[Text, ...]


class AskedAgain(msgspec.Struct, frozen=True, array_like=True):
    """A request: its history behind the spot of this number, -1 for none, and the rest."""

    spot: int
    messages: tuple[Text, ...]
    settings: Text
    tools: Text
    system: Text
    fork: str


class Called(SessionEvent, frozen=True, tag="called"):
    """See the module."""

    number: int
    route: str
    key: str
    asked_s: float
    request: AskedAgain | None
    body: Texts
    """Of a request that could not be taken apart."""
    state: Literal["whole", "cut"]
    status: int
    lines: bytes
    answer: Text
    failure: tuple[int, str, str] | None


class Spent(SessionEvent, frozen=True, tag="spent"):
    """See the module."""

    because: str


RelayDeed = Called | DeliveryChanged | Spent

decode = msgspec.msgpack.Decoder(list[RelayDeed]).decode


class Namer:
    """How deeds of one session name its texts and spots."""

    def __init__(self, text: Callable[[bytes], Text], same: Callable[[bytes], Text]) -> None:
        """As Scribe.text and Scribe.same."""
        self._text = text
        self._same = same
        self.num_spots = 0
        """That have been told."""

    def called(self, call: RelayCall) -> Called:
        """The deed of a call that has ended."""
        asked, failure = call.asked, call.failure
        is_whole = call.state in ANSWERED
        return Called(
            asked.number,
            asked.route,
            asked.key,
            asked.asked_s,
            self._request(asked.request) if asked.request else None,
            tuple([self._text(whole(piece)) for piece in asked.body]),
            "whole" if is_whole else "cut",
            call.status,
            call.lines,
            self._text(call.body) if is_whole else b"",
            (failure.status, failure.code, str(failure)) if failure else None,
        )

    def _request(self, request: Request) -> AskedAgain:
        new: list[Spot] = []
        spot = request.spot
        while spot.number < 0 and spot.parent is not None:
            new.append(spot)
            spot = spot.parent
        for each in reversed(new):
            each.number, self.num_spots = self.num_spots, self.num_spots + 1
        messages = [self._text(b"".join(map(whole, each.pieces))) for each in reversed(new)]
        return AskedAgain(
            spot.number,
            tuple(messages),
            self._same(whole(request.settings)),
            self._same(whole(request.tools)),
            self._same(whole(request.system)),
            request.fork,
        )


class RelayPast:
    """What a session goes on from; `take` its deeds."""

    def __init__(self, read: Callable[[int], bytes], max_bytes: int) -> None:
        self.threads = Threads()
        self.calls: list[RelayCall] = []
        self.spent_because = ""
        self.num_spots = 0
        self._spots: list[Spot] = []
        self._read = read
        self._max_bytes = max_bytes

    def take(self, deed: RelayDeed) -> None:
        """Do one again."""
        match deed:
            case Called():
                self._call(deed)
            case DeliveryChanged(number, is_untaken):
                self.calls[number].is_delivered = not is_untaken
                self.calls[number].is_untaken = is_untaken
            case Spent(because):
                self.spent_because = because

    def _call(self, deed: Called) -> None:
        request = self._request(deed.request) if deed.request else None
        body: list[Piece] = [piece for text in deed.body for piece in cut(self._text(text))]
        asked = Asked(deed.number, deed.route, request, body, deed.key, deed.asked_s)
        failure = SessionError(*deed.failure) if deed.failure else None
        state, answer = CallState(deed.state), self._text(deed.answer)
        ended = Ended(state, deed.status, deed.lines, answer, failure)
        call = RelayCall(asked, self._max_bytes, lambda _: None, ended)
        while len(self.calls) <= deed.number:
            self.calls.append(_lost(len(self.calls), self._max_bytes))
        self.calls[deed.number] = call

    def _request(self, asked: AskedAgain) -> Request:
        spot = self._spots[asked.spot] if asked.spot >= 0 else self.threads.root
        rest = [self._text(text) for text in (asked.settings, asked.tools, asked.system)]
        messages = [self._text(text) for text in asked.messages]
        request, new = self.threads.hold_again(spot, messages, rest, asked.fork)
        for each in new:
            each.number = len(self._spots)
            self._spots.append(each)
        self.num_spots = len(self._spots)
        return request

    def _text(self, text: Text) -> bytes:
        return self._read(text) if isinstance(text, int) else text


def whole(piece: Piece) -> bytes:
    """A piece, read."""
    return piece if isinstance(piece, bytes) else piece.read()


def _lost(number: int, max_bytes: int) -> RelayCall:
    """A call that was running when its process ended."""
    failure = SessionError(503, "upstream_unavailable", "the gateway ended while it ran")
    asked = Asked(number, "", None, (), "", 0.0)
    return RelayCall(asked, max_bytes, lambda _: None, Ended(CallState.CUT, failure=failure))
