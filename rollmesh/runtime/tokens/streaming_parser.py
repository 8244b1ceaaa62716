"""Streaming parser for families that frame reasoning and calls by marks of one token each.

    OPENING -- <think> --> REASONING -- </think> --> CONTENT <-- </tool_call> --> CALL
       `-- any text ---------------------------------^       --- <tool_call> -->
    REASONING -- <tool_call> --> DRAFT -- </think> --> CONTENT      any -- end of turn --> OVER

- Equal tokens give equal answers, however they are split. Text outside of reasoning and calls is
  content; neither has outer white space.
- A call inside of reasoning is reasoning if </think> follows, and else a call, so it is not
  streamed.
"""

import enum
from collections.abc import Sequence

import msgspec

from rollmesh.runtime.chat import CallDelta, Delta, ParsedReply, ParseOptions, ToolCall
from rollmesh.runtime.tokens.tokenizer import Tokenizer
from rollmesh.runtime.tokens.tool_calls import (
    CallParser,
    CallStyle,
    new_call,
    partial_match,
    string_parameters,
)


class Marks(msgspec.Struct, frozen=True):
    """Ids of the single tokens that frame reasoning and calls; None for a missing one."""

    think: int | None = None
    end_think: int | None = None
    tool_call: int | None = None
    end_tool_call: int | None = None
    stops: frozenset[int] = frozenset()
    """Ends of a turn; not text."""
    opens_in_reasoning: bool = False
    """The generation prompt ends with an open `<think>`."""
    style: CallStyle = CallStyle.JSON
    ids: frozenset[int] = frozenset()
    """All of them, derived from the others."""

    def __post_init__(self) -> None:
        own = (self.think, self.end_think, self.tool_call, self.end_tool_call)
        ids = self.stops.union(i for i in own if i is not None)
        msgspec.structs.force_setattr(self, "ids", ids)

    def without_calls(self) -> "Marks":
        """The marks with tool-call markup as text."""
        return msgspec.structs.replace(self, tool_call=None, end_tool_call=None)

    def ending_at(self, token_id: int | None) -> "Marks":
        """The marks with a reply that ends before this token."""
        stops = self.stops if token_id is None else self.stops | {token_id}
        return msgspec.structs.replace(self, stops=stops)


class ParserState(enum.Enum):
    """State of the parser, drawn above."""

    OPENING = "opening"
    REASONING = "reasoning"
    DRAFT = "draft"
    CONTENT = "content"
    CALL = "call"
    OVER = "over"


class StreamingParser:
    """Incremental parser of one reply; implements DeltaReader."""

    def __init__(self, tokenizer: Tokenizer, marks: Marks, options: ParseOptions) -> None:
        self._tokenizer = tokenizer
        self._marks = marks
        self._ids = marks.ids
        self._text = tokenizer.stream()
        self._stop = options.stop
        self._waiting = ""
        """A possible beginning of a stop string."""
        self._stage = ParserState.REASONING if marks.opens_in_reasoning else ParserState.OPENING
        self._num_tokens = 0
        self._draft: list[int] = []
        self._calls = _Calls(marks.style, options)
        self._reasoning = _Prose()
        self._content = _Prose()
        self._read(options.prefill)

    def feed(self, token_ids: Sequence[int]) -> Delta | None:
        self._num_tokens += len(token_ids)
        self._read(token_ids)
        # Content after a call waits for the end, so that a client's blocks keep their order.
        content = "" if self._calls.num_emitted else self._content.emit()
        delta = Delta(content, self._reasoning.emit(), self._calls.emit(), self._num_tokens)
        return delta if delta.content or delta.reasoning or delta.calls else None

    def end(self, num_tokens: int) -> Delta:
        if self._stage is ParserState.DRAFT:
            drafted, self._draft = self._draft, []
            self._stage = ParserState.CONTENT
            self._read(drafted)
        self._enter(ParserState.OVER)
        return Delta(self._content.emit(), self._reasoning.emit(), self._calls.emit(), num_tokens)

    def answer(self) -> ParsedReply:
        return ParsedReply(self._content.text(), self._reasoning.text(), self._calls.finished())

    def _read(self, token_ids: Sequence[int]) -> None:
        start, ids = 0, self._ids
        if not ids.isdisjoint(token_ids):
            for at in [n for n, token_id in enumerate(token_ids) if token_id in ids]:
                start = self._read_mark(token_ids, start, at)
        rest = token_ids[start:] if start else token_ids
        if self._stage is ParserState.DRAFT:
            self._draft += rest
        else:
            self._take(self._text.feed(rest))

    def _read_mark(self, token_ids: Sequence[int], start: int, at: int) -> int:
        """Parse the tokens before a mark, and the mark if there is one; return where to
        continue."""
        token_id = token_ids[at]
        if self._stage is ParserState.DRAFT:
            self._draft += token_ids[start:at]
            self._read_draft(token_id)
            return at + 1
        if self._stage_after(token_id) is None:
            return start
        self._take(self._text.feed(token_ids[start:at]))
        self._take(self._text.end())
        # The tokens before it may have changed the mark's meaning.
        stage = self._stage_after(token_id)
        if stage is None:
            return at
        self._enter(stage)
        if stage is ParserState.DRAFT:
            self._draft.append(token_id)
        return at + 1

    def _stage_after(self, token_id: int) -> ParserState | None:
        """The state that this token opens; None if it is text."""
        stage, marks = self._stage, self._marks
        if stage is ParserState.OVER:
            return None
        if token_id in marks.stops:
            return ParserState.OVER
        if stage is ParserState.REASONING:
            if token_id == marks.end_think:
                return ParserState.CONTENT
            if token_id == marks.think:
                return ParserState.REASONING  # already open: not text either
            return ParserState.DRAFT if token_id == marks.tool_call else None
        if stage is ParserState.CALL:
            return ParserState.CONTENT if token_id == marks.end_tool_call else None
        is_first = stage is ParserState.OPENING and not self._waiting.strip()
        if is_first and token_id == marks.think:
            return ParserState.REASONING
        return ParserState.CALL if token_id == marks.tool_call else None

    def _read_draft(self, token_id: int) -> None:
        """Keep tokens that may be a call, until that is decided."""
        marks = self._marks
        if token_id == marks.end_think:
            drafted, self._draft = self._draft, []
            self._stage = ParserState.REASONING
            self._take(self._tokenizer.decode([i for i in drafted if i != marks.think]))
            self._enter(ParserState.CONTENT)
        else:
            self._draft.append(token_id)

    def _enter(self, stage: ParserState) -> None:
        """Change the state: bytes and possible stop strings no longer wait."""
        self._take(self._text.end())
        self._switch(stage)

    def _switch(self, stage: ParserState) -> None:
        self._put(self._waiting)
        self._waiting = ""
        if self._stage is ParserState.CALL:
            self._content.push(self._calls.close(is_closed=stage is ParserState.CONTENT))
        if self._stage is not ParserState.OVER:
            self._stage = stage
            if stage is ParserState.CALL:
                self._calls.open()

    def _take(self, text: str) -> None:
        """Add text of the current state, up to a stop string."""
        if not text or self._stage is ParserState.OVER:
            return
        if self._stop:
            text = self._waiting + text
            cuts = [at for word in self._stop if (at := text.find(word)) >= 0]
            if cuts:
                self._waiting = text[: min(cuts)]
                self._switch(ParserState.OVER)
                return
            size = len(text) - partial_match(text, self._stop)
            text, self._waiting = text[:size], text[size:]
        self._put(text)

    def _put(self, text: str) -> None:
        if not text:
            return
        if self._stage is ParserState.REASONING:
            self._reasoning.push(text)
        elif self._stage is ParserState.CALL:
            self._calls.feed(text)
        elif self._stage is not ParserState.OVER:
            self._content.push(text)
            if not text.isspace():
                self._stage = ParserState.CONTENT


