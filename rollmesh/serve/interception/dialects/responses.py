"""OpenAI's Responses API, as it is asked: POST .../v1/responses.

Shapes as in OpenAI's API reference (create response).

- Unknown keys are accepted everywhere; items stay unopened except for their type, role and id.
- With `previous_response_id` the input is what follows that response, and instructions take the
  place of its own.
- An `item_reference` is replaced by the session with the item that it gave out under this id.
"""

import msgspec

from rollmesh.core.errors import SessionError
from rollmesh.core.types import Grammar
from rollmesh.runtime.chat import SamplingAsk, Turn
from rollmesh.serve.interception.dialects.asks import (
    ANY_OBJECT,
    AtLeastOne,
    NotNegative,
    NumTops,
    Share,
    schema_text,
)
from rollmesh.serve.interception.dialects.dialect import Asked, Call
from rollmesh.serve.interception.dialects.failures import openai_failure_body
from rollmesh.serve.interception.dialects.frames import present, read_body, refusal
from rollmesh.serve.interception.dialects.response_events import ResponseCall
from rollmesh.serve.interception.dialects.response_items import ID_PREFIX, Echo
from rollmesh.serve.interception.dialects.response_units import (
    ItemHead,
    read_unit,
    spell_out,
    units_of,
)
from rollmesh.serve.interception.dialects.tools import as_choice, check_named, tools_of_responses
from rollmesh.serve.interception.dialects.unopened import Anything, Item, Schema, Tools, absent


class TextFormat(msgspec.Struct):
    """`text.format`."""

    type: str = "text"
    schema: Schema = absent()


class TextOptions(msgspec.Struct):
    """`text`."""

    format: TextFormat | None = None


class ResponsesBody(msgspec.Struct, kw_only=True):
    """The keys that we read; OpenAI's reference has their meanings."""

    input: str | list[Item]
    model: str | None = None
    instructions: str | None = None
    tools: Tools = absent()
    tool_choice: Anything = absent()
    parallel_tool_calls: bool | None = None
    stream: bool | None = None
    include: list[str] | None = None
    previous_response_id: str | None = None
    max_output_tokens: AtLeastOne | None = None
    temperature: NotNegative | None = None
    top_p: Share | None = None
    top_logprobs: NumTops | None = None
    text: TextOptions | None = None
    metadata: Anything = absent()
    client_metadata: Anything = absent()
    """Codex's word on itself; its keys come in another order in each resend of a turn."""


class _Heads(msgspec.Struct):
    input: str | list[ItemHead]


_decoder = msgspec.json.Decoder(ResponsesBody)
_heads = msgspec.json.Decoder(_Heads)


class ResponsesDialect:
    """Satisfies Dialect."""

    def decode(self, asked: Asked) -> Call:
        body = read_body(_decoder, asked.body, "responses request")
        raw_tools = present(body.tools)
        tools = tools_of_responses(raw_tools) if raw_tools else b""
        choice = as_choice(msgspec.json.decode(present(body.tool_choice) or b"null"))
        check_named(choice, tools)
        previous = body.previous_response_id or ""
        include = frozenset(body.include or ())
        lists = "message.output_text.logprobs" in include
        units, has_references = _units(body, asked)
        turn = Turn(
            messages=units,
            read=read_unit,
            spell_out=spell_out if has_references else None,
            tools=tools,
            tool_choice=choice,
            parallel_calls=body.parallel_tool_calls is not False,
            num_top_logprobs=(body.top_logprobs or 0) if lists else 0,
            previous_reply=previous.removeprefix(ID_PREFIX),
            begins_anew=bool(body.instructions),
            ask=_sampling(body),
            model=body.model or "",
            stream=bool(body.stream),
            logprobs=lists,
            digest=_digest(body, asked),
            is_retry=asked.is_retry,
            dialect="responses",
        )
        return ResponseCall(turn, _echo(body, raw_tools, include))

    def error(self, error: SessionError) -> bytes:
        return openai_failure_body(error)


def _digest(body: ResponsesBody, asked: Asked) -> int:
    told = present(body.client_metadata)
    return asked.digest_without(told) if told else asked.digest


def _units(body: ResponsesBody, asked: Asked) -> tuple[list[bytes], bool]:
    """The history units, and whether some name items of earlier responses."""
    units: list[bytes] = []
    if body.instructions:
        units.append(_text_unit("system", body.instructions))
    if isinstance(body.input, str):
        return [*units, _text_unit("user", body.input)], False
    heads = read_body(_heads, asked.body, "responses request").input
    assert not isinstance(heads, str)
    units += units_of(heads, body.input)
    if not units:
        raise refusal("invalid_input", "input: expected a text or at least one item")
    return units, any(head.is_reference for head in heads)


def _text_unit(role: str, text: str) -> bytes:
    return msgspec.json.encode([{"role": role, "content": text}])


def _sampling(body: ResponsesBody) -> SamplingAsk:
    return SamplingAsk(
        temperature=body.temperature,
        top_p=body.top_p,
        max_tokens=body.max_output_tokens,
        grammar=_grammar(body.text.format if body.text else None),
    )


def _grammar(form: TextFormat | None) -> Grammar | None:
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return Grammar("json_schema", ANY_OBJECT)
    if form.type == "json_schema":
        return Grammar("json_schema", schema_text(bytes(form.schema), "text.format.schema"))
    why = f"text.format: {form.type!r} is not text, json_object or json_schema"
    raise refusal("unsupported_response_format", why)


def _echo(body: ResponsesBody, raw_tools: bytes, include: frozenset[str]) -> Echo:
    return Echo(
        instructions=body.instructions,
        tools=raw_tools or b"[]",
        tool_choice=present(body.tool_choice) or b'"auto"',
        parallel_tool_calls=body.parallel_tool_calls is not False,
        previous_response_id=body.previous_response_id,
        max_output_tokens=body.max_output_tokens,
        metadata=present(body.metadata) or b"{}",
        seals_reasoning="reasoning.encrypted_content" in include,
    )
