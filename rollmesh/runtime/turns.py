"""What an agent asks for in one call, in the words that all dialects decode to.

Owns Turn and the reading of chat messages (OpenAI's shape is the common one: the other dialects
translate to it). Invariant: unknown keys are ignored everywhere; what cannot be read is a
SessionError 400 naming the message. Meanings are equal for part lists and strings,
for moved cache markers and for extra keys. Driven by the dialects and by history.py.
"""

from typing import Any

import msgspec
import orjson

from rollmesh.core.errors import SessionError

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
    stop: tuple[str, ...] = ()


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One decoded request."""

    messages: list[bytes]
    """Each a JSON object, unopened."""
    tools: bytes = b""
    """A JSON array, unopened; empty where the agent offers none."""
    calls_allowed: bool = True
    """False where the agent forbids tool calls (`tool_choice: none`)."""
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
        return bool(self.tools) and self.calls_allowed


class Part(msgspec.Struct):
    """One element of a content list."""

    type: str = "text"
    text: str | None = None
    refusal: str | None = None
    """What an assistant says instead of a text."""

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
