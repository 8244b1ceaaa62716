"""Replies of families whose frames the library renderers alone knows: read whole, at their end.

Invariant: nothing is told before the end, when the library has parsed all of the tokens, so their
streams come in one piece (gpt-oss, GLM, DeepSeek, Kimi, MiniMax, Gemma and Llama, among others).
Calls that the library finds malformed are text. Made by prompts.py.
"""

from collections.abc import Sequence

import msgspec

from rollmesh.runtime.calls import arguments_text
from rollmesh.runtime.deltas import Answer, Delta, Reading, ToolCall, whole_calls
from rollmesh.runtime.families import Parser
from rollmesh.runtime.tokenizer import Tokenizer
from rollmesh.runtime.turns import read_tools


class TurnFrame(msgspec.Struct, frozen=True):
    """What stands around each sampled turn."""

    opening: list[int]
    """The generation prompt."""
    stops: frozenset[int]


class ParsedReader:
    """Satisfies DeltaReader."""

    def __init__(
        self, parser: Parser, tokenizer: Tokenizer, turn: TurnFrame, reading: Reading
    ) -> None:
        self._parser = parser
        self._tokenizer = tokenizer
        self._stops = turn.stops
        self._opening = [*turn.opening, *reading.lead]
        self._reading = reading
        self._token_ids: list[int] = []
        self._answer = Answer("")

    def feed(self, token_ids: Sequence[int]) -> Delta | None:
        """None: the parse needs all tokens."""
        self._token_ids.extend(token_ids)
        return None

    def end(self, num_tokens: int) -> Delta:
        """All of it."""
        answer = self._answer = self._parse()
        return Delta(answer.content, answer.reasoning, whole_calls(answer.tool_calls), num_tokens)

    def answer(self) -> Answer:
        """The fold of all deltas; after `end`."""
        return self._answer

    def _parse(self) -> Answer:
        reading = self._reading
        parsed = self._parser.parse_response(
            self._token_ids,
            tools=read_tools(reading.tools) if reading.tools else None,
            prompt_ids=self._opening,
        )
        reasoning = str(parsed.reasoning_content or "").strip()
        if parsed.tool_calls and not reading.reads_calls:
            said = [i for i in self._token_ids if i not in self._stops]
            return Answer(_before(reading.stop, self._tokenizer.decode(said).strip()))
        calls: list[ToolCall] = []
        texts = [str(parsed.content)]
        for call in parsed.tool_calls or ():
            if str(call.status) == "ok":
                name = f"{reading.call_id_prefix}_{len(calls)}"
                calls.append(ToolCall(name, str(call.name), arguments_text(call.arguments)))
            else:
                texts.append(str(call.raw))
        content = "\n".join(filter(None, texts)).strip()
        return Answer(
            _before(reading.stop, content), _before(reading.stop, reasoning), tuple(calls)
        )


def _before(stops: tuple[str, ...], text: str) -> str:
    """`text` up to the first stop string in it."""
    cuts = [at for stop in stops if (at := text.find(stop)) >= 0]
    return text[: min(cuts)].rstrip() if cuts else text