class _Prose:
    """Text without outer white space, emitted piece by piece."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._num_emitted = 0
        self._space = ""

    def push(self, text: str) -> None:
        text = self._space + text
        if not self._parts:
            text = text.lstrip()
        going = text.rstrip()
        if going:
            self._parts.append(going)
        self._space = text[len(going) :]

    def emit(self) -> str:
        """The text that was not emitted yet."""
        if self._num_emitted == len(self._parts):
            return ""
        piece = "".join(self._parts[self._num_emitted :])
        self._num_emitted = len(self._parts)
        return piece

    def text(self) -> str:
        return "".join(self._parts)


class _Calls:
    """The calls of one reply, and which of their pieces were emitted."""

    def __init__(self, style: CallStyle, options: ParseOptions) -> None:
        self.num_emitted = 0
        self._style = style
        self._reading = options
        self._reader: CallParser | None = None
        self._block: list[str] = []
        """The open block's text, while it is not known to be a call."""
        self._calls: list[tuple[str, list[str]]] = []
        """Name and arguments of each call."""
        self._deltas: list[CallDelta] = []

    def open(self) -> None:
        strings = string_parameters(self._reading.tools) if self._style is CallStyle.XML else {}
        self._reader = new_call(self._style, strings)
        self._block = []

    def feed(self, text: str) -> None:
        assert self._reader is not None
        was_known = bool(self._reader.name)
        self._block.append(text)
        self._add(was_known, self._reader.feed(text))

    def close(self, is_closed: bool) -> str:
        """End the open block; return its text if it was not a call."""
        reader = self._reader
        assert reader is not None
        was_known = bool(reader.name)
        self._add(was_known, reader.close() if is_closed else reader.cut())
        if reader.name:
            return ""
        return "".join(["<tool_call>", *self._block, "</tool_call>" if is_closed else ""])

    def emit(self) -> tuple[CallDelta, ...]:
        """The pieces that were not emitted yet."""
        if not self._deltas:
            return ()
        deltas, self._deltas = self._deltas, []
        self.num_emitted += len(deltas)
        return tuple(deltas)

    def finished(self) -> tuple[ToolCall, ...]:
        return tuple(
            ToolCall(self._id(n), name, "".join(arguments))
            for n, (name, arguments) in enumerate(self._calls)
        )

    def _add(self, was_known: bool, arguments: str) -> None:
        assert self._reader is not None
        if self._reader.name and not was_known:
            index = len(self._calls)
            self._calls.append((self._reader.name, [arguments]))
            self._deltas.append(CallDelta(index, self._id(index), self._reader.name, arguments))
        elif arguments:
            index = len(self._calls) - 1
            self._calls[index][1].append(arguments)
            self._deltas.append(CallDelta(index, arguments=arguments))

    def _id(self, index: int) -> str:
        return f"{self._reading.call_id_prefix}_{index}"
