"""What the model says, as it comes: text, reasoning and tool calls cut out of a token stream.

Owns Answer (a finished reply) and Delta (a piece of one); every dialect encodes these. Invariant:
the deltas of a reply fold to its Answer: nothing is sent that the finished parse takes back, so
outer white space, possible beginnings of a stop string and tool-call blocks wait.

    OPENING ---- <think> ----> REASONING -- </think> --> CONTENT -- <tool_call> --> HELD
       `-- anything else -----> CONTENT                REASONING -- <tool_call> --> HELD

HELD text is sent at the end, from the finished parse. Driven by reply.py.
"""

import enum
from collections.abc import Sequence

import msgspec

from rollmesh.runtime.tokenizer import Tokenizer


class ToolCall(msgspec.Struct, frozen=True):
    """One call of a finished reply."""

    id: str
    name: str
    arguments: str
    """JSON text."""


class Answer(msgspec.Struct, frozen=True):
    """A finished reply, parsed."""

    content: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


class Delta(msgspec.Struct, frozen=True):
    """A piece of a reply; its tokens are those from the last delta's `num_tokens` on."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    num_tokens: int = 0
    """Tokens of the reply up to and with this piece."""


class Marks(msgspec.Struct, frozen=True):
    """Ids of the single tokens that frame reasoning and calls; None where there is none."""

    think: int | None = None
    end_think: int | None = None
    tool_call: int | None = None
    stops: frozenset[int] = frozenset()
    """Ends of a turn; no text."""
    opens_in_reasoning: bool = False
    """The generation prompt itself ends in an open `<think>`."""
    known: bool = True
    """False where the family frames its replies in another way: all of it waits for the end."""


class Stage(enum.Enum):
    """Where in a reply the stream is; drawn above."""

    OPENING = "opening"
    REASONING = "reasoning"
    CONTENT = "content"
    HELD = "held"


class DeltaReader:
    """Reads one generation's tokens; `feed` as they come, then `end` with the finished parse."""

    def __init__(
        self, tokenizer: Tokenizer, marks: Marks, stop: tuple[str, ...], reads_calls: bool
    ) -> None:
        self._marks = marks
        self._text = tokenizer.stream()
        self._stop = stop
        self._tool_call = marks.tool_call if reads_calls else None
        self._stage = Stage.REASONING if marks.opens_in_reasoning else Stage.OPENING
        self._stage = self._stage if marks.known else Stage.HELD
        self._frames = {marks.think, marks.end_think, self._tool_call, *marks.stops} - {None}
        self._num_tokens = 0
        self._waiting = ""
        self._sent: dict[Stage, list[str]] = {Stage.REASONING: [], Stage.CONTENT: []}

    def feed(self, token_ids: Sequence[int]) -> Delta | None:
        """The piece that `token_ids` complete; None while there is nothing to send.

        A frame ends a character that was left unfinished, as it does in the finished parse.
        """
        self._num_tokens += len(token_ids)
        if self._stage is Stage.HELD:
            return None
        reasoning, content = self._sent[Stage.REASONING], self._sent[Stage.CONTENT]
        num_before = len(reasoning), len(content)
        start = 0
        for at, token_id in enumerate(token_ids):
            if token_id in self._frames:
                self._take(self._text.feed(token_ids[start:at]))
                start = at
                if self._is_noise(token_id):
                    start += 1
                    continue
                self._take(self._text.end())
                stage = self._stage_after(token_id)
                if stage is not None:
                    self._enter(stage)
                    start += 1
        self._take(self._text.feed(token_ids[start:]))
        self._send(final=False)
        if (len(reasoning), len(content)) == num_before:
            return None
        return Delta(
            "".join(content[num_before[1] :]),
            "".join(reasoning[num_before[0] :]),
            num_tokens=self._num_tokens,
        )

    def end(self, answer: Answer, num_tokens: int) -> Delta:
        """What of `answer` was not sent yet."""
        return Delta(
            _rest(answer.content, "".join(self._sent[Stage.CONTENT])),
            _rest(answer.reasoning, "".join(self._sent[Stage.REASONING])),
            answer.tool_calls,
            num_tokens,
        )

    def _stage_after(self, token_id: int) -> Stage | None:
        """The stage that this token opens, or None."""
        stage, marks = self._stage, self._marks
        if stage is Stage.HELD:
            return None
        if token_id in marks.stops or token_id == self._tool_call:
            return Stage.HELD
        if stage is Stage.OPENING and token_id == marks.think:
            return Stage.REASONING
        if stage is Stage.REASONING and token_id == marks.end_think:
            return Stage.CONTENT
        return None

    def _is_noise(self, token_id: int) -> bool:
        """An opening of what is open already; the finished parse leaves it out too."""
        return self._stage is Stage.REASONING and token_id == self._marks.think

    def _enter(self, stage: Stage) -> None:
        self._send(final=True)
        self._waiting = ""
        self._stage = stage

    def _take(self, text: str) -> None:
        if self._stage is Stage.HELD:
            return
        self._waiting += text
        if self._stage is Stage.OPENING and self._waiting.strip():
            self._stage = Stage.CONTENT

    def _send(self, final: bool) -> None:
        """Move what may go from waiting to sent; outer white space of a stage never goes."""
        if not self._waiting or self._stage not in self._sent:
            return
        sent = self._sent[self._stage]
        text = self._waiting if sent else self._waiting.lstrip()
        going = text.rstrip()
        if self._stop and not final:
            going = going[: len(going) - _overlap(going, self._stop)].rstrip()
        if going:
            sent.append(going)
        self._waiting = text[len(going) :]


def _rest(whole: str, sent: str) -> str:
    return whole[len(sent) :] if whole.startswith(sent) else ""


def _overlap(text: str, stop: tuple[str, ...]) -> int:
    """Length of the tail from which a stop string may begin; all from a whole one on."""
    longest = 0
    for word in stop:
        at = text.find(word)
        if at >= 0:
            longest = max(longest, len(text) - at)
            continue
        for size in range(min(len(word) - 1, len(text)), longest, -1):
            if text.endswith(word[:size]):
                longest = size
                break
    return longest
