"""Parsers of sampled replies, chosen by model family.

- Families with marks of one token: streaming_parser.py. Raw prompts: plain text up to a stop
  string.
- Other families are parsed by the renderer library when the reply ends. If such a family opens its
  calls by one known token, reasoning and content before it are streamed (GLM, MiniMax); otherwise
  the stream has one piece (gpt-oss, DeepSeek, Kimi, Gemma, Llama and others).
- Streamed pieces are never revoked. Tool calls that the library finds malformed are text.
"""

from collections.abc import Collection, Sequence

import msgspec

from rollmesh.runtime.chat import (
    Delta,
    DeltaReader,
    ParsedReply,
    ParseOptions,
    ToolCall,
    read_tools,
    whole_calls,
)
from rollmesh.runtime.tokens.families import Family, Parser
from rollmesh.runtime.tokens.streaming_parser import Marks, StreamingParser
from rollmesh.runtime.tokens.tokenizer import Tokenizer
from rollmesh.runtime.tokens.tool_calls import (
    CallStyle,
    arguments_text,
    call_opening,
    partial_match,
)


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
        cuts = [at for word in self._stop if (at := text.find(word)) >= 0]
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
