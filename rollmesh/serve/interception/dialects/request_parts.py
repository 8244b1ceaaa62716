"""Parts of requests that several dialects share: raw JSON fields, sampling fields, grammars, tools.

- null means absent; unknown keys are accepted.
- Raw fields (messages, items, tools, schemas) are not decoded here: msgspec has skipped them, so
  they are well-formed, and the session decodes those that are new to it.
- A constraint that engines do not support is refused, not ignored; so is a `tool_choice` that no
  offered tool satisfies.
"""

import re
from typing import Annotated, Any, TypeVar

import msgspec

from rollmesh.core.errors import DECODE_ERRORS, SessionError
from rollmesh.core.memo import Memo
from rollmesh.core.types import OutputGrammar
from rollmesh.runtime.chat import RequestedSampling, ToolChoice, read_tools

Body = TypeVar("Body")


def read_body(decoder: "msgspec.json.Decoder[Body]", body: bytes, kind: str) -> Body:
    """Decode a body into its struct; SessionError 400 names the wrong key."""
    try:
        if not body.isascii():
            body.decode()  # msgspec does not check the encoding of raw fields
        return decoder.decode(body)
    except DECODE_ERRORS as error:
        raise bad_request("invalid_request", f"the body is not a {kind}: {error}") from None


def present_json(raw: msgspec.Raw) -> bytes:
    """A key's JSON; empty if it is missing, null or an empty list."""
    text = bytes(raw)
    return b"" if text in (b"", b"null", b"[]") else text


def bad_request(code: str, message: str) -> SessionError:
    """The error of a malformed or unsupported request."""
    return SessionError(400, code, message)


def raw_field() -> Any:
    """A raw field whose default is no bytes."""
    return msgspec.field(default_factory=msgspec.Raw)


def nonempty_array(raw: msgspec.Raw, key: str) -> bytes:
    """The bytes of a non-empty array; SessionError 400 for anything else."""
    array = bytes(raw)
    if array[:1] != b"[" or _EMPTY.match(array):
        raise bad_request(f"invalid_{key}", f"{key}: expected an array of at least one")
    return array


def _shaped(**schema: Any) -> msgspec.Meta:
    return msgspec.Meta(extra_json_schema=schema)


_EMPTY = re.compile(rb"\[\s*\]")

_TEXT = {"type": "string"}
_OBJECTS = {"type": "array", "items": {"type": "object"}}
_CONTENT = {"anyOf": [_TEXT, _OBJECTS]}
_ROLES = ["system", "developer", "user", "assistant", "tool"]

RawChatMessages = Annotated[
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
RawMessages = Annotated[
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
"""Messages in Anthropic's shape."""
RawItem = Annotated[
    msgspec.Raw,
    _shaped(type="object", properties={"type": _TEXT, "role": _TEXT, "content": _CONTENT}),
]
"""An item of the Responses API."""
RawTools = Annotated[msgspec.Raw, _shaped(anyOf=[_OBJECTS, {"type": "null"}])]
RawSystem = Annotated[msgspec.Raw, _shaped(anyOf=[_CONTENT, {"type": "null"}])]
RawSchema = Annotated[msgspec.Raw, _shaped(type="object")]
"""A JSON schema."""
RawSchemaOrText = Annotated[msgspec.Raw, _shaped(type=["object", "string", "null"])]
"""A JSON schema, or its text."""
RawJson = Annotated[msgspec.Raw, _shaped()]
RawPrompt = Annotated[msgspec.Raw, _shaped(type=["string", "array"])]
"""A text, token ids, or several of either."""


MAX_SEED = 2**63 - 1
MAX_CHOICES = 128
MAX_TOP_LOGPROBS = 20
ANY_OBJECT = '{"type": "object"}'
_REGEX_MARK = re.compile(r"[\\.^$*+?{}\[\]()|]")
_ESCAPED = r"\\\g<0>"

PositiveInt = Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
"""Journals store no larger integers."""
NonNegative = Annotated[float, msgspec.Meta(ge=0)]
PositiveFraction = Annotated[float, msgspec.Meta(gt=0, le=1)]
Fraction = Annotated[float, msgspec.Meta(ge=0, le=1)]
NumChoices = Annotated[int, msgspec.Meta(ge=1, le=MAX_CHOICES)]
NumTopLogprobs = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOP_LOGPROBS)]
Bias = Annotated[float, msgspec.Meta(ge=-100, le=100)]
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class StreamOptions(msgspec.Struct):
    """`stream_options`."""

    include_usage: bool | None = None


class JsonSchema(msgspec.Struct):
    """`response_format.json_schema`."""

    schema: RawSchema = raw_field()


class ResponseFormat(msgspec.Struct):
    """`response_format`."""

    type: str = "text"
    json_schema: JsonSchema | None = None


