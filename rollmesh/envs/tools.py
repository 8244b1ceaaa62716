"""Tools: typed Python functions, as the model sees them and as it calls them.

    def sell(item: str, count: int = 1) -> str:
        "Sell items from the stock."  ->  name, description, JSON schema of the parameters

    a call --arguments--> parse --> check types --> run off the loop, with a limit --> text
                            +-----------+----------------+--> what went wrong, as text

Invariants: whatever a model writes into a call, and whatever a tool does, becomes text for the
model: it may try again; only InfraError goes on to the worker. The schema is made from the type
hints (msgspec) and the docstring, once for a function's code; nothing that a closure encloses is
held by that. Driven by tool_env.py; users write the functions.
"""

import functools
import inspect
import typing
from collections.abc import Callable, Iterable
from typing import Annotated, Any

import docstring_parser
import msgspec

from rollmesh.core.errors import EnvError, InfraError
from rollmesh.core.logs import readable
from rollmesh.core.types import Json
from rollmesh.envs.calls import Calls, Limit, OvertimeError
from rollmesh.envs.chat import ToolCall

Function = Callable[..., Any]


class ToolSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a call may take and give."""

    timeout_s: float = 30.0
    max_chars: int = 16_000
    """A longer result loses its middle."""


class ToolResult(msgspec.Struct, frozen=True):
    """What the model is told of its call."""

    text: str
    failed: bool = False
    """True where the call was wrong, or the tool raised or took too long."""


class Tool:
    """One function; EnvError, in one line, where no schema can be made of it."""

    def __init__(self, function: Function) -> None:
        shape = _shape(getattr(function, "__func__", function))
        self._function = function
        self._arguments = shape.arguments
        self.name = shape.arguments.__name__
        self.spec = shape.spec
        """As the OpenAI API takes it in `tools`."""

    async def call(self, calls: Calls, arguments: str, settings: ToolSettings) -> ToolResult:
        """Check the arguments, run the function, and say what came of it."""
        try:
            given = msgspec.json.decode(arguments or "{}", type=self._arguments, strict=False)
        except msgspec.MsgspecError as error:
            return ToolResult(f"error: wrong arguments for {self.name}: {error}", failed=True)
        keywords = {name: getattr(given, name) for name in given.__struct_fields__}
        limit = Limit("the tool's timeout_s", settings.timeout_s)
        try:
            found = await calls.call(limit, self._function, **keywords)
            return ToolResult(_shortened(as_text(found), settings.max_chars))
        except InfraError:
            raise
        except OvertimeError:
            text = f"error: {self.name} did not end within {settings.timeout_s:g} s"
        except Exception as error:  # noqa: BLE001 - door: a tool may raise anything
            text = f"error: {type(error).__name__}: {error}"
        return ToolResult(_shortened(text, settings.max_chars), failed=True)


class Toolbox:
    """The tools that a model may call."""

    def __init__(self, functions: Iterable[Function]) -> None:
        tools = [Tool(function) for function in functions]
        self._tools = {tool.name: tool for tool in tools}
        if len(self._tools) < len(tools):
            raise EnvError(f"two tools have one name: {', '.join(tool.name for tool in tools)}")
        self.specs = [tool.spec for tool in tools]

    async def call(self, calls: Calls, call: ToolCall, settings: ToolSettings) -> ToolResult:
        """The result of a call; an unknown name is a mistake of the model's like any other."""
        tool = self._tools.get(call.name)
        if tool is None:
            names = ", ".join(self._tools) or "none"
            return ToolResult(f"error: there is no tool {call.name}; there are: {names}", True)
        return await tool.call(calls, call.arguments, settings)


def as_text(found: object) -> str:
    """A result as the model reads it: text as it is, anything else as JSON, or else by its repr."""
    if isinstance(found, str):
        return found
    try:
        return msgspec.json.encode(found).decode()
    except (TypeError, ValueError, msgspec.MsgspecError):
        return repr(found)


class _Shape(msgspec.Struct, frozen=True):
    arguments: type[msgspec.Struct]
    """Its fields are the parameters; it checks what the model gives."""
    spec: dict[str, Json]


class _Asked:
    """A function, known by all that its shape follows from: users make closures for each rollout,
    and even for each turn, of one piece of code."""

    def __init__(self, function: Function) -> None:
        inner = inspect.unwrap(function)
        defaults = [getattr(inner, name, None) for name in ("__defaults__", "__kwdefaults__")]
        self.function: Function | None = function
        self.key: tuple[object, ...] = (
            getattr(function, "__name__", ""),
            function.__doc__,
            tuple(getattr(function, "__annotations__", {}).items()),
            inner.__code__ if inspect.isfunction(inner) else [],  # has no hash
            repr(defaults),
        )

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Asked) and self.key == other.key


def _shape(function: Function) -> _Shape:
    """What a function looks like from outside."""
    asked = _Asked(function)
    try:
        return _kept_shape(asked)
    except TypeError:  # what has no hash
        return _made_shape(function)
    finally:
        asked.function = None  # what it encloses is a rollout's


@functools.lru_cache(maxsize=4096)
def _kept_shape(asked: _Asked) -> _Shape:
    assert asked.function is not None
    return _made_shape(asked.function)


def _made_shape(function: Function) -> _Shape:
    name = getattr(function, "__name__", "")
    if not name.isidentifier():
        raise EnvError(f"a tool must be a function with a name, and not {function!r}")
    doc = docstring_parser.parse(inspect.getdoc(function) or "")
    told = {each.arg_name: each.description or "" for each in doc.params}
    try:
        fields = _fields(function, told)
        arguments = msgspec.defstruct(name, fields, kw_only=True, forbid_unknown_fields=True)
        parameters = _inlined_schema(arguments)
    except (TypeError, NameError) as error:
        why = str(error).splitlines()[-1]  # before it msgspec says how to make a schema by hand
        raise EnvError(f"tool {name}: no JSON schema: {why}") from None
    told_of = {"name": name, "description": doc.description or "", "parameters": parameters}
    return _Shape(arguments, {"type": "function", "function": told_of})


def _fields(function: Function, told: dict[str, str]) -> list[Any]:
    """The parameters as msgspec.defstruct takes them."""
    hints = typing.get_type_hints(function, include_extras=True)
    fields: list[Any] = []
    for name, parameter in inspect.signature(function).parameters.items():
        if name == "self":
            continue
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(f"{parameter} cannot be given by its name")
        if name not in hints:
            raise TypeError(f"{name} has no type hint")
        hint = hints[name]
        if told.get(name):
            hint = Annotated[hint, msgspec.Meta(description=told[name])]
        fields.append((name, hint, *_default(parameter.default)))
    return fields


def _default(value: Any) -> tuple[Any, ...]:
    if value is inspect.Parameter.empty:
        return ()
    if isinstance(value, list | dict | set):
        return (msgspec.field(default_factory=value.copy),)
    return (value,)


def _inlined_schema(shape: type[msgspec.Struct]) -> dict[str, Json]:
    """The schema of the parameters themselves, with what they refer to beside them."""
    _, parts = msgspec.json.schema_components([shape], ref_template="#/$defs/{name}")
    schema: dict[str, Json] = parts.pop(shape.__name__)
    del schema["title"]
    return {**schema, "$defs": parts} if parts else schema


def _shortened(text: str, max_chars: int) -> str:
    text = readable(text)
    if len(text) <= max_chars:
        return text
    half = max_chars // 2
    num_left_out = len(text) - 2 * half
    return f"{text[:half]}\n[... {num_left_out} characters left out ...]\n{text[-half:]}"
