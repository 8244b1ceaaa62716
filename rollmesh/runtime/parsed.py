"""Replies of families whose frames the library renderers alone knows: parsed by it, at their end.

Where a family opens its calls by one known token, reasoning and content are told as they come, and
what stands from that token on waits (GLM, MiniMax); elsewhere all waits, so that such streams come
in one piece (gpt-oss, DeepSeek, Kimi, Gemma and Llama, among others). Invariant: the answer is the
library's, and what was told of it is a beginning of it; should the two differ after all, what was
told stands. Calls that the library finds malformed are text. Made by readers.py.
"""

from collections.abc import Sequence

from rollmesh.runtime.calls import arguments_text
from rollmesh.runtime.chat import read_tools
from rollmesh.runtime.deltas import Answer, Delta, Reading, ToolCall, whole_calls
from rollmesh.runtime.families import Parser
from rollmesh.runtime.marked import MarkedReader
from rollmesh.runtime.tokenizer import Tokenizer


class ParsedReader:
    """Satisfies DeltaReader."""

    def __init__(
        self,
        parser: Parser,
        tokenizer: Tokenizer,
        opening: list[int],
        reading: Reading,
        told: MarkedReader | None = None,
    ) -> None:
        """`opening` is the generation prompt; `told` reads what may be told before the end."""
        self._parser = parser
        self._tokenizer = tokenizer
        self._opening = [*opening, *reading.lead]
        self._reading = reading
        self._told = told
        self._token_ids: list[int] = []
        self._answer = Answer("")

    def feed(self, token_ids: Sequence[int]) -> Delta | None:
        """The piece that needs no parse; None while there is none."""
        self._token_ids.extend(token_ids)
        return self._told.feed(token_ids) if self._told else None

    def end(self, num_tokens: int) -> Delta:
        """The rest."""
        parsed = self._parse()
        told, last = Answer(""), Delta()
        if self._told is not None:
            last, told = self._told.end(num_tokens), self._told.answer()
        content = _rest(parsed.content, told.content)
        reasoning = _rest(parsed.reasoning, told.reasoning)
        self._answer = Answer(told.content + content, told.reasoning + reasoning, parsed.tool_calls)
        calls = whole_calls(parsed.tool_calls)
        return Delta(last.content + content, last.reasoning + reasoning, calls, num_tokens)

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
            stops = self._parser.get_stop_token_ids()
            said = self._tokenizer.decode([i for i in self._token_ids if i not in stops])
            return Answer(_before(reading.stop, said.strip()))
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


def _rest(whole: str, told: str) -> str:
    return whole[len(told) :] if whole.startswith(told) else ""


def _before(stops: tuple[str, ...], text: str) -> str:
    """`text` up to the first stop string in it."""
    cuts = [at for stop in stops if (at := text.find(stop)) >= 0]
    return text[: min(cuts)].rstrip() if cuts else text
