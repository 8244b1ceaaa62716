"""OpenAI's Chat Completions API, as it is asked: POST .../v1/chat/completions.

Shapes as in OpenAI's API reference (create chat completion), `return_token_ids` as vLLM has it,
`functions` and `function_call` as they were before tools. Invariant: unknown keys are accepted
everywhere, and messages stay unopened: the session reads those that it does not hold. Driven by
exchange.py through dialect.py; chat_answers.py writes the answers.
"""

from typing import Any

import msgspec
import orjson

from rollmesh.core.errors import SessionError
from rollmesh.core.memo import Memo
from rollmesh.runtime.chat import Call as ToolCall
from rollmesh.runtime.chat import ChatMessage, Function, ToolChoice, Turn, read_message
from rollmesh.serve.interception.dialects.asks import AtLeastOne, NumTops, SamplingBody
from rollmesh.serve.interception.dialects.chat_answers import ChatCall
from rollmesh.serve.interception.dialects.dialect import Asked, Call
from rollmesh.serve.interception.dialects.failures import openai_failure_body
from rollmesh.serve.interception.dialects.frames import present, read_body, refusal
from rollmesh.serve.interception.dialects.tools import as_choice, check_named
from rollmesh.serve.interception.dialects.unopened import ChatMessages, Tools, absent, array_of


class ChatBody(SamplingBody, kw_only=True):
    """The keys that we read beside those of sampling."""

    messages: ChatMessages
    tools: Tools = absent()
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    functions: Tools = absent()
    function_call: Any = None
    max_completion_tokens: AtLeastOne | None = None
    logprobs: bool | None = None
    top_logprobs: NumTops | None = None


class _LegacyMessage(msgspec.Struct):
    function_call: Function | None = None


_decoder = msgspec.json.Decoder(ChatBody)


class ChatDialect:
    """Satisfies Dialect."""

    def decode(self, asked: Asked) -> Call:
        body = read_body(_decoder, asked.body, "chat completion request")
        tools, choice, is_legacy = _tools(body)
        turn = Turn(
            messages=[],
            messages_raw=array_of(body.messages, "messages"),
            read=_read_legacy if is_legacy else None,
            tools=tools,
            tool_choice=choice,
            parallel_calls=body.parallel_tool_calls is not False and not is_legacy,
            num_choices=body.n or 1,
            num_top_logprobs=(body.top_logprobs or 0) if body.logprobs else 0,
            ask=body.ask(body.max_completion_tokens or body.max_tokens),
            model=body.model or "",
            stream=bool(body.stream),
            include_usage=body.includes_usage,
            logprobs=bool(body.logprobs),
            return_token_ids=bool(body.return_token_ids),
            digest=asked.digest,
            is_retry=asked.is_retry,
            dialect="chat",
        )
        return ChatCall(turn, is_legacy)

    def error(self, error: SessionError) -> bytes:
        return openai_failure_body(error)


_AUTO = ToolChoice()


def _tools(body: ChatBody) -> tuple[bytes, ToolChoice, bool]:
    """Tools in today's shape, the choice among them, and whether they came as `functions`."""
    if body.tool_choice is None and not body.functions:
        return present(body.tools), _AUTO, False
    tools, functions = present(body.tools), present(body.functions)
    is_legacy = bool(functions) and not tools
    if is_legacy:
        tools = _from_functions(functions)
    asked = body.function_call if is_legacy else body.tool_choice
    choice = as_choice(asked)
    check_named(choice, tools)
    return tools, choice, is_legacy


@Memo
def _from_functions(functions: bytes) -> bytes:
    try:
        each = msgspec.json.decode(functions, type=list[dict[str, Any]])
    except msgspec.MsgspecError as error:
        raise refusal("invalid_tools", f"functions: {error}") from None
    return orjson.dumps([{"type": "function", "function": function} for function in each])


def _read_legacy(raw: bytes, position: int) -> list[ChatMessage]:
    """A message of an agent that knows functions: its call is a tool call without an id."""
    message = read_message(raw, position)
    call = msgspec.json.decode(raw, type=_LegacyMessage).function_call
    if call is not None and message.role == "assistant":
        message.tool_calls = [*(message.tool_calls or ()), ToolCall(call)]
    return [message]
