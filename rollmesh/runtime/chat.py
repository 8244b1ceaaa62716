"""Chat messages, the turn that a call asks for, and the pieces of an answer.

All dialects decode requests to these types and encode answers from them.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

import msgspec
import orjson

from rollmesh.core.errors import DECODE_ERRORS, ConfigError, SessionError
from rollmesh.core.memo import Memo
from rollmesh.core.types import DialectName, Grammar
from rollmesh.runtime.images import ImageRef, hold_image


class ToolCall(msgspec.Struct, frozen=True):
    """One call of a finished reply."""

    id: str
    name: str
    arguments: str
    """JSON text as the model wrote it; cut short where the reply was."""


class Answer(msgspec.Struct, frozen=True):
    """A finished reply, parsed."""

    content: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


class CallDelta(msgspec.Struct, frozen=True):
    """A piece of one call; `id` and `name` stand in a call's first piece only."""

    index: int
    """Of the call in its reply."""
    id: str = ""
    name: str = ""
    arguments: str = ""
    """The next piece of the arguments' JSON text."""


class Delta(msgspec.Struct, frozen=True):
    """A piece of a reply; its tokens are those from the last delta's `num_tokens` on."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[CallDelta, ...] = ()
    num_tokens: int = 0
    """Tokens of the reply up to and with this piece."""


class Reading(msgspec.Struct, frozen=True):
    """How one reply is to be read."""

    stop: tuple[str, ...] = ()
    """Text ends before the first of them."""
    reads_calls: bool = False
    """Whether tool-call markup is a call, not text."""
    call_id_prefix: str = "call"
    """Calls get ids `<prefix>_0`, `_1`..."""
    lead: tuple[int, ...] = ()
    """What stands between the generation prompt and the sampled tokens (Prompts.lead)."""
    tools: bytes = b""
    """A JSON array in chat shape: XML arguments are read by their declared types."""


class DeltaReader(Protocol):
    """Reads one generation's tokens: `feed` as they come, then `end`, then `answer`."""

    def feed(self, token_ids: Sequence[int]) -> Delta | None:
        """The piece that `token_ids` complete; None while there is nothing to tell."""

    def end(self, num_tokens: int) -> Delta:
        """The rest, when no more tokens will come; `num_tokens` is the reply's length."""

    def answer(self) -> Answer:
        """The fold of all deltas; after `end`."""


def whole_calls(calls: Sequence[ToolCall]) -> tuple[CallDelta, ...]:
    """Finished calls as deltas of one piece each."""
    return tuple(CallDelta(n, c.id, c.name, c.arguments) for n, c in enumerate(calls))


ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}

Rotating = re.Pattern[str] | None
"""Matches lines of a system text that change from call to call and mean nothing."""


class Part(msgspec.Struct, omit_defaults=True):
    """One element of a content list."""

    type: str = ""
    text: str | None = None
    refusal: str | None = None
    """What an assistant says instead of a text."""
    image_url: Any = None
    """As the client sends an image; replaced by `image` when read."""
    image: ImageRef | None = msgspec.field(default=None, name="rollmesh_image")
    """Of a message that `as_json` wrote; clients cannot set it."""

    def said(self) -> str | None:
        """Its text; None where it is something else, such as an image."""
        return self.refusal if self.text is None else self.text


class Function(msgspec.Struct):
    """What a tool call names."""

    name: str = ""
    arguments: Any = None
    """A JSON text, or the object itself."""


class Call(msgspec.Struct, omit_defaults=True):
    """A tool call in an assistant message."""

    function: Function = msgspec.field(default_factory=Function)
    id: str | None = None

    def parsed_arguments(self) -> Any:
        """The arguments as JSON values; a text that is no JSON stays a text."""
        arguments = self.function.arguments
        if not isinstance(arguments, str):
            return {} if arguments is None else arguments
        try:
            return orjson.loads(arguments)
        except orjson.JSONDecodeError:
            return arguments


