"""Read the kind of each relayed chat, by which runtime/token_graph.py finds the session's branches.

A kind is read from the request alone: its tools without cache markers, its system text (`system`,
`instructions`, leading system messages) without rotating lines, and the first message behind that.
"""

from collections.abc import Iterable
from typing import Any

import orjson

from rollmesh.core.types import Branch
from rollmesh.runtime.chat import ROLES, Rotating, settled
from rollmesh.runtime.token_graph import RootChat, RootKind, assign
from rollmesh.serve.interception.pieces import Piece, joined
from rollmesh.serve.interception.relay.call import CallState, RelayCall
from rollmesh.serve.interception.relay.threads import Request, Spot


def branches_of_calls(calls: Iterable[RelayCall], rotating: Rotating) -> dict[int, Branch]:
    """The branch of each call that got an answer and could be parsed, by its number."""
    kinds, chats = _Kinds(rotating), {}
    for call in calls:
        number, request = call.asked.number, call.asked.request
        if request is not None and call.state is CallState.WHOLE and call.status == 200:
            num_calls = 1 if _is_lone(request) else 2
            chats[number] = RootChat(kinds.of(request), number, number, num_calls)
    return assign(chats)


class _Kinds:
    """Reads kinds; values that many requests share are parsed once."""

    def __init__(self, rotating: Rotating) -> None:
        self._rotating = rotating
        self._parsed_pieces: dict[Piece, Any] = {}
        self._messages: dict[Spot, tuple[str, int]] = {}

    def of(self, request: Request) -> RootKind:
        """The kind of one request."""
        tools = self._parsed(request.tools)
        shown = b""
        if isinstance(tools, list) and tools:
            shown = orjson.dumps(_but_marker(tools), option=orjson.OPT_SORT_KEYS)
        settings = self._parsed(request.settings)
        instructions = settings.get("instructions") if isinstance(settings, dict) else None
        texts = [_text_of(self._parsed(request.system)), _text_of(instructions)]
        opening = 0
        for spot in _spots(request):
            text, opening = self._message(spot)
            if opening:
                break
            texts.append(text)
        system = "\n".join(texts)
        if self._rotating is not None:
            system = settled(system, self._rotating)
        system = system.strip()
        return RootKind(hash(shown) if shown else 0, hash(system) if system else 0, opening)

    def _message(self, spot: Spot) -> tuple[str, int]:
        """The text of a system message and 0, or '' and the hash of another message."""
        if spot not in self._messages:
            message = _parse(joined(spot.pieces))
            role = message.get("role") if isinstance(message, dict) else None
            if isinstance(role, str) and ROLES.get(role) == "system":
                self._messages[spot] = _text_of(message.get("content")), 0
            else:
                plain = orjson.dumps(_but_marker(message), option=orjson.OPT_SORT_KEYS)
                self._messages[spot] = "", hash(plain)
        return self._messages[spot]

    def _parsed(self, piece: Piece) -> Any:
        if piece not in self._parsed_pieces:
            self._parsed_pieces[piece] = _parse(joined([piece]))
        return self._parsed_pieces[piece]


def _spots(request: Request) -> list[Spot]:
    """The messages of a history, oldest first."""
    spots, spot = [], request.spot
    while spot.parent is not None:
        spots.append(spot)
        spot = spot.parent
    return spots[::-1]


def _is_lone(request: Request) -> bool:
    """No other request continues its chat, nor is continued by it."""
    spot = request.spot
    while (parent := spot.parent) is not None:
        if parent.asked is not None:
            return False
        spot = parent
    return not request.spot.is_continued


def _parse(raw: bytes) -> Any:
    try:
        return orjson.loads(raw) if raw else None
    except orjson.JSONDecodeError:
        return raw.decode(errors="backslashreplace")


def _but_marker(value: Any) -> Any:
    """A JSON value without cache markers, which agents move."""
    if isinstance(value, list):
        return [_but_marker(each) for each in value]
    if not isinstance(value, dict):
        return value
    return {key: _but_marker(each) for key, each in value.items() if key != "cache_control"}


def _text_of(content: Any) -> str:
    """The text of a message's content: a string, or a list of parts."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
    return "\n".join([text for text in texts if isinstance(text, str)])
