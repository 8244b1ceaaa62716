"""Tool calls, parsed while their block is being sampled, and stop strings.

    JSON  {"name": "f", "arguments": {"a": 1}}
    XML   <function=f><parameter=a>1</parameter></function>

- Arguments are streamed as pieces of one JSON text and never revoked. A block is a call once its
  name is known; a block without a name is text.
- A stop string ends at the first token that completes it, however the tokens are split.
"""

import enum
import json
import re
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
import orjson

from rollmesh.core.errors import DECODE_ERRORS
from rollmesh.core.memo import Memo
from rollmesh.runtime.generation.events import StopHit


class TokenDecoder(Protocol):
    """Decodes token ids as they arrive, such as tokenizer.Detokenizer."""

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text that `token_ids` complete."""


class StopStrings:
    """Finds the stop strings of one generation."""

    def __init__(self, stops: tuple[str, ...], detokenizer: TokenDecoder) -> None:
        """`detokenizer` must not be shared; empty stop strings never match."""
        self._stops = tuple(stop for stop in stops if stop)
        self._detokenizer = detokenizer
        self._longest = max(map(len, self._stops), default=1)
        self._tail = ""
        self._num_tokens = 0

    def push(self, token_ids: Sequence[int]) -> StopHit | None:
        """Add the next tokens; return the first hit that they complete."""
        for token_id in token_ids:
            self._num_tokens += 1
            self._tail += self._detokenizer.feed([token_id])
            ends = [
                (self._tail.find(stop) + len(stop), stop)
                for stop in self._stops
                if stop in self._tail
            ]
            if ends:
                return StopHit(self._num_tokens, min(ends)[1])
            keep = self._longest - 1
            self._tail = (
                self._tail[len(self._tail) - keep :] if keep < len(self._tail) else self._tail
            )
        return None


def partial_match(text: str, marks: tuple[str, ...]) -> int:
    """Length of the longest proper end of `text` with which one of `marks` begins."""
    longest = 0
    for mark in marks:
        for size in range(min(len(mark) - 1, len(text)), longest, -1):
            if text.endswith(mark[:size]):
                longest = size
                break
    return longest


StringParameters = dict[str, frozenset[str]]
"""By function, the parameters that are declared as strings only."""


class CallStyle(enum.Enum):
    """How a family writes the content of a call's block."""

    JSON = "json"
    XML = "xml"


class CallParser(Protocol):
    """Parses the text of one block."""

    name: str
    """Empty until it is known."""

    def feed(self, text: str) -> str:
        """The next piece of the arguments' JSON text."""

    def close(self) -> str:
        """End at the block's closing mark: the rest of the arguments."""

    def cut(self) -> str:
        """End at the reply's end, inside the block: the rest of the arguments."""


_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)+")\s*,\s*"arguments"\s*:\s*(?=[{\[])')
_MAX_HEAD_CHARS = 4096
"""A longer head is parsed at the block's end, since it is scanned again with each piece."""
_STRUCTURE = re.compile(r'["\\{}\[\]]')


class JsonCall:
    """A call as one JSON object, name first; other orders wait for the block's end."""

    def __init__(self) -> None:
        self.name = ""
        self._text = ""
        """The block's text, while the name is not known."""
        self._depth = 0
        self._in_string = False
        self._num_scanned = 0
        self._escaped_at = -1
        self._is_done = False

    def feed(self, text: str) -> str:
        """The next piece of the arguments, which are streamed from their first bracket on."""
        if not self.name:
            self._text += text
            head = _HEAD.match(self._text, 0, _MAX_HEAD_CHARS)
            name = _plain_string(head.group(1)) if head else ""
            if not head or not name:
                return ""
            self.name, text = name, self._text[head.end() :]
        if self._is_done:
            return ""
        end = self._scan(text)
        self._is_done = end >= 0
        return text[:end] if self._is_done else text

    def close(self) -> str:
        """All arguments, if the block has them in an unusual order or shape."""
        if self.name:
            return ""
        try:
            call = json.loads(self._text)
        except ValueError:
            return ""
        name = call.get("name") if isinstance(call, dict) else None
        if not name or not isinstance(name, str) or not _is_text(name):
            return ""
        self.name = name
        return arguments_text(call.get("arguments", {}))

    cut = close

    def _scan(self, text: str) -> int:
        """Where the arguments' value ends in `text`; -1 if it does not."""
        base = self._num_scanned
        self._num_scanned += len(text)
        for found in _STRUCTURE.finditer(text):
            at, char = found.start(), found.group()
            if base + at == self._escaped_at:
                continue
            if self._in_string:
                self._in_string = char != '"'
                if char == "\\":
                    self._escaped_at = base + at + 1
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return at + 1
        return -1


_FUNCTION = re.compile(r"<function=([^>]+)>")
_NEXT = re.compile(r"<parameter=([^>]+)>|</function>")
_AS_PYTHON = {"True": "true", "False": "false", "None": "null"}
"""Python's spelling of JSON's literals, which models often write."""
_VALUE_END = "</parameter>"
_VALUE_ENDS = (_VALUE_END, "\n" + _VALUE_END)


