"""Parsers of sampled replies, chosen by model family.

    OPENING -- <think> --> REASONING -- </think> --> CONTENT <-- </tool_call> --> CALL
       `-- any text ---------------------------------^       --- <tool_call> -->
    REASONING -- <tool_call> --> DRAFT -- </think> --> CONTENT      any -- end of turn --> OVER

- Families with marks of one token each are parsed token by token, as drawn (StreamingParser). Equal
  tokens give equal answers, however they are split. A call inside of reasoning is reasoning if
  </think> follows, and else a call, so it is not streamed.
- Other families are parsed by the renderer library when the reply ends. If such a family opens its
  calls by one known token, reasoning and content before it are streamed (GLM, MiniMax); otherwise
  the stream has one piece (gpt-oss, DeepSeek, Kimi, Gemma, Llama and others).
- Raw prompts: plain text up to a stop string.
- Streamed pieces are never revoked. Tool calls that the library finds malformed are text.
"""

import enum
from collections.abc import Collection, Sequence

import msgspec

from rollmesh.runtime.chat import (
    CallDelta,
    Delta,
    DeltaReader,
    ParsedReply,
    ParseOptions,
    ToolCall,
    read_tools,
    whole_calls,
)
from rollmesh.runtime.tokens.families import Family, Parser
from rollmesh.runtime.tokens.tokenizer import Tokenizer
from rollmesh.runtime.tokens.tool_calls import (
    CallParser,
    CallStyle,
    arguments_text,
    call_opening,
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
            cuts = [at for stop_string in self._stop if (at := text.find(stop_string)) >= 0]
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


class PlainTextParser:
    """Parser of answers to raw prompts; implements DeltaReader."""

    def __init__(self, tokenizer: Tokenizer, ends: Collection[int], stop: tuple[str, ...]) -> None:
        self._text = tokenizer.stream()
        self._ends = ends
        self._stop = stop
        self._streaming: list[str] = []
        self._waiting = ""
        """A possible beginning of a stop string."""
        self._is_over = False
        self._num_tokens = 0

    def feed(self, token_ids: Sequence[int]) -> Delta | None:
        self._num_tokens += len(token_ids)
        piece = self._take(self._text.feed([i for i in token_ids if i not in self._ends]))
        return Delta(piece, num_tokens=self._num_tokens) if piece else None

    def end(self, num_tokens: int) -> Delta:
        piece = self._take(self._text.end())
        if not self._is_over:
            piece += self._waiting
            self._streaming.append(self._waiting)
            self._waiting = ""
        self._is_over = True
        return Delta(piece, num_tokens=num_tokens)

    def answer(self) -> ParsedReply:
        return ParsedReply("".join(self._streaming))

    def _take(self, text: str) -> str:
        if self._is_over:
            return ""
        text = self._waiting + text
        cuts = [at for stop_string in self._stop if (at := text.find(stop_string)) >= 0]
        size = min(cuts) if cuts else len(text) - partial_match(text, self._stop)
        self._is_over = bool(cuts)
        text, self._waiting = text[:size], text[size:]
        self._streaming.append(text)
        return text


class BatchParser:
    """Parser that parses a reply when it ends; implements DeltaReader."""

    def __init__(
        self,
        parser: Parser,
        tokenizer: Tokenizer,
        opening: list[int],
        options: ParseOptions,
        streamed: StreamingParser | None = None,
    ) -> None:
        """`opening` is the generation prompt; `streaming` parses what can be streamed before the
        end."""
        self._parser = parser
        self._tokenizer = tokenizer
        self._opening = [*opening, *options.prefill]
        self._reading = options
        self._streaming = streamed
        self._token_ids: list[int] = []
        self._answer = ParsedReply("")

    def feed(self, token_ids: Sequence[int]) -> Delta | None:
        """The piece that needs no parse; None if there is none."""
        self._token_ids.extend(token_ids)
        return self._streaming.feed(token_ids) if self._streaming else None

    def end(self, num_tokens: int) -> Delta:
        """The rest, which the library parses."""
        parsed = self._parse()
        streamed, last = ParsedReply(""), Delta()
        if self._streaming is not None:
            last, streamed = self._streaming.end(num_tokens), self._streaming.answer()
        content = _rest(parsed.content, streamed.content)
        reasoning = _rest(parsed.reasoning, streamed.reasoning)
        self._answer = ParsedReply(
            streamed.content + content, streamed.reasoning + reasoning, parsed.tool_calls
        )
        calls = whole_calls(parsed.tool_calls)
        return Delta(last.content + content, last.reasoning + reasoning, calls, num_tokens)

    def answer(self) -> ParsedReply:
        return self._answer

    def _parse(self) -> ParsedReply:
        options = self._reading
        parsed = self._parser.parse_response(
            self._token_ids,
            tools=read_tools(options.tools) if options.tools else None,
            prompt_ids=self._opening,
        )
        reasoning = str(parsed.reasoning_content or "").strip()
        if parsed.tool_calls and not options.reads_calls:
            stops = self._parser.get_stop_token_ids()
            ids = self._tokenizer.decode([i for i in self._token_ids if i not in stops])
            return ParsedReply(_before(options.stop, ids.strip()))
        calls: list[ToolCall] = []
        texts = [str(parsed.content)]
        for call in parsed.tool_calls or ():
            if str(call.status) == "ok":
                name = f"{options.call_id_prefix}_{len(calls)}"
                calls.append(ToolCall(name, str(call.name), arguments_text(call.arguments)))
            else:
                texts.append(str(call.raw))
        content = "\n".join(filter(None, texts)).strip()
        return ParsedReply(
            _before(options.stop, content), _before(options.stop, reasoning), tuple(calls)
        )


def _rest(whole: str, streamed: str) -> str:
    return whole[len(streamed) :] if whole.startswith(streamed) else ""


def _before(stops: tuple[str, ...], text: str) -> str:
    """`text` up to the first stop string in it."""
    cuts = [at for stop in stops if (at := text.find(stop)) >= 0]
    return text[: min(cuts)].rstrip() if cuts else text


_EMPTY_REASONING = "\n</think>\n\n"


class TurnFrame(msgspec.Struct, frozen=True):
    """The tokens around each sampled turn."""

    opening: list[int]
    """The generation prompt."""
    stops: tuple[int, ...]


class Parsers:
    """Creates the parsers of a process."""

    def __init__(self, family: Family, tokenizer: Tokenizer, turn: TurnFrame) -> None:
        self._family = family
        self._tokenizer = tokenizer
        self._opening = turn.opening
        self._marks = self._find_marks(turn)
        self._text_marks = self._marks.without_calls()
        opens_calls = tokenizer.convert_tokens_to_ids(family.call_opening)
        self._marks_before_calls = self._text_marks.ending_at(opens_calls)

    def new(self, options: ParseOptions) -> DeltaReader:
        """A parser for one reply."""
        style, tokenizer = self._family.style, self._tokenizer
        if isinstance(style, CallStyle):
            marks = self._marks if options.reads_calls else self._text_marks
            return StreamingParser(tokenizer, marks, options)
        if not self._family.call_opening:
            return BatchParser(style, tokenizer, self._opening, options)
        if not options.reads_calls:
            return StreamingParser(tokenizer, self._text_marks, options)
        streamed = StreamingParser(tokenizer, self._marks_before_calls, options)
        return BatchParser(style, tokenizer, self._opening, options, streamed)

    def answer(self, options: ParseOptions, token_ids: Sequence[int]) -> ParsedReply:
        """The answer of a finished reply, as its parser would return it; a reply without marks is
        decoded at once."""
        if (ids := self._all_content(options, token_ids)) is not None:
            return ParsedReply(self._tokenizer.decode(ids).strip())
        reader = self.new(options)
        reader.feed(token_ids)
        reader.end(len(token_ids))
        return reader.answer()

    def prefill(self, name: str | None) -> list[int]:
        """The tokens that close open reasoning and, if `name` is not None, begin a call; '' is any
        call."""
        style, marks = self._family.style, self._marks
        if not isinstance(style, CallStyle):
            return []
        text = _EMPTY_REASONING if marks.opens_in_reasoning else ""
        if name is not None and marks.tool_call is not None:
            text += "<tool_call>\n" + call_opening(style, name)
        return self._tokenizer.encode(text)

    def _all_content(self, options: ParseOptions, token_ids: Sequence[int]) -> Sequence[int] | None:
        """The reply without its end mark, if it is only content; else None."""
        marks = self._marks
        is_read_by_marks = isinstance(self._family.style, CallStyle)
        if not is_read_by_marks or marks.opens_in_reasoning or options.stop or options.prefill:
            return None
        ids = token_ids[:-1] if len(token_ids) and token_ids[-1] in marks.stops else token_ids
        return ids if marks.ids.isdisjoint(ids) else None

    @property
    def call_end_ids(self) -> tuple[int, ...]:
        """Ids that end a call."""
        end = self._marks.end_tool_call
        return (end,) if end is not None and isinstance(self._family.style, CallStyle) else ()

    def _find_marks(self, turn: TurnFrame) -> Marks:
        convert, style = self._tokenizer.convert_tokens_to_ids, self._family.style
        think, end_think = convert("<think>"), convert("</think>")
        in_reasoning = think in turn.opening and end_think not in turn.opening
        return Marks(
            think=think,
            end_think=end_think,
            tool_call=convert("<tool_call>"),
            end_tool_call=convert("</tool_call>"),
            stops=frozenset(turn.stops),
            opens_in_reasoning=think is not None and in_reasoning,
            style=style if isinstance(style, CallStyle) else CallStyle.JSON,
        )
