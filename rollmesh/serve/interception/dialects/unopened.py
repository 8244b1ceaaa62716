"""The parts of a body that stay as they came: messages, items, tools, schemas.

Invariant: each is JSON that msgspec has skipped over, so it is well-formed; what it holds is read
by the session, where it is new, or by nobody. The shapes given here are for readers of the OpenAPI
document. Driven by the dialects.
"""

import re
from typing import Annotated, Any

import msgspec

from rollmesh.serve.interception.dialects.frames import refusal


def absent() -> Any:
    """The default of an unopened key: no bytes."""
    return msgspec.field(default_factory=msgspec.Raw)


def array_of(raw: msgspec.Raw, key: str) -> bytes:
    """The bytes of an array that is not empty; SessionError 400 where it is none."""
    array = bytes(raw)
    if array[:1] != b"[" or _EMPTY.match(array):
        raise refusal(f"invalid_{key}", f"{key}: expected an array of at least one")
    return array


def _shaped(**schema: Any) -> msgspec.Meta:
    return msgspec.Meta(extra_json_schema=schema)


_EMPTY = re.compile(rb"\[\s*\]")

_TEXT = {"type": "string"}
_OBJECTS = {"type": "array", "items": {"type": "object"}}
_CONTENT = {"anyOf": [_TEXT, _OBJECTS]}
_ROLES = ["system", "developer", "user", "assistant", "tool"]

ChatMessages = Annotated[
    msgspec.Raw,
    _shaped(
        type="array",
        minItems=1,
        items={
            "type": "object",
            "properties": {"role": {"enum": _ROLES}, "content": _CONTENT},
            "required": ["role"],
        },
    ),
]
Messages = Annotated[
    msgspec.Raw,
    _shaped(
        type="array",
        minItems=1,
        items={
            "type": "object",
            "properties": {"role": {"enum": ["user", "assistant"]}, "content": _CONTENT},
            "required": ["role", "content"],
        },
    ),
]
"""Anthropic's."""
Item = Annotated[
    msgspec.Raw,
    _shaped(type="object", properties={"type": _TEXT, "role": _TEXT, "content": _CONTENT}),
]
"""An item of the Responses API."""
Tools = Annotated[msgspec.Raw, _shaped(anyOf=[_OBJECTS, {"type": "null"}])]
SystemText = Annotated[msgspec.Raw, _shaped(anyOf=[_CONTENT, {"type": "null"}])]
Schema = Annotated[msgspec.Raw, _shaped(type="object")]
"""A JSON schema."""
AnySchema = Annotated[msgspec.Raw, _shaped(type=["object", "string", "null"])]
"""A JSON schema, or its text."""
Anything = Annotated[msgspec.Raw, _shaped()]
Prompt = Annotated[msgspec.Raw, _shaped(type=["string", "array"])]
"""A text, token ids, or several of either."""
