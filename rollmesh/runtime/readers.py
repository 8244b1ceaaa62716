"""Which reader a family's replies get, and what may stand before them.

Owns the family's marks as this tokenizer has them. Invariant: a reader that tells while tokens come
tells what the parse at the end would; what cannot be told so waits. A finished reply that is only
content, as most are, needs no reader. Driven by prompts.py.
"""

from collections.abc import Sequence

import msgspec

from rollmesh.runtime.calls import CallStyle, call_opening
from rollmesh.runtime.deltas import Answer, DeltaReader, Reading
from rollmesh.runtime.families import Family
from rollmesh.runtime.marked import MarkedReader, Marks
from rollmesh.runtime.parsed import ParsedReader
from rollmesh.runtime.tokenizer import Tokenizer

_EMPTY_REASONING = "\n</think>\n\n"


class TurnFrame(msgspec.Struct, frozen=True):
    """What stands around each sampled turn."""

    opening: list[int]
    """The generation prompt."""
    stops: tuple[int, ...]


class Readers:
    """One per process."""

    def __init__(self, family: Family, tokenizer: Tokenizer, turn: TurnFrame) -> None:
        self._family = family
        self._tokenizer = tokenizer
        self._opening = turn.opening
        self._marks = self._find_marks(turn)
        self._text_marks = self._marks.without_calls()
        opens_calls = tokenizer.convert_tokens_to_ids(family.call_opening)
        self._marks_before_calls = self._text_marks.ending_at(opens_calls)

    def new(self, reading: Reading) -> DeltaReader:
        """A reader for one reply."""
        style, tokenizer = self._family.style, self._tokenizer
        if isinstance(style, CallStyle):
            marks = self._marks if reading.reads_calls else self._text_marks
            return MarkedReader(tokenizer, marks, reading)
        if not self._family.call_opening:
            return ParsedReader(style, tokenizer, self._opening, reading)
        if not reading.reads_calls:
            return MarkedReader(tokenizer, self._text_marks, reading)
        told = MarkedReader(tokenizer, self._marks_before_calls, reading)
        return ParsedReader(style, tokenizer, self._opening, reading, told)

    def answer(self, reading: Reading, token_ids: Sequence[int]) -> Answer:
        """The fold of a finished reply's deltas; a reply without marks is looked up in one go."""
        if (said := self._all_content(reading, token_ids)) is not None:
            return Answer(self._tokenizer.decode(said).strip())
        reader = self.new(reading)
        reader.feed(token_ids)
        reader.end(len(token_ids))
        return reader.answer()

    def lead(self, name: str | None) -> list[int]:
        """The end of an open reasoning and, for a `name`, the beginning of a call; '' is any."""
        style, marks = self._family.style, self._marks
        if not isinstance(style, CallStyle):
            return []
        text = _EMPTY_REASONING if marks.opens_in_reasoning else ""
        if name is not None and marks.tool_call is not None:
            text += "<tool_call>\n" + call_opening(style, name)
        return self._tokenizer.encode(text)

    def _all_content(self, reading: Reading, token_ids: Sequence[int]) -> Sequence[int] | None:
        """The reply without the mark of its end, if it is nothing but content; else None."""
        marks = self._marks
        is_read_by_marks = isinstance(self._family.style, CallStyle)
        if not is_read_by_marks or marks.opens_in_reasoning or reading.stop or reading.lead:
            return None
        said = token_ids[:-1] if len(token_ids) and token_ids[-1] in marks.stops else token_ids
        return said if marks.ids.isdisjoint(said) else None

    @property
    def call_end_ids(self) -> tuple[int, ...]:
        """Ends of a call."""
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
