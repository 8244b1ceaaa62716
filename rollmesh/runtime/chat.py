"""Chat messages, the turn that a call requests, and the deltas of an answer.

All dialects decode requests to these types and encode answers from them.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

import msgspec
import orjson

from rollmesh.core.errors import DECODE_ERRORS, ConfigError, SessionError
from rollmesh.core.memo import Memo
from rollmesh.core.types import DialectName, OutputGrammar
from rollmesh.runtime.images import ImageRef, hold_image


class ToolCall(msgspec.Struct, frozen=True):
    """One tool call of a finished reply."""

    id: str
    name: str
    arguments: str
    """JSON text as the model wrote it; truncated if the reply was."""


class ParsedReply(msgspec.Struct, frozen=True):
    """A finished reply, parsed."""

    content: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


class CallDelta(msgspec.Struct, frozen=True):
    """A piece of one tool call; `id` and `name` are set in its first piece only."""

    index: int
    """Position of the call in its reply."""
    id: str = ""
    name: str = ""
    arguments: str = ""
    """The next piece of the arguments' JSON text."""


class Delta(msgspec.Struct, frozen=True):
    """A piece of a reply; its tokens follow those of the previous delta."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[CallDelta, ...] = ()
    num_tokens: int = 0
    """Tokens of the reply up to the end of this piece."""


class ParseOptions(msgspec.Struct, frozen=True):
    """How to parse one reply."""

    stop: tuple[str, ...] = ()
    """The text ends before the first of these strings."""
    reads_calls: bool = False
    """Whether tool-call markup is parsed; else it is text."""
    call_id_prefix: str = "call"
    """Tool calls get the ids `<prefix>_0`, `_1`..."""
    prefill: tuple[int, ...] = ()
    """Tokens between the generation prompt and the sampled tokens (Prompts.prefill)."""
    tools: bytes = b""
    """A JSON array in chat shape; XML arguments are parsed by their declared types."""


class DeltaReader(Protocol):
    """Incremental parser of one generation: `feed` tokens as they arrive, then `end`, then
    `answer`."""

    def feed(self, token_ids: Sequence[int]) -> Delta | None:
        """The piece that `token_ids` complete; None if they complete none."""

    def end(self, num_tokens: int) -> Delta:
        """The rest, after the last token; `num_tokens` is the reply's length."""

    def answer(self) -> ParsedReply:
        """All deltas combined; after `end`."""


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
"""Matches lines of a system text that change from call to call without meaning."""


class ContentPart(msgspec.Struct, omit_defaults=True):
    """One element of a content list."""

    type: str = ""
    text: str | None = None
    refusal: str | None = None
    """The text of a refusal, in place of `text`."""
    image_url: Any = None
    """The image as the client sends it; replaced by `image` when the message is read."""
    image: ImageRef | None = msgspec.field(default=None, name="rollmesh_image")
    """Set by `as_json`; clients cannot set it."""

    def plain_text(self) -> str | None:
        """The part's text; None for other content, such as an image."""
        return self.refusal if self.text is None else self.text


class Function(msgspec.Struct):
    """The function of a tool call."""

    name: str = ""
    arguments: Any = None
    """A JSON text, or the object itself."""