class XmlCall:
    """A call as tags; string values are streamed, others are parsed as JSON at their end."""

    def __init__(self, strings: StringParameters) -> None:
        self.name = ""
        self._strings = strings
        self._text = ""
        """Text that is not parsed yet."""
        self._key: str | None = None
        """Key of the open value."""
        self._is_string = False
        self._num_keys = 0
        self._at_start = False
        self._is_done = False

    def feed(self, text: str) -> str:
        """The next piece of the arguments; a value's tags, and one line break each, are dropped."""
        self._text += text
        if not self.name:
            found = _FUNCTION.search(self._text)
            if found is None:
                return ""
            self.name = found.group(1).strip()
            self._text = self._text[found.end() :]
        pieces: list[str] = []
        while not self._is_done and self._step(pieces):
            pass
        return "".join(pieces)

    def close(self) -> str:
        """The end of open values, so that the arguments are JSON."""
        if not self.name or self._is_done:
            return ""
        pieces: list[str] = []
        if self._key is not None:
            self._end_value(self._text, pieces)
        self._end(pieces)
        return "".join(pieces)

    def cut(self) -> str:
        """Nothing: a truncated value is not completed."""
        return ""

    def _step(self, pieces: list[str]) -> bool:
        """Parse the next tag or piece; False if more text is needed."""
        if self._key is not None:
            return self._step_in_value(pieces)
        found = _NEXT.search(self._text)
        if found is None:
            return False
        self._text = self._text[found.end() :]
        if found.group(1) is None:
            self._end(pieces)
        else:
            self._begin_value(found.group(1), pieces)
        return True

    def _begin_value(self, key: str, pieces: list[str]) -> None:
        self._key = key
        self._is_string = key in self._strings.get(self.name, ())
        self._at_start = True
        pieces.append((", " if self._num_keys else "{") + _quoted(key) + ": ")
        pieces.append('"' if self._is_string else "")
        self._num_keys += 1

    def _step_in_value(self, pieces: list[str]) -> bool:
        end = self._text.find(_VALUE_END)
        if end >= 0:
            text, self._text = self._text[:end], self._text[end + len(_VALUE_END) :]
            self._end_value(text, pieces)
            return True
        if self._is_string:
            self._emit_string(len(self._text) - partial_match(self._text, _VALUE_ENDS), pieces)
        return False

    def _emit_string(self, size: int, pieces: list[str]) -> None:
        text, self._text = self._text[:size], self._text[size:]
        if text and self._at_start:
            self._at_start = False
            text = text.removeprefix("\n")
        pieces.append(_quoted(text)[1:-1])

    def _end_value(self, text: str, pieces: list[str]) -> None:
        if self._at_start:
            text = text.removeprefix("\n")
        text = text.removesuffix("\n")
        pieces.append(_quoted(text)[1:] if self._is_string else _as_json(text))
        self._key = None

    def _end(self, pieces: list[str]) -> None:
        pieces.append("}" if self._num_keys else "{}")
        self._is_done = True


def new_call(style: CallStyle, strings: StringParameters) -> CallParser:
    """A parser for the next block."""
    return JsonCall() if style is CallStyle.JSON else XmlCall(strings)


def call_opening(style: CallStyle, name: str) -> str:
    """The text that begins a call of `name`, or of any function, after `<tool_call>` and a line
    break.

    It ends where models begin a new token: before white space and names.
    """
    if style is CallStyle.XML:
        return f"<function={name}>" if name else "<function="
    return f'{{"name": {_quoted(name)}, "arguments":' if name else '{"name":'


@Memo
def string_parameters(tools: bytes) -> StringParameters:
    """The string parameters of `tools`, a JSON array in chat shape.

    XML has no quotes, so only the declared type distinguishes `1` from `"1"`. Unreadable tools
    declare none.
    """
    return {
        tool.function.name: frozenset(
            key
            for key, schema in tool.function.parameters.properties.items()
            if isinstance(schema, dict) and schema.get("type") in ("string", ["string"])
        )
        for tool in _read_tools(tools)
    }


def sole_function(tools: bytes) -> str:
    """The name of the only tool; empty if there are several."""
    read = _read_tools(tools)
    return read[0].function.name if len(read) == 1 else ""


def arguments_text(arguments: Any) -> str:
    """Arguments in the JSON spacing of the model: a space after colons and commas."""
    if isinstance(arguments, str) and _is_text(arguments):
        return arguments
    text = json.dumps(arguments, ensure_ascii=False)
    return text if _is_text(text) else json.dumps(arguments)


class _Parameters(msgspec.Struct):
    properties: dict[str, Any] = {}


class _DeclaredFunction(msgspec.Struct):
    name: str = ""
    parameters: _Parameters = msgspec.field(default_factory=_Parameters)


class _Tool(msgspec.Struct):
    function: _DeclaredFunction = msgspec.field(default_factory=_DeclaredFunction)


def _read_tools(tools: bytes) -> list[_Tool]:
    try:
        return msgspec.json.decode(tools, type=list[_Tool]) if tools else []
    except DECODE_ERRORS:
        return []


def _plain_string(quoted: str) -> str:
    """The text of a JSON string; empty for anything else."""
    try:
        text = json.loads(quoted)
    except ValueError:
        return ""
    return text if _is_text(text) else ""


def _is_text(text: str) -> bool:
    """Whether it can be encoded as UTF-8: JSON can contain half a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _as_json(text: str) -> str:
    """A value that is not declared as a string: itself if it is JSON, else a JSON string."""
    text = _AS_PYTHON.get(text.strip(), text)
    try:
        orjson.loads(text)
    except orjson.JSONDecodeError:
        return _quoted(text)
    return text.strip()
