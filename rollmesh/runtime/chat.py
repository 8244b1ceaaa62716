"""Chat messages: how they are read, what they mean, and how templates take them.

OpenAI's shape is the common one; readers of other dialects make it. Invariants: unknown keys are
ignored everywhere; what cannot be read is a SessionError 400 naming the message; meanings are equal
for part lists and strings, for moved cache markers, extra keys and outer white space, and for
system texts that differ in rotating lines alone. Driven by the dialects, history.py and prompts.py.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import orjson

from rollmesh.core.errors import ConfigError, SessionError
from rollmesh.core.memo import Memo
from rollmesh.runtime.images import ImageRef, hold_image

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
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
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