class MessageToolCall(msgspec.Struct, omit_defaults=True):
    """A tool call in an assistant message."""

    function: Function = msgspec.field(default_factory=Function)
    id: str | None = None

    def parsed_arguments(self) -> Any:
        """The arguments as JSON values; a text that is not JSON stays a text."""
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
    content: str | list[ContentPart | str] | None = None
    reasoning_content: Any = None
    tool_calls: list[MessageToolCall] | None = None
    tool_call_id: str | None = None

    def text(self) -> str:
        """The content as one string; parts are joined without a separator."""
        if isinstance(self.content, list):
            return "".join(
                [p if isinstance(p, str) else p.plain_text() or "" for p in self.content]
            )
        return self.content or ""

    def images(self) -> list[ImageRef]:
        """The images of the message, in order."""
        if not isinstance(self.content, list):
            return []
        return [p.image for p in self.content if isinstance(p, ContentPart) and p.image is not None]

    def meanings(self, rotating: Rotating = None, is_ours: bool = True) -> list[int]:
        """Identities by meaning, strongest first; one match suffices.

        An assistant message is identified by its tool-call ids, then by text, reasoning and parsed
        arguments, then without the reasoning (which many agents drop), then by the calls alone. A
        message that the model did not sample is identified neither by ids, which agents reuse, nor
        by the calls alone.
        """
        if self.role != "assistant":
            return [hash((ROLES[self.role], self._shown(rotating), self.tool_call_id))]
        text = normalised(self.text())
        calls_made = self.tool_calls or ()
        calls = tuple([(c.function.name, canonical(c.parsed_arguments())) for c in calls_made])
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
        """Whether it is an assistant message with text only, like the visible part of a truncated
        answer."""
        return self.role == "assistant" and not self.tool_calls and bool(self.text().strip())

    def joined(self, other: "ChatMessage") -> "ChatMessage":
        """This message and the assistant's next one as one message."""
        thoughts = [str(m.reasoning_content) for m in (self, other) if m.reasoning_content]
        text, reasoning = self.text() + other.text(), "\n".join(thoughts) or None
        return ChatMessage("assistant", text, reasoning, other.tool_calls)

    def for_template(self) -> dict[str, Any]:
        """The message in the shape of chat templates: text content, arguments as objects."""
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
        """The message in the common shape, with images as digests only."""
        if not self.images():
            return msgspec.json.encode(self)
        assert isinstance(self.content, list)
        parts = [
            msgspec.structs.replace(p, image=ImageRef(p.image.digest))
            if isinstance(p, ContentPart) and p.image is not None
            else p
            for p in self.content
        ]
        return msgspec.json.encode(msgspec.structs.replace(self, content=parts))

    def _shown(self, rotating: Rotating) -> str:
        """Text and images of the content, without rotating lines and outer white space."""
        is_system = ROLES[self.role] == "system"
        if not isinstance(self.content, list):
            text = self.content or ""
            return (settled(text, rotating) if is_system and rotating else text).strip()
        shown = []
        for part in self.content:
            text = (part if isinstance(part, str) else part.plain_text()) or ""
            shown.append(settled(text, rotating) if is_system and rotating else text)
            if isinstance(part, ContentPart) and part.image is not None:
                shown.append(f"\0{part.image.digest}\0")
        return "".join(shown).strip()


_decoder = msgspec.json.Decoder(ChatMessage)


def read_message(raw: bytes, position: int) -> ChatMessage:
    """Parse one message; SessionError 400 names its position and the problem."""
    try:
        message = _decoder.decode(raw)
    except DECODE_ERRORS as error:
        raise _bad_message(position, str(error)) from None
    if message.role not in ROLES:
        raise _bad_message(position, f"unknown role {message.role!r}")
    if isinstance(message.content, list):
        for part in message.content:
            if isinstance(part, ContentPart):
                _open_part(part, position)
    return message


def read_held(raw: bytes, images: Mapping[str, ImageRef]) -> ChatMessage:
    """Parse a message that `as_json` wrote; `images` has its images by digest."""
    message = _decoder.decode(raw)
    if isinstance(message.content, list):
        for part in message.content:
            if isinstance(part, ContentPart) and part.image is not None:
                part.image = images[part.image.digest]
    return message


def compile_rotating(patterns: Sequence[str]) -> Rotating:
    """Compile a pattern of lines that begin with any of `patterns`; ConfigError for an invalid
    one."""
    if not patterns:
        return None
    for pattern in patterns:
        try:
            matches_all = _beginning_with(pattern).fullmatch("") is not None
        except re.error as error:
            why = f"interception.rotating_lines: {pattern!r} is not a regular expression: {error}"
            raise ConfigError(why) from None
        if matches_all:
            why = f"interception.rotating_lines: {pattern!r} matches every line; begin with a word"
            raise ConfigError(why)
    return _beginning_with("|".join(patterns))


def _beginning_with(pattern: str) -> re.Pattern[str]:
    return re.compile(rf"(?m)^[ \t]*(?:{pattern}).*$")


@Memo
def settled(text: str, rotating: re.Pattern[str]) -> str:
    """A system text, or a part of it, without its rotating lines; cached for the sessions of a
    group."""
    return rotating.sub("", text)


def normalised(text: str) -> str:
    """Assistant text without outer white space and inlined reasoning, which agents add or drop."""
    if "</think>" in text:
        text = text.rpartition("</think>")[2]
    return text.strip()


def canonical(value: Any) -> bytes:
    """JSON bytes that are equal for equal values."""
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except TypeError:  # integers beyond 64 bits
        return repr(value).encode()


