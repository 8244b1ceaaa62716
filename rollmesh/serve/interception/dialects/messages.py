"""Anthropic's Messages API, as it is asked: POST .../v1/messages, and its count_tokens.

Shapes as in Anthropic's API reference. Invariants: any anthropic-version and beta header will do;
unknown keys are accepted everywhere; messages stay unopened, and the system text is the first unit.
Driven by exchange.py through dialect.py; message_events.py writes the answers.
"""

from typing import Any

import msgspec
import orjson

from rollmesh.core.errors import SessionError
from rollmesh.core.types import Grammar
from rollmesh.runtime.chat import SamplingAsk, ToolChoice, Turn
from rollmesh.serve.interception.dialects.asks import (
    AtLeastOne,
    Int64,
    NotNegative,
    Share,
    schema_text,
)
from rollmesh.serve.interception.dialects.dialect import Asked, Call
from rollmesh.serve.interception.dialects.frames import present, read_body
from rollmesh.serve.interception.dialects.message_events import MessageCall, failure
from rollmesh.serve.interception.dialects.message_units import read_unit
from rollmesh.serve.interception.dialects.tools import as_choice, check_named, tools_of_messages
from rollmesh.serve.interception.dialects.unopened import (
    Messages,
    Schema,
    SystemText,
    Tools,
    absent,
    array_of,
)


class OutputFormat(msgspec.Struct):
    """`output_format`, and `output_config.format`."""

    schema: Schema = absent()


class OutputConfig(msgspec.Struct):
    """`output_config`."""

    format: OutputFormat | None = None


class MessagesBody(msgspec.Struct, kw_only=True):
    """The keys that we read; Anthropic's reference has their meanings."""

    messages: Messages
    model: str | None = None
    max_tokens: AtLeastOne | None = None
    system: SystemText = absent()
    tools: Tools = absent()
    tool_choice: Any = None
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: NotNegative | None = None
    top_p: Share | None = None
    top_k: Int64 | None = None
    output_format: OutputFormat | None = None
    output_config: OutputConfig | None = None


_decoder = msgspec.json.Decoder(MessagesBody)


class MessagesDialect:
    """Satisfies Dialect."""

    def decode(self, asked: Asked) -> Call:
        body = read_body(_decoder, asked.body, "messages request")
        system = present(body.system)
        units = [b'{"role":"system","content":%b}' % system] if system not in (b"", b'""') else []
        tools = present(body.tools)
        if tools:
            tools = tools_of_messages(tools)
        choice, is_parallel = _choice(body.tool_choice)
        check_named(choice, tools)
        turn = Turn(
            messages=units,
            messages_raw=array_of(body.messages, "messages"),
            read=read_unit,
            tools=tools,
            tool_choice=choice,
            parallel_calls=is_parallel,
            ask=_sampling(body),
            model=body.model or "",
            stream=bool(body.stream),
            digest=asked.digest,
            is_retry=asked.is_retry,
            dialect="messages",
        )
        return MessageCall(turn)

    def error(self, error: SessionError) -> bytes:
        return orjson.dumps(failure(error))


def _choice(asked: Any) -> tuple[ToolChoice, bool]:
    """The choice, and whether several calls may stand in one turn."""
    is_parallel = not (isinstance(asked, dict) and asked.get("disable_parallel_tool_use"))
    return as_choice(asked), is_parallel


def _sampling(body: MessagesBody) -> SamplingAsk:
    form = body.output_format or (body.output_config and body.output_config.format)
    grammar = None
    if form:
        text = schema_text(bytes(form.schema), "output_config.format.schema")
        grammar = Grammar("json_schema", text)
    return SamplingAsk(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        max_tokens=body.max_tokens,
        stop=tuple(filter(None, body.stop_sequences or ())),
        grammar=grammar,
    )
