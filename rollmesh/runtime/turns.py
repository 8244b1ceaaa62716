"""What an agent asks for in one call, in the words that all dialects decode to.

Owns Turn and the reading of chat messages (OpenAI's shape is the common one: the other dialects
translate to it). Invariant: unknown keys are ignored everywhere; what cannot be read is a
SessionError 400 naming the message. Meanings are equal for part lists and strings,
for moved cache markers and for extra keys. Driven by the dialects and by history.py.
"""

from collections.abc import Callable
from typing import Any, Literal

import msgspec
import orjson

from rollmesh.core.errors import SessionError
from rollmesh.core.types import Grammar

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}


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


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One decoded request."""

    messages: list[bytes]
    """History units in the dialect's own JSON, unopened, in order; system text is the first."""
    messages_raw: bytes = b""
    """More units, behind those: a JSON array whose elements they are, unopened.

    Cheaper than the list where a history grows at its end: what was there before is not split.
    """
    read: "ReadUnit | None" = None
    """Reads a unit that is not held yet; None where units are chat messages."""
    tools: bytes = b""
    """A JSON array in chat shape, unopened; empty where the agent offers none."""
    tool_choice: ToolChoice = ToolChoice()
    parallel_calls: bool = True
    """False where the turn is to end after one tool call."""
    num_choices: int = 1
    num_top_logprobs: int = 0
    previous_reply: str = ""
    """ReplyHead.id of the reply to go on from; then the units are what follows it."""
    prompt_ids: tuple[int, ...] | None = None
    prompt_text: str | None = None
    """A raw prompt instead of messages: either as tokens or as text."""
    ask: SamplingAsk = SamplingAsk()
    model: str = ""
    """As the agent names it; given back, otherwise without effect."""
    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False
    return_token_ids: bool = False
    digest: int = 0
    """Identifies the body (and its Idempotency-Key) within this process."""
    is_retry: bool = False
    """The client says that it sent this before."""

    @property
    def reads_calls(self) -> bool:
        """Whether tool-call markup in the answer is a call, not text."""
        return bool(self.tools) and self.tool_choice.kind != "none"


class ImageRef(msgspec.Struct, frozen=True, weakref=True):
    """An image that a message shows; its bytes are in the process once, see blobs.py."""

    digest: str
    """Of its bytes, or of its address where it has none here."""
    media_type: str
    data: bytes = b""
    url: str = ""
    """Where the engine may fetch it; '' where `data` has it."""


class Part(msgspec.Struct):
    """One element of a content list."""

    type: str = "text"
    text: str | None = None
    refusal: str | None = None
    """What an assistant says instead of a text."""
    image: ImageRef | None = None
    """Of a part of type `image`; put in by the readers."""

    def said(self) -> str | None:
        """Its text; None where it is something else, such as an image."""
        return self.refusal if self.text is None else self.text


class Function(msgspec.Struct):
    """What a tool call names."""

    name: str = ""
    arguments: Any = None
    """A JSON text, or the object itself."""


class Call(msgspec.Struct):
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


class ChatMessage(msgspec.Struct):
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

    def meanings(self) -> list[int]:
        """Identities by meaning, strongest first; one match is enough.

        An assistant message is known by its tool-call ids, then by text and parsed arguments, then
        by the calls alone; reasoning counts for nothing, since many agents drop it.
        """
        if self.role != "assistant":
            return [hash((self.role, self.text(), self.tool_call_id))]
        text = normalised(self.text())
        if not self.tool_calls:
            return [hash(("text", text, ()))]
        calls = tuple((c.function.name, canonical(c.parsed_arguments())) for c in self.tool_calls)
        ids = tuple(c.id for c in self.tool_calls)
        keys = [hash(("ids", ids))] if all(ids) else []
        return [*keys, hash(("text", text, calls)), hash(("calls", calls))]

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates take it: text content, arguments as objects."""
        message: dict[str, Any] = {"role": ROLES[self.role], "content": self.text()}
        if self.role == "assistant":
            if isinstance(self.reasoning_content, str) and self.reasoning_content:
                message["reasoning_content"] = self.reasoning_content
            if self.tool_calls:
                message["tool_calls"] = [_call_for_template(call) for call in self.tool_calls]
        elif self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message


ReadUnit = Callable[[bytes, int], list[ChatMessage]]
"""Reads one history unit; the number is its position, for the text of a SessionError 400."""

_decoder = msgspec.json.Decoder(ChatMessage)


def read_message(raw: bytes, position: int) -> ChatMessage:
    """Parse one message; SessionError 400 names its position and what is wrong."""
    try:
        message = _decoder.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _bad_message(position, str(error)) from None
    if message.role not in ROLES:
        raise _bad_message(position, f"unknown role {message.role!r}")
    if isinstance(message.content, list):
        for part in message.content:
            if isinstance(part, Part) and part.said() is None:
                raise _bad_message(
                    position, f"content of type {part.type!r}: this model reads text only"
                )
    return message


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


def _call_for_template(call: Call) -> dict[str, Any]:
    function = {"name": call.function.name, "arguments": call.parsed_arguments()}
    return {"id": call.id or "", "type": "function", "function": function}


def _bad_message(position: int, why: str) -> SessionError:
    return SessionError(400, "invalid_messages", f"messages[{position}]: {why}")