class ChatMessage(msgspec.Struct, omit_defaults=True):
    """A message as read from its JSON."""

    role: str
    content: str | list[Part | str] | None = None
    reasoning_content: Any = None
    tool_calls: list[Call] | None = None
    tool_call_id: str | None = None

    def text(self) -> str:
        """The content as one string; parts are joined without a separator."""
        if isinstance(self.content, list):
            return "".join([p if isinstance(p, str) else p.said() or "" for p in self.content])
        return self.content or ""

    def images(self) -> list[ImageRef]:
        """The images that it shows, in order."""
        if not isinstance(self.content, list):
            return []
        return [p.image for p in self.content if isinstance(p, Part) and p.image is not None]

    def meanings(self, rotating: Rotating = None, is_ours: bool = True) -> list[int]:
        """Identities by meaning, strongest first; one match is enough.

        An assistant message is known by its tool-call ids, then by text, reasoning and parsed
        arguments, then without the reasoning, since many agents drop it, then by the calls alone.
        One that is not ours, but of the agent's making, is not known by ids, which agents use
        again, nor by the calls alone: nothing but what it says would be what the model saw.
        """
        if self.role != "assistant":
            return [hash((ROLES[self.role], self._shown(rotating), self.tool_call_id))]
        text = normalised(self.text())
        told = self.tool_calls or ()
        calls = tuple([(c.function.name, canonical(c.parsed_arguments())) for c in told])
        keys = [hash(("text", text, calls))]
        if self.reasoning_content:
            reasoning = str(self.reasoning_content).strip()
            keys.insert(0, hash(("reasoned", reasoning, text, calls)))
        if self.tool_calls and is_ours:
            ids = tuple(c.id for c in self.tool_calls)
            if all(ids):
                keys.insert(0, hash(("ids", ids)))
            keys.append(hash(("calls", calls)))
        return keys

    @property
    def is_text_of_assistant(self) -> bool:
        """Whether it is nothing but what the assistant says, as what is seen of a cut answer is."""
        return self.role == "assistant" and not self.tool_calls and bool(self.text().strip())

    def joined(self, other: "ChatMessage") -> "ChatMessage":
        """Such a message and the assistant's next one as one."""
        thoughts = [str(m.reasoning_content) for m in (self, other) if m.reasoning_content]
        text, reasoning = self.text() + other.text(), "\n".join(thoughts) or None
        return ChatMessage("assistant", text, reasoning, other.tool_calls)

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates take it: text content, arguments as objects."""
        if self.images():
            why = "this model reads text only, and a message shows an image"
            raise SessionError(400, "unsupported_content", why)
        message: dict[str, Any] = {"role": ROLES[self.role], "content": self.text()}
        if self.role == "assistant":
            if isinstance(self.reasoning_content, str) and self.reasoning_content:
                message["reasoning_content"] = self.reasoning_content
            if self.tool_calls:
                message["tool_calls"] = [_call_for_template(call) for call in self.tool_calls]
        elif self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message

    def as_json(self) -> bytes:
        """The message in the common shape, images by their digest alone."""
        if not self.images():
            return msgspec.json.encode(self)
        assert isinstance(self.content, list)
        parts = [
            msgspec.structs.replace(p, image=ImageRef(p.image.digest))
            if isinstance(p, Part) and p.image is not None
            else p
            for p in self.content
        ]
        return msgspec.json.encode(msgspec.structs.replace(self, content=parts))

    def _shown(self, rotating: Rotating) -> str:
        """What it says and shows, without what may come and go."""
        is_system = ROLES[self.role] == "system"
        if not isinstance(self.content, list):
            text = self.content or ""
            return (settled(text, rotating) if is_system and rotating else text).strip()
        shown = []
        for part in self.content:
            text = (part if isinstance(part, str) else part.said()) or ""
            shown.append(settled(text, rotating) if is_system and rotating else text)
            if isinstance(part, Part) and part.image is not None:
                shown.append(f"\0{part.image.digest}\0")
        return "".join(shown).strip()


_decoder = msgspec.json.Decoder(ChatMessage)


def read_message(raw: bytes, position: int) -> ChatMessage:
    """Parse one message; SessionError 400 names its position and what is wrong."""
    try:
        message = _decoder.decode(raw)
    except DECODE_ERRORS as error:
        raise _bad_message(position, str(error)) from None
    if message.role not in ROLES:
        raise _bad_message(position, f"unknown role {message.role!r}")
    if isinstance(message.content, list):
        for part in message.content:
            if isinstance(part, Part):
                _open_part(part, position)
    return message


def read_held(raw: bytes, images: Mapping[str, ImageRef]) -> ChatMessage:
    """A message that `as_json` wrote; `images` has those it shows, by their digest."""
    message = _decoder.decode(raw)
    if isinstance(message.content, list):
        for part in message.content:
            if isinstance(part, Part) and part.image is not None:
                part.image = images[part.image.digest]
    return message


def compile_rotating(patterns: Sequence[str]) -> Rotating:
    """What matches a line that begins with any of `patterns`; ConfigError where one is none."""
    if not patterns:
        return None
    for pattern in patterns:
        try:
            matches_all = _beginning_with(pattern).fullmatch("") is not None
        except re.error as error:
            why = f"interception.rotating_lines: {pattern!r} is no regular expression: {error}"
            raise ConfigError(why) from None
        if matches_all:
            why = f"interception.rotating_lines: {pattern!r} matches every line; begin with a word"
            raise ConfigError(why)
    return _beginning_with("|".join(patterns))


def _beginning_with(pattern: str) -> re.Pattern[str]:
    return re.compile(rf"(?m)^[ \t]*(?:{pattern}).*$")


@Memo
def settled(text: str, rotating: re.Pattern[str]) -> str:
    """A system text, or a part of it, less its rotating lines; a group's sessions share it."""
    return rotating.sub("", text)


