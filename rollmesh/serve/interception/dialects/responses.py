"""Requests of OpenAI's Responses API: POST .../v1/responses; its items as chat messages.

Shapes as in OpenAI's API reference (create response).

- A history unit is one item, or all adjacent items of the assistant (reasoning, texts, calls),
  which form one chat message.
- Unknown content is refused by its type; items and tools that only OpenAI's servers can run or
  decrypt are left out.
- With `previous_response_id` the input follows that response, and `instructions` replace its own.
- An `item_reference` is replaced with an item of an earlier response of the same session.
"""

import re
from collections.abc import Sequence
from typing import Any

import msgspec
import orjson

from rollmesh.core.types import DialectName, OutputGrammar
from rollmesh.runtime.chat import ChatMessage, FindAnswer, RequestedSampling, Turn, read_message
from rollmesh.serve.interception.dialects.answer_parts import (
    COUNTS_SCHEMA,
    OPENAI_ERROR,
    TEXT_SCHEMA,
    OpenAIDialect,
)
from rollmesh.serve.interception.dialects.dialect import (
    ApiSchema,
    DecodedRequest,
    Json,
    RequestBody,
    UpstreamChoice,
    object_schema,
)
from rollmesh.serve.interception.dialects.request_parts import (
    ANY_OBJECT,
    NonNegative,
    NumTopLogprobs,
    PositiveFraction,
    PositiveInt,
    RawItem,
    RawJson,
    RawSchema,
    RawTools,
    bad_request,
    check_tool_choice,
    present_json,
    raw_field,
    read_body,
    read_tool_choice,
    schema_text,
    tools_of_responses,
)
from rollmesh.serve.interception.dialects.responses_answer import (
    ID_PREFIX,
    EchoedFields,
    ResponsesRequest,
    read_response,
)


class TextFormat(msgspec.Struct):
    """`text.format`."""

    type: str = "text"
    schema: RawSchema = raw_field()


class TextOptions(msgspec.Struct):
    """`text`."""

    format: TextFormat | None = None


class ResponsesBody(msgspec.Struct, kw_only=True):
    """The keys that are read (OpenAI's API reference)."""

    input: str | list[RawItem]
    model: str | None = None
    instructions: str | None = None
    tools: RawTools = raw_field()
    tool_choice: RawJson = raw_field()
    parallel_tool_calls: bool | None = None
    stream: bool | None = None
    include: list[str] | None = None
    previous_response_id: str | None = None
    max_output_tokens: PositiveInt | None = None
    temperature: NonNegative | None = None
    top_p: PositiveFraction | None = None
    top_logprobs: NumTopLogprobs | None = None
    text: TextOptions | None = None
    metadata: RawJson = raw_field()
    client_metadata: RawJson = raw_field()
    """Codex's metadata; its keys change their order with each resend of a turn."""


_CALLS = frozenset({"function_call", "custom_tool_call"})
_REFERENCE = "item_reference"
_ITEM_ID = re.compile(r"(rs|msg|fc)_(.+)_(\d{1,9})")
"""Kind, reply and place of an item, as response_items.py names it."""
_IGNORED = frozenset(
    {
        "code_interpreter_call",
        "compaction",
        "computer_call",
        "file_search_call",
        "ghost_snapshot",
        "image_generation_call",
        "mcp_approval_request",
        "mcp_approval_response",
        "mcp_call",
        "mcp_list_tools",
        "web_search_call",
    }
)
"""Items of OpenAI's server tools: encrypted, or without text for a model."""


class ItemHead(msgspec.Struct):
    """The fields that decide how an item is grouped."""

    type: str | None = None
    role: str | None = None
    id: Any = None

    @property
    def is_reference(self) -> bool:
        """Whether it refers to an earlier item; such an item may lack its type."""
        return self.type == _REFERENCE or (
            self.type is None and self.role is None and self.id is not None
        )

    @property
    def is_from_assistant(self) -> bool:
        is_item = self.type in ("reasoning", *_CALLS)
        return self.role == "assistant" or is_item or self.is_reference

    @property
    def is_ignored(self) -> bool:
        return self.type in _IGNORED


class _Heads(msgspec.Struct):
    input: str | list[ItemHead]


_decoder = msgspec.json.Decoder(ResponsesBody)
_heads = msgspec.json.Decoder(_Heads)


_ANSWER = object_schema(
    object={"const": "response"},
    id=TEXT_SCHEMA,
    model=TEXT_SCHEMA,
    status={"enum": ["completed", "incomplete"]},
    output={"type": "array"},
    usage=COUNTS_SCHEMA,
)


