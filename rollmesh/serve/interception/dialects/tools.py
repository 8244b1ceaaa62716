"""Which tools a request offers, and which it wants called, over all dialects' ways to say it.

Invariant: a choice that nothing on offer can meet is refused in one line, rather than left for the
engine to stumble over. Driven by the dialects.
"""

from typing import Any

import msgspec

from rollmesh.core.memo import Memo
from rollmesh.runtime.chat import ToolChoice, read_tools
from rollmesh.serve.interception.dialects.frames import refusal

_KINDS = {"auto": "auto", "none": "none", "required": "required", "any": "required"}


def as_choice(asked: Any) -> ToolChoice:
    """A `tool_choice` (or `function_call`) in our words; SessionError 400 where it is none.

    Strings, `{"type": "function", "function": {"name"}}` (chat), `{"type": "function", "name"}`
    (responses), `{"type": "tool", "name"}`, `{"type": "any"}` (messages), `{"name"}` (functions)
    and `{"type": "allowed_tools", "mode"}` all occur.
    """
    if asked is None:
        return ToolChoice()
    kind = asked.get("type") if isinstance(asked, dict) else asked
    if kind == "allowed_tools":
        allowed = asked.get("allowed_tools", asked)
        kind = allowed.get("mode", "auto") if isinstance(allowed, dict) else "auto"
    if isinstance(kind, str) and kind in _KINDS:
        return ToolChoice(_KINDS[kind])  # type: ignore[arg-type]
    if isinstance(asked, dict):
        named = asked.get("function") or asked.get("custom") or asked
        name = named.get("name") if isinstance(named, dict) else None
        if isinstance(name, str) and name:
            return ToolChoice("named", name)
    raise refusal("invalid_tool_choice", f"tool_choice: {kind!r} is no choice that we know")


def check_named(choice: ToolChoice, tools: bytes) -> None:
    """Whether the tool that has to be called is on offer; `tools` in chat shape."""
    if choice.kind in ("auto", "none"):
        return
    if not tools:
        raise refusal("invalid_tool_choice", "tool_choice: a call is required, but no tool offered")
    if choice.kind == "named" and choice.name not in _names(tools):
        why = f"tool_choice: {choice.name!r} is not among the tools"
        raise refusal("invalid_tool_choice", why)


@Memo
def tools_of_messages(raw: bytes) -> bytes:
    """Tools in chat shape; those that only Anthropic's servers can run are left out.

    Such a tool has a versioned `type` and no `input_schema`; an agent that offers it does so
    beside its own, and the model is not told of what nobody here could run.
    """
    tools = [tool for tool in _decoded(raw) if tool.get("input_schema") is not None]
    return _in_chat_shape([(tool, tool["input_schema"]) for tool in tools])


@Memo
def tools_of_responses(raw: bytes) -> bytes:
    """Tools in chat shape; namespaces, web search and the like are left out: nobody here has them.

    The agent may offer them still, as codex does on every call; the model is not told.
    """
    empty = {"type": "object", "properties": {}}
    tools = [tool for tool in _decoded(raw) if tool.get("type") == "function"]
    return _in_chat_shape([(tool, tool.get("parameters") or empty) for tool in tools])


def _decoded(raw: bytes) -> list[dict[str, Any]]:
    try:
        return msgspec.json.decode(raw, type=list[dict[str, Any]])
    except msgspec.MsgspecError as error:
        raise refusal("invalid_tools", f"tools: {error}") from None


def _in_chat_shape(tools: list[tuple[dict[str, Any], Any]]) -> bytes:
    """The JSON of (tool, its parameters) pairs; empty for none."""
    functions = [
        {
            "name": tool.get("name"),
            "description": tool.get("description") or "",
            "parameters": parameters,
        }
        for tool, parameters in tools
    ]
    named = [{"type": "function", "function": function} for function in functions]
    return msgspec.json.encode(named) if named else b""


@Memo
def _names(tools: bytes) -> frozenset[str]:
    functions = [tool.get("function", tool) for tool in read_tools(tools)]
    names = [function.get("name") for function in functions if isinstance(function, dict)]
    return frozenset(name for name in names if isinstance(name, str))
