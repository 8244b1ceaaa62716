"""Tools: typed Python functions with a schema for the model, and the environment that uses them.

    def sell(item: str, count: int = 1) -> str:
        "Sell items from the stock."  ->  name, description, JSON schema of the parameters
    a call --arguments--> parse --> check types --> run off the loop, with a limit --> text

- Errors in a call or in a tool become text for the model, which may try again; only InfraError
  reaches the worker.
- The schema comes from type hints (msgspec) and the docstring, once for a function's code, and
  holds no closure.
- The calls of one answer run in order, since they may share state; each gets exactly one result.
"""

import functools
import inspect
import typing
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any

import docstring_parser
import msgspec

from rollmesh.core.errors import EnvError, InfraError
from rollmesh.core.logs import readable
from rollmesh.core.types import Json, Task
from rollmesh.envs.calls import EnvCalls, OvertimeError, TimeLimit
from rollmesh.envs.chat import ChatReply, Message, ToolCall
from rollmesh.envs.multi_turn import MultiTurnEnv, Prompt, Talk

Function = Callable[..., Any]


class ToolSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a call and its result."""

    timeout_s: float = 30.0
    max_chars: int = 16_000
    """Longer results lose their middle."""


class ToolResult(msgspec.Struct, frozen=True):
    """Result of a call, for the model."""

    text: str
    failed: bool = False
    """True if the call was wrong, or the tool raised or took too long."""


class Tool:
    """One function; EnvError, in one line, if it has no schema."""

    def __init__(self, function: Function) -> None:
        shape = _shape(getattr(function, "__func__", function))
        self._function = function
        self._arguments = shape.arguments
        self.name = shape.arguments.__name__
        self.spec = shape.spec
        """The OpenAI API's entry for `tools`."""

    async def call(self, calls: EnvCalls, arguments: str, settings: ToolSettings) -> ToolResult:
        """Check the arguments, run the function, and return its result or error."""
        try:
            given = msgspec.json.decode(arguments or "{}", type=self._arguments, strict=False)
        except msgspec.MsgspecError as error:
            return ToolResult(f"error: wrong arguments for {self.name}: {error}", failed=True)
        keywords = {name: getattr(given, name) for name in given.__struct_fields__}
        limit = TimeLimit("the tool's timeout_s", settings.timeout_s)
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

    async def call(self, calls: EnvCalls, call: ToolCall, settings: ToolSettings) -> ToolResult:
        """Return the result of a call; an unknown name is an error for the model like any other."""
        tool = self._tools.get(call.name)
        if tool is None:
            names = ", ".join(self._tools) or "none"
            return ToolResult(f"error: there is no tool {call.name}; there are: {names}", True)
        return await tool.call(calls, call.arguments, settings)


def as_text(found: object) -> str:
    """Return a result as text: strings unchanged, others as JSON, or else by their repr."""
    if isinstance(found, str):
        return found
    try:
        return msgspec.json.encode(found).decode()
    except (TypeError, ValueError, msgspec.MsgspecError):
        return repr(found)


class _Shape(msgspec.Struct, frozen=True):
    arguments: type[msgspec.Struct]
    """Struct with the parameters as fields; it validates the model's arguments."""
    spec: dict[str, Json]


class _FunctionKey:
    """Key of a function by all that its schema depends on: users create closures of one piece of
    code for each rollout, and even each turn."""

    def __init__(self, function: Function) -> None:
        inner = inspect.unwrap(function)
        defaults = [getattr(inner, name, None) for name in ("__defaults__", "__kwdefaults__")]
        self.function: Function | None = function
        self.key: tuple[object, ...] = (
            getattr(function, "__name__", ""),
            function.__doc__,
            tuple(getattr(function, "__annotations__", {}).items()),
            inner.__code__ if inspect.isfunction(inner) else [],  # is not hashable
            repr(defaults),
        )

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _FunctionKey) and self.key == other.key