class ResponsesDialect(OpenAIDialect):
    """Implements Dialect."""

    name: DialectName = "responses"
    route = "/responses"
    history_key = "input"
    end_events = frozenset({"response.completed", "response.incomplete", "response.failed"})
    error_events = frozenset({"response.failed", "response.error"})
    schema = ApiSchema("Response", ResponsesBody, _ANSWER, "OpenAIError", OPENAI_ERROR)

    def decode(self, request: RequestBody) -> DecodedRequest:
        body = read_body(_decoder, request.body, "responses request")
        raw_tools = present_json(body.tools)
        tools = tools_of_responses(raw_tools) if raw_tools else b""
        choice = read_tool_choice(msgspec.json.decode(present_json(body.tool_choice) or b"null"))
        check_tool_choice(choice, tools)
        previous = body.previous_response_id or ""
        include = frozenset(body.include or ())
        lists = "message.output_text.logprobs" in include
        units, has_references = _units(body, request)
        turn = Turn(
            messages=units,
            read=read_unit,
            resolve_references=resolve_references if has_references else None,
            tools=tools,
            tool_choice=choice,
            parallel_calls=body.parallel_tool_calls is not False,
            num_top_logprobs=(body.top_logprobs or 0) if lists else 0,
            previous_reply=previous.removeprefix(ID_PREFIX),
            replaces_system=bool(body.instructions),
            sampling=_sampling(body),
            model=body.model or "",
            stream=bool(body.stream),
            logprobs=lists,
            digest=_digest(body, request),
            is_retry=request.is_retry,
            dialect=self.name,
        )
        return ResponsesRequest(turn, _echo(body, raw_tools, include))

    def read_answer(self, events: Sequence[Json]) -> list[UpstreamChoice]:
        return read_response(events)


def _digest(body: ResponsesBody, request: RequestBody) -> int:
    metadata = present_json(body.client_metadata)
    return request.digest_without(metadata) if metadata else request.digest


def _units(body: ResponsesBody, request: RequestBody) -> tuple[list[bytes], bool]:
    """The history units, and whether some refer to items of earlier responses."""
    units: list[bytes] = []
    if body.instructions:
        units.append(_text_unit("system", body.instructions))
    if isinstance(body.input, str):
        return [*units, _text_unit("user", body.input)], False
    heads = read_body(_heads, request.body, "responses request").input
    assert not isinstance(heads, str)
    units += units_of(heads, body.input)
    if not units:
        raise bad_request("invalid_input", "input: expected a text or at least one item")
    return units, any(head.is_reference for head in heads)


def _text_unit(role: str, text: str) -> bytes:
    return msgspec.json.encode([{"role": role, "content": text}])


def _sampling(body: ResponsesBody) -> RequestedSampling:
    return RequestedSampling(
        temperature=body.temperature,
        top_p=body.top_p,
        max_tokens=body.max_output_tokens,
        grammar=_grammar(body.text.format if body.text else None),
    )


def _grammar(form: TextFormat | None) -> OutputGrammar | None:
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return OutputGrammar("json_schema", ANY_OBJECT)
    if form.type == "json_schema":
        return OutputGrammar("json_schema", schema_text(bytes(form.schema), "text.format.schema"))
    why = f"text.format: {form.type!r} is not text, json_object or json_schema"
    raise bad_request("unsupported_response_format", why)


def _echo(body: ResponsesBody, raw_tools: bytes, include: frozenset[str]) -> EchoedFields:
    return EchoedFields(
        instructions=body.instructions,
        tools=raw_tools or b"[]",
        tool_choice=present_json(body.tool_choice) or b'"auto"',
        parallel_tool_calls=body.parallel_tool_calls is not False,
        previous_response_id=body.previous_response_id,
        max_output_tokens=body.max_output_tokens,
        metadata=present_json(body.metadata) or b"{}",
        seals_reasoning="reasoning.encrypted_content" in include,
    )


def units_of(heads: list[ItemHead], raws: list[msgspec.Raw]) -> list[bytes]:
    """The items as history units, each a JSON array of items."""
    units: list[bytes] = []
    group: list[bytes] = []
    for head, raw in zip(heads, raws, strict=True):
        if head.is_ignored:
            continue
        if head.is_from_assistant:
            group.append(bytes(raw))
            continue
        if group:
            units.append(b"[%b]" % b",".join(group))
            group = []
        units.append(b"[%b]" % bytes(raw))
    if group:
        units.append(b"[%b]" % b",".join(group))
    return units


def resolve_references(units: list[bytes], find: FindAnswer) -> list[bytes]:
    """Replace item references with their items; SessionError 400 for an unknown id."""
    return [_spelled_out(unit, find) if b'"id"' in unit else unit for unit in units]


def _spelled_out(unit: bytes, find: FindAnswer) -> bytes:
    items = _items(unit)
    named = [_ItemReference.read(item.get("id")) if _is_reference(item) else None for item in items]
    if not any(named):
        return unit
    found: list[Any] = []
    for item, name in zip(items, named, strict=True):
        found += [item] if name is None else name.items(named, find)
    return orjson.dumps(found)


def _is_reference(item: Any) -> bool:
    return isinstance(item, dict) and msgspec.convert(item, ItemHead, strict=False).is_reference