def normalised(text: str) -> str:
    """Assistant text without what agents add or drop: outer white space, inlined reasoning."""
    if "</think>" in text:
        text = text.rpartition("</think>")[2]
    return text.strip()


def canonical(value: Any) -> bytes:
    """JSON bytes that are equal for equal values."""
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except TypeError:  # integers past 64 bits
        return repr(value).encode()


def read_tools(raw: bytes) -> list[Any]:
    """The tools as JSON values; SessionError 400 where they are no list of objects."""
    try:
        tools = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise SessionError(400, "invalid_tools", f"tools: not valid JSON: {error}") from None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise SessionError(400, "invalid_tools", "tools: expected an array of objects")
    return tools


def _open_part(part: Part, position: int) -> None:
    """Take an image in; refuse what is neither text nor image."""
    part.image = None
    if part.image_url is not None:
        address = part.image_url.get("url") if isinstance(part.image_url, dict) else part.image_url
        try:
            part.image = hold_image(str(address))
        except ValueError as error:
            raise _bad_message(position, f"image_url: {error}") from None
        part.type, part.image_url = "image", None
    elif part.said() is None:
        why = f"content of type {part.type!r}: only texts and images can be read"
        raise _bad_message(position, why, "unsupported_content")
    part.type = part.type or "text"


def _call_for_template(call: Call) -> dict[str, Any]:
    function = {"name": call.function.name, "arguments": call.parsed_arguments()}
    return {"id": call.id or "", "type": "function", "function": function}


def _bad_message(position: int, why: str, code: str = "invalid_messages") -> SessionError:
    return SessionError(400, code, f"messages[{position}]: {why}")


ReadUnit = Callable[[bytes, int], list[ChatMessage]]
"""Reads one history unit; the number is its position, for the text of a SessionError 400."""


FindAnswer = Callable[[str], ChatMessage | None]
"""The answer with this ReplyHead.id in the session of the request; None if it has no such."""
SpellOut = Callable[[list[bytes], FindAnswer], list[bytes]]
"""Units with the items that they name by id; SessionError 400 for an unknown id."""


class SamplingAsk(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling fields as the agent sent them; None where it did not."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_p: float | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    grammar: Grammar | None = None
    stop: tuple[str, ...] = ()


class ToolChoice(msgspec.Struct, frozen=True):
    """Whether the model may, must not or must call a tool, or which one."""

    kind: Literal["auto", "none", "required", "named"] = "auto"
    name: str = ""


class Wish(msgspec.Struct, frozen=True):
    """What is shown with an answer: that alone of a Turn is kept until then."""

    model: str
    """As the agent names it; given back, otherwise without effect."""
    include_usage: bool
    logprobs: bool
    num_top_logprobs: int
    return_token_ids: bool
    prompt_text: str | None
    """A raw prompt that came as text."""


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One decoded request."""

    messages: list[bytes]
    """History units in the dialect's own JSON, unopened, in order; system text is the first."""
    messages_raw: bytes = b""
    """More units, behind those: a JSON array whose elements they are, unopened.

    Cheaper than the list where a history grows at its end: what was there before is not split.
    """
    read: ReadUnit | None = None
    """Reads a unit that is not held yet; None where units are chat messages."""
    spell_out: SpellOut | None = None
    """Replaces references to answers of this session in `messages`; None where there are none."""
    tools: bytes = b""
    """A JSON array in chat shape, unopened; empty where the agent offers none."""
    tool_choice: ToolChoice = ToolChoice()
    parallel_calls: bool = True
    """False where the turn is to end after one tool call."""
    num_choices: int = 1
    num_top_logprobs: int = 0
    previous_reply: str = ""
    """ReplyHead.id of the reply to go on from; then the units are what follows it."""
    begins_anew: bool = False
    """The first unit is a system text that takes the place of that reply's own."""
    prompt_ids: tuple[int, ...] | None = None
    prompt_text: str | None = None
    """A raw prompt instead of messages: either as tokens or as text."""
    ask: SamplingAsk = SamplingAsk()
    model: str = ""
    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False
    return_token_ids: bool = False
    digest: int = 0
    """Identifies the body (and its Idempotency-Key), in this process and those after it."""
    is_retry: bool = False
    """The client says that it sent this before."""
    dialect: DialectName = ""
    """What it was decoded from."""

    @property
    def is_raw(self) -> bool:
        """Whether it has a raw prompt, and no messages."""
        return self.prompt_ids is not None or self.prompt_text is not None

    def wish(self) -> "Wish":
        """How its answers are to be shown."""
        return Wish(
            self.model,
            self.include_usage,
            self.logprobs,
            self.num_top_logprobs,
            self.return_token_ids,
            self.prompt_text,
        )

    @property
    def reads_calls(self) -> bool:
        """Whether tool-call markup in the answer is a call, not text."""
        return bool(self.tools) and self.tool_choice.kind != "none"