def _shape(function: Function) -> _Shape:
    """Return the schema of a function."""
    asked = _FunctionKey(function)
    try:
        return _cached_shape(asked)
    except TypeError:  # not hashable
        return _made_shape(function)
    finally:
        asked.function = None  # its closure belongs to a rollout


@functools.lru_cache(maxsize=4096)
def _cached_shape(asked: _FunctionKey) -> _Shape:
    assert asked.function is not None
    return _made_shape(asked.function)


def _made_shape(function: Function) -> _Shape:
    name = getattr(function, "__name__", "")
    if not name.isidentifier():
        raise EnvError(f"a tool must be a function with a name, and not {function!r}")
    doc = docstring_parser.parse(inspect.getdoc(function) or "")
    descriptions = {each.arg_name: each.description or "" for each in doc.params}
    try:
        fields = _fields(function, descriptions)
        arguments = msgspec.defstruct(name, fields, kw_only=True, forbid_unknown_fields=True)
        parameters = _inlined_schema(arguments)
    except (TypeError, NameError) as error:
        why = str(error).splitlines()[-1]  # msgspec's lines before it explain schemas by hand
        raise EnvError(f"tool {name}: no JSON schema: {why}") from None
    function_schema = {"name": name, "description": doc.description or "", "parameters": parameters}
    return _Shape(arguments, {"type": "function", "function": function_schema})


def _fields(function: Function, descriptions: dict[str, str]) -> list[Any]:
    """Return the parameters in the form of msgspec.defstruct."""
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
        if descriptions.get(name):
            hint = Annotated[hint, msgspec.Meta(description=descriptions[name])]
        fields.append((name, hint, *_default(parameter.default)))
    return fields


def _default(value: Any) -> tuple[Any, ...]:
    if value is inspect.Parameter.empty:
        return ()
    if isinstance(value, list | dict | set):
        return (msgspec.field(default_factory=value.copy),)
    return (value,)


def _inlined_schema(shape: type[msgspec.Struct]) -> dict[str, Json]:
    """Return the schema of the parameters, with the definitions that it refers to."""
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


class ToolEnv(MultiTurnEnv):
    """Base of environments with tools; the model works until it answers without a call.

    Subclasses add `tasks` and `score`. Stateless tools are given once:
    `super().__init__(tools=[search, fetch])`. Tools with a rollout's state are methods of an object
    that `begin` creates and stores in `talk.held`; then override `tools`.
    """

    def __init__(
        self,
        *,
        tools: Sequence[Function] = (),
        tool_settings: ToolSettings | None = None,
        max_turns: int = 16,
        max_tokens: int = 0,
        system: str = "",
    ) -> None:
        """EnvError if a tool has no schema; `tool_settings` limits each call."""
        super().__init__(max_turns=max_turns, max_tokens=max_tokens, system=system)
        Toolbox(tools)  # reports a tool without schema early
        self._tools = tools
        self._tool_settings = tool_settings or ToolSettings()
        self._calls = EnvCalls()

    def tools(self, talk: Talk) -> Sequence[Function]:
        """Return the tools of this rollout. Default: those of the environment."""
        del talk
        return self._tools

    def fields(self, talk: Talk) -> dict[str, Json]:
        """Return the tools, and the other fields of each request."""
        specs = Toolbox(self.tools(talk)).specs
        return {**super().fields(talk), "tools": specs} if specs else super().fields(talk)

    async def respond(self, task: Task, talk: Talk, reply: ChatReply) -> Prompt | None:
        """Return the results of the calls; None, the end, without calls."""
        del task
        if not reply.calls:
            return None
        toolbox = Toolbox(self.tools(talk))
        answers: list[Message] = []
        for call in reply.calls:
            result = await toolbox.call(self._calls, call, self._tool_settings)
            _count(talk, "num_tool_calls", 1)
            _count(talk, "num_tool_errors", int(result.failed))
            answers.append({"role": "tool", "tool_call_id": call.id, "content": result.text})
        return answers


def _count(talk: Talk, name: str, number: int) -> None:
    talk.data[name] = talk.data.get(name, 0) + number