class _ItemReference(msgspec.Struct, frozen=True):
    """A reference to an item of an earlier response, split into the parts of its id."""

    id: Any
    kind: str = ""
    reply: str = ""
    place: int = 0

    @classmethod
    def read(cls, name: Any) -> "_ItemReference":
        parts = _ITEM_ID.fullmatch(name) if isinstance(name, str) else None
        return cls(name, parts[1], parts[2], int(parts[3])) if parts else cls(name)

    def items(
        self, others: list["_ItemReference | None"], find: FindAnswer
    ) -> list[dict[str, Any]]:
        """The item; empty for a later part of a text that `others` of the unit refer to already."""
        answer = find(self.reply) if self.kind else None
        if answer is not None and self.kind == "rs" and answer.reasoning_content:
            summary = [{"type": "summary_text", "text": answer.reasoning_content}]
            return [{"type": "reasoning", "summary": summary}]
        before = [
            each.place
            for each in others
            if each and (each.kind, each.reply) == ("msg", self.reply) and each.place < self.place
        ]
        if answer is not None and self.kind == "msg" and (text := answer.text()):
            message = {"type": "message", "role": "assistant", "content": text}
            return [] if before else [message]
        calls = answer.tool_calls or [] if answer is not None else []
        if answer is not None and self.kind == "fc":
            is_named = any(each and each.kind == "msg" for each in others)
            num_texts = len(before) if is_named else bool(answer.text())
            number = self.place - bool(answer.reasoning_content) - num_texts
            if 0 <= number < len(calls):
                call = calls[number]
                function = {"name": call.function.name, "arguments": call.function.arguments}
                return [{"type": "function_call", "call_id": call.id, **function}]
        why = f"Item with id {self.id!r} not found: no response of this session has it."
        raise bad_request("item_not_found", why)


def _items(raw: bytes) -> list[Any]:
    """Decode a unit's items; SessionError 400 for numbers that msgspec's skipping let through."""
    try:
        found: list[Any] = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise bad_request("invalid_body", f"an item of the input is not JSON: {error}") from None
    return found


def read_unit(raw: bytes, position: int) -> list[ChatMessage]:
    """The chat message of one unit; SessionError 400 names its position and the problem."""
    items = _items(raw)
    first = items[0]
    if ItemHead(first.get("type"), first.get("role")).is_from_assistant:
        message = _assistant(items, position)
    elif "call_id" in first and str(first.get("type", "")).endswith("_output"):
        content = _content(first.get("output"), position)
        message = {"role": "tool", "tool_call_id": first["call_id"], "content": content}
    elif first.get("type") in (None, "message"):
        content = _content(first.get("content"), position)
        message = {"role": first.get("role"), "content": content}
    else:
        raise _unknown(first.get("type"), position)
    try:
        return [read_message(orjson.dumps(message), position)]
    except TypeError as error:  # integers past 64 bits
        raise bad_request("invalid_input", f"input[{position}]: {error}") from None


def _assistant(items: list[dict[str, Any]], position: int) -> dict[str, Any]:
    reasoning: list[str] = []
    parts: list[Any] = []
    calls: list[dict[str, Any]] = []
    for item in items:
        kind = item.get("type")
        if kind == "reasoning":
            reasoning += _reasoning(item)
        elif kind in _CALLS:
            arguments = item.get("arguments")
            if kind == "custom_tool_call":
                arguments = {"input": item.get("input")}
            function = {"name": item.get("name"), "arguments": arguments}
            calls.append({"id": item.get("call_id"), "function": function})
        else:
            content = _content(item.get("content"), position)
            parts += [content] if isinstance(content, str) else content
    message: dict[str, Any] = {"role": "assistant", "content": parts}
    if reasoning:
        message["reasoning_content"] = "\n".join(reasoning)
    if calls:
        message["tool_calls"] = calls
    return message


def _reasoning(item: dict[str, Any]) -> list[str]:
    """The texts of a reasoning item: its content, or else its summary."""
    for parts in (item.get("content"), item.get("summary")):
        if isinstance(parts, list) and parts:
            return [
                str(part["text"]) for part in parts if isinstance(part, dict) and "text" in part
            ]
    return []


def _content(content: Any, position: int) -> Any:
    """Content in the shape of chat messages."""
    if content is None:
        return ""
    if not isinstance(content, list):
        return content if isinstance(content, str) else orjson.dumps(content).decode()
    return [_part(part, position) for part in content]


def _part(part: Any, position: int) -> Any:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise bad_request("invalid_input", f"input[{position}]: content parts must be objects")
    if part.get("type") == "input_image" and part.get("image_url"):
        return {"type": "image_url", "image_url": part["image_url"]}
    if isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if isinstance(part.get("refusal"), str):
        return {"type": "refusal", "refusal": part["refusal"]}
    raise _unknown(part.get("type"), position)


def _unknown(kind: Any, position: int) -> Exception:
    why = f"input[{position}]: {kind!r} is not content that this model can read"
    return bad_request("unsupported_content", why)