class StructuredOutputs(msgspec.Struct):
    """`structured_outputs`."""

    json: RawSchemaOrText = raw_field()
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class OpenAISamplingBody(msgspec.Struct, kw_only=True):
    """The keys that Chat and Completions share (OpenAI's API reference).

    `regex` and `ebnf` are SGLang's names, `guided_*` and `structured_outputs` vLLM's.
    """

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: NonNegative | None = None
    top_p: PositiveFraction | None = None
    top_k: Int64 | None = None
    min_p: Fraction | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[TokenId, Bias] | None = None
    seed: int | None = None
    max_tokens: PositiveInt | None = None
    stop: str | list[str] | None = None
    n: NumChoices | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    json_schema: RawSchemaOrText = raw_field()
    regex: str | None = None
    ebnf: str | None = None
    guided_json: RawSchemaOrText = raw_field()
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    return_token_ids: bool | None = None

    @property
    def includes_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def requested_sampling(self, max_tokens: int | None) -> RequestedSampling:
        """The sampling fields as rollmesh's type."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return RequestedSampling(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=tuple((self.logit_bias or {}).items()),
            seed=None if self.seed is None else self.seed & MAX_SEED,
            max_tokens=max_tokens,
            stop=tuple(filter(None, stop)),
            grammar=self._grammar(),
        )

    def _grammar(self) -> OutputGrammar | None:
        forms = (self.response_format, self.structured_outputs, self.json_schema)
        guides = (self.guided_json, self.guided_regex, self.guided_choice, self.guided_grammar)
        if not any((*forms, self.regex, self.ebnf, *guides)):
            return None
        outputs = self.structured_outputs or _NO_OUTPUTS
        schemas = (self.guided_json, self.json_schema, outputs.json)
        regexes = (self.guided_regex, self.regex, outputs.regex)
        choices = (self.guided_choice, outputs.choice)
        ebnfs = (self.guided_grammar, self.ebnf, outputs.grammar)
        found = [
            *format_grammar(self.response_format),
            *[
                OutputGrammar("json_schema", _guided_schema(each))
                for each in map(present_json, schemas)
                if each
            ],
            *[OutputGrammar("regex", each) for each in regexes if each],
            *[OutputGrammar("regex", _any_of(each)) for each in choices if each],
            *[OutputGrammar("ebnf", each) for each in ebnfs if each],
        ]
        if len(found) > 1:
            raise bad_request("invalid_request", "more than one constraint on the answer's form")
        return found[0] if found else None


_NO_OUTPUTS = StructuredOutputs()


def format_grammar(asked: ResponseFormat | None) -> list[OutputGrammar]:
    """The constraint that a `response_format` sets: none or one."""
    if asked is None or asked.type == "text":
        return []
    if asked.type == "json_object":
        return [OutputGrammar("json_schema", ANY_OBJECT)]
    if asked.type == "json_schema":
        raw = bytes(asked.json_schema.schema) if asked.json_schema else b""
        return [
            OutputGrammar("json_schema", schema_text(raw, "response_format.json_schema.schema"))
        ]
    why = f"response_format: {asked.type!r} is not text, json_object or json_schema"
    raise bad_request("unsupported_response_format", why)


def schema_text(raw: bytes, key: str) -> str:
    """A JSON schema as text, unchanged; SessionError 400 if it is not an object."""
    try:
        msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        return raw.decode()
    except DECODE_ERRORS as error:
        why = f"{key}: expected a JSON schema, which is an object: {error}"
        raise bad_request("invalid_request", why) from None


def _guided_schema(raw: bytes) -> str:
    """A schema as vLLM and SGLang accept it: an object, or its JSON in a string."""
    if raw.startswith(b'"'):
        raw = msgspec.json.decode(raw, type=str).encode()
    return schema_text(raw, "guided_json")


def _any_of(choices: list[str]) -> str:
    """A regular expression that matches exactly these texts."""
    return f"({'|'.join([_REGEX_MARK.sub(_ESCAPED, choice) for choice in choices])})"


_KINDS = {"auto": "auto", "none": "none", "required": "required", "any": "required"}


def read_tool_choice(asked: Any) -> ToolChoice:
    """Read a `tool_choice` or `function_call`; SessionError 400 for an unknown form.

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
    raise bad_request("invalid_tool_choice", f"tool_choice: {kind!r} is not supported")


def check_tool_choice(choice: ToolChoice, tools: bytes) -> None:
    """SessionError 400 if a required tool is not offered; `tools` are in chat shape."""
    if choice.kind in ("auto", "none"):
        return
    if not tools:
        raise bad_request(
            "invalid_tool_choice", "tool_choice: a call is required, but no tools are offered"
        )
    if choice.kind == "named" and choice.name not in _names(tools):
        why = f"tool_choice: {choice.name!r} is not among the tools"
        raise bad_request("invalid_tool_choice", why)


@Memo
def tools_of_messages(raw: bytes) -> bytes:
    """Anthropic's tools in chat shape, without server tools, which nothing here can run.

    A server tool has a versioned `type` and no `input_schema`.
    """
    tools = [tool for tool in _decoded(raw) if tool.get("input_schema") is not None]
    return _in_chat_shape([(tool, tool["input_schema"]) for tool in tools])


@Memo
def tools_of_responses(raw: bytes) -> bytes:
    """The Responses API's functions in chat shape.

    Namespaces, web search and other server tools are left out, since nothing here can run them;
    codex offers them on every call.
    """
    empty = {"type": "object", "properties": {}}
    tools = [tool for tool in _decoded(raw) if tool.get("type") == "function"]
    return _in_chat_shape([(tool, tool.get("parameters") or empty) for tool in tools])


def _decoded(raw: bytes) -> list[dict[str, Any]]:
    try:
        return msgspec.json.decode(raw, type=list[dict[str, Any]])
    except msgspec.MsgspecError as error:
        raise bad_request("invalid_tools", f"tools: {error}") from None


def _in_chat_shape(tools: list[tuple[dict[str, Any], Any]]) -> bytes:
    """The JSON of pairs (tool, its parameters); empty for no pairs."""
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