def read_tools(raw: bytes) -> list[Any]:
    """The tools as JSON values; SessionError 400 unless they are a list of objects."""
    try:
        tools = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise SessionError(400, "invalid_tools", f"tools: not valid JSON: {error}") from None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise SessionError(400, "invalid_tools", "tools: expected an array of objects")
    return tools


def _open_part(part: ContentPart, position: int) -> None:
    """Load a part's image; refuse content that is neither text nor image."""
    part.image = None
    if part.image_url is not None:
        address = part.image_url.get("url") if isinstance(part.image_url, dict) else part.image_url
        try:
            part.image = hold_image(str(address))
        except ValueError as error:
            raise _bad_message(position, f"image_url: {error}") from None
        part.type, part.image_url = "image", None
    elif part.plain_text() is None:
        why = f"content of type {part.type!r}: only text and images are supported"
        raise _bad_message(position, why, "unsupported_content")
    part.type = part.type or "text"


def _call_for_template(call: MessageToolCall) -> dict[str, Any]:
    function = {"name": call.function.name, "arguments": call.parsed_arguments()}
    return {"id": call.id or "", "type": "function", "function": function}


def _bad_message(position: int, why: str, code: str = "invalid_messages") -> SessionError:
    return SessionError(400, code, f"messages[{position}]: {why}")


ReadUnit = Callable[[bytes, int], list[ChatMessage]]
"""Parses one history unit; the number is its position, for the text of a SessionError 400."""


FindAnswer = Callable[[str], ChatMessage | None]
"""Finds the answer with this ReplyHead.id in the session; None if there is none."""
ResolveReferences = Callable[[list[bytes], FindAnswer], list[bytes]]
"""Replaces references to items by id; SessionError 400 for an unknown id."""


class RequestedSampling(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling fields of a request; None for fields that it omits."""

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
    grammar: OutputGrammar | None = None
    stop: tuple[str, ...] = ()


class ToolChoice(msgspec.Struct, frozen=True):
    """Whether the model may, must not or must call a tool, or which tool."""

    kind: Literal["auto", "none", "required", "named"] = "auto"
    name: str = ""


class AnswerOptions(msgspec.Struct, frozen=True):
    """Fields of a Turn that are needed to encode its answer."""

    model: str
    """Named by the agent; returned in the answer, without other effect."""
    include_usage: bool
    logprobs: bool
    num_top_logprobs: int
    return_token_ids: bool
    prompt_text: str | None
    """A raw prompt that was sent as text."""


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One decoded request."""

    messages: list[bytes]
    """History units as raw JSON of the dialect, in order; system text is the first."""
    messages_raw: bytes = b""
    """Further units, after those: a raw JSON array of units.

    Cheaper than the list if a history only grows: its known beginning is not split.
    """
    read: ReadUnit | None = None
    """Parses a unit that is new to the session; None if units are chat messages."""
    resolve_references: ResolveReferences | None = None
    """Replaces references to answers of this session in `messages`; None if there are none."""
    tools: bytes = b""
    """A raw JSON array in chat shape; empty if no tools are offered."""
    tool_choice: ToolChoice = ToolChoice()
    parallel_calls: bool = True
    """False if the turn must end after one tool call."""
    num_choices: int = 1
    num_top_logprobs: int = 0
    previous_reply: str = ""
    """ReplyHead.id of the reply to continue; the units then follow it."""
    replaces_system: bool = False
    """The first unit is a system text that replaces that reply's own."""
    prompt_ids: tuple[int, ...] | None = None
    prompt_text: str | None = None
    """A raw prompt instead of messages, as tokens or as text."""
    sampling: RequestedSampling = RequestedSampling()
    model: str = ""
    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False
    return_token_ids: bool = False
    digest: int = 0
    """Identity of the body (and its Idempotency-Key), stable across processes."""
    is_retry: bool = False
    """The client marked it as a resend."""
    dialect: DialectName = ""
    """The dialect that it was decoded from."""

    @property
    def is_raw(self) -> bool:
        """Whether it has a raw prompt, and no messages."""
        return self.prompt_ids is not None or self.prompt_text is not None

    def options(self) -> "AnswerOptions":
        """The fields that encoding its answers needs."""
        return AnswerOptions(
            self.model,
            self.include_usage,
            self.logprobs,
            self.num_top_logprobs,
            self.return_token_ids,
            self.prompt_text,
        )

    @property
    def reads_calls(self) -> bool:
        """Whether tool-call markup in the answer is parsed; else it is text."""
        return bool(self.tools) and self.tool_choice.kind != "none"
