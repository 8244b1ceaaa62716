"""OpenAI's Responses API, as it is answered: responses and events.

    created in_progress (output_item.added part.added delta* done part.done output_item.done)*
        completed | incomplete | failed

Invariant: every event has its type, its name and the next sequence number; the response's id is the
same throughout; items come one after the other, and those of the last event are the plain answer's.
Driven by exchange.py through dialect.py; responses.py reads the requests.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import orjson

from rollmesh.core.errors import SessionError
from rollmesh.runtime.chat import CallDelta, Delta, ToolCall, Turn
from rollmesh.serve.interception.dialects.blocks import Said, Thought, blocks_of, parts_of
from rollmesh.serve.interception.dialects.dialect import Stream
from rollmesh.serve.interception.dialects.frames import named_event
from rollmesh.serve.interception.dialects.response_items import (
    Echo,
    Item,
    call_item,
    final_status,
    list_tokens,
    message_item,
    reasoning_item,
    response,
    text_part,
)
from rollmesh.serve.interception.reply_view import ReplyView

_REASONING, _MESSAGE, _CALL = "reasoning", "message", "function_call"
_DELTA = {
    _REASONING: (b"response.reasoning_summary_text.delta", b'"summary_index":0'),
    _MESSAGE: (b"response.output_text.delta", b'"content_index":0,"logprobs":[]'),
    _CALL: (b"response.function_call_arguments.delta", b""),
}


class ResponseCall:
    """Satisfies Call."""

    def __init__(self, turn: Turn, echo: Echo) -> None:
        self.turns: tuple[Turn, ...] = (turn,)
        self.is_streamed = turn.stream
        self._echo = echo

    def whole(self, views: Sequence[ReplyView]) -> bytes:
        (view,) = views
        output, status = list[Item](), final_status(view)
        blocks = blocks_of(view)
        for n, block in enumerate(blocks):
            is_whole = status == "completed" or n + 1 < len(blocks)
            output.append(self._item(view, n, block, is_whole))
        list_tokens(view, output)
        return orjson.dumps(response(view, self._echo, status, output))

    def _item(
        self, view: ReplyView, index: int, block: Thought | Said | ToolCall, is_whole: bool
    ) -> Item:
        match block:
            case Thought(text):
                return reasoning_item(view, self._echo, index, text)
            case Said(text):
                return message_item(view, index, text, is_whole)
            case ToolCall():
                return call_item(view, index, block, "completed")

    def stream(self, views: Sequence[ReplyView]) -> Stream:
        return ResponseStream(views[0], self._echo)


class ResponseStream:
    """Satisfies Stream."""

    def __init__(self, view: ReplyView, echo: Echo) -> None:
        self._view = view
        self._echo = echo
        self._sequence = 0
        self._output: list[Item] = []
        """Items that are done."""
        self._kind = ""
        """Of the item that is open; none at first."""
        self._texts: list[str] = []
        """What was said of it."""
        self._call: CallDelta | None = None
        """The first piece of the newest call."""

    def piece(self, choice: int, delta: Delta) -> bytes:
        return b"".join(self._events(delta))

    def end(self, choice: int, delta: Delta) -> bytes:
        status = final_status(self._view)
        events = [*self._events(delta), *self._close(is_whole=status == "completed")]
        list_tokens(self._view, self._output)
        whole = response(self._view, self._echo, status, self._output)
        return b"".join([*events, self._event(f"response.{status}", response=whole)])

    def close(self) -> bytes:
        return b""

    def error(self, error: SessionError) -> bytes:
        whole = response(self._view, self._echo, "in_progress", self._output)
        whole |= {"status": "failed", "error": {"code": error.code, "message": str(error)}}
        told = {"code": error.code, "message": str(error), "param": None}
        return self._event("error", **told) + self._event("response.failed", response=whole)

    def _events(self, delta: Delta) -> Iterator[bytes]:
        if self._sequence == 0:
            opened = response(self._view, self._echo, "in_progress", [])
            yield self._event("response.created", response=opened)
            yield self._event("response.in_progress", response=opened)
        for part in parts_of(delta, self._call is not None):
            match part:
                case Thought(text):
                    yield from self._enter(_REASONING)
                    yield self._delta(text)
                case Said(text):
                    yield from self._enter(_MESSAGE)
                    yield self._delta(text)
                case CallDelta():
                    yield from self._piece_of_call(part)

    def _piece_of_call(self, piece: CallDelta) -> Iterator[bytes]:
        if self._call is None or self._call.index != piece.index:
            yield from self._close()
            self._call = piece
            yield from self._enter(_CALL)
        if piece.arguments:
            yield self._delta(piece.arguments)

    def _enter(self, kind: str) -> Iterator[bytes]:
        """Open an item of this kind, unless it is open."""
        if self._kind == kind:
            return
        yield from self._close()
        self._kind, self._texts = kind, []
        item = self._item(None, is_whole=False)
        index = len(self._output)
        yield self._event("response.output_item.added", output_index=index, item=item)
        if kind == _REASONING:
            part = {"type": "summary_text", "text": ""}
            yield self._of_item("response.reasoning_summary_part.added", summary_index=0, part=part)
        elif kind == _MESSAGE:
            part = text_part("")
            yield self._of_item("response.content_part.added", content_index=0, part=part)

    def _close(self, is_whole: bool = True) -> Iterator[bytes]:
        """Close the item that is open, if one is."""
        if not self._kind:
            return
        text = "".join(self._texts)
        item = self._item(text, is_whole)
        if self._kind == _REASONING:
            (part,), of = item["summary"], {"summary_index": 0}
            yield self._of_item("response.reasoning_summary_text.done", text=text, **of)
            yield self._of_item("response.reasoning_summary_part.done", part=part, **of)
        elif self._kind == _MESSAGE:
            (part,), of = item["content"], {"content_index": 0}
            yield self._of_item("response.output_text.done", text=text, logprobs=[], **of)
            yield self._of_item("response.content_part.done", part=part, **of)
        else:
            name = item["name"]
            yield self._of_item("response.function_call_arguments.done", name=name, arguments=text)
        index = len(self._output)
        yield self._event("response.output_item.done", output_index=index, item=item)
        self._output.append(item)
        self._kind = ""

    def _item(self, text: str | None, is_whole: bool) -> Item:
        """The open item; `text` once it is done."""
        index = len(self._output)
        if self._kind == _REASONING:
            return reasoning_item(self._view, self._echo, index, text)
        if self._kind == _MESSAGE:
            return message_item(self._view, index, text, is_whole)
        assert self._call is not None
        call = ToolCall(self._call.id, self._call.name, text or "")
        status = "in_progress" if text is None else "completed"
        return call_item(self._view, index, call, status)

    def _delta(self, text: str) -> bytes:
        self._texts.append(text)
        kind, more = _DELTA[self._kind]
        index = len(self._output)
        item_id = self._item(None, is_whole=False)["id"].encode()
        sequence, self._sequence = self._sequence, self._sequence + 1
        return (
            b'event: %b\ndata: {"type":"%b","sequence_number":%d,"output_index":%d,'
            b'"item_id":"%b","delta":%b%b%b}\n\n'
        ) % (kind, kind, sequence, index, item_id, orjson.dumps(text), b"," if more else b"", more)

    def _of_item(self, kind: str, **fields: Any) -> bytes:
        item_id = self._item(None, is_whole=False)["id"]
        return self._event(kind, output_index=len(self._output), item_id=item_id, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        sequence, self._sequence = self._sequence, self._sequence + 1
        return named_event({"type": kind, "sequence_number": sequence, **fields})
