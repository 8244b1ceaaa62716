"""The openai SDK, used directly: Chat Completions and Responses, histories kept by the caller.

`responses` resends all items, `responses-linked` sends only new items and names the previous
response (`previous_response_id`).
"""

from pathlib import Path
from typing import Any

import openai

from tests.clients.drivers.toolbox import (
    MAX_TURNS,
    PARAMETERS,
    QUESTION,
    SYSTEM,
    TOOL_NAME,
    TOOL_TEXT,
    ClientLog,
    Order,
    order,
)

FUNCTION = {"name": TOOL_NAME, "description": TOOL_TEXT, "parameters": PARAMETERS}


def chat(client: Any, ask: Order, log: ClientLog) -> None:
    """The assistant's message is sent back unchanged."""
    messages: list[Any] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": QUESTION},
    ]
    tools = [{"type": "function", "function": FUNCTION}]
    for _ in range(MAX_TURNS):
        message = _chat_once(client, ask.stream, messages=messages, tools=tools)
        log.reasoning.append(getattr(message, "reasoning_content", None) or "")
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            log.final = message.content
            return
        for call in message.tool_calls:
            result = log.use(call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def _chat_once(client: Any, stream: bool, **body: Any) -> Any:
    if not stream:
        return client.chat.completions.create(model="policy", **body).choices[0].message
    # The SDK's own accumulator is the strictest reader of chunks.
    with client.chat.completions.stream(model="policy", **body) as events:
        for _ in events:
            pass
        return events.get_final_completion().choices[0].message


def responses(client: Any, ask: Order, log: ClientLog) -> None:
    """The items of a response are sent back unchanged, or named."""
    linked = ask.dialect == "responses-linked"
    items: list[Any] = [{"role": "user", "content": QUESTION}]
    tools = [{"type": "function", **FUNCTION}]
    before: dict[str, Any] = {}
    for _ in range(MAX_TURNS):
        response = _respond_once(
            client, ask.stream, input=items, tools=tools, instructions=SYSTEM, **before
        )
        if linked:
            items, before = [], {"previous_response_id": response.id}
        calls = []
        for item in response.output:
            if not linked:
                items.append(item.model_dump(exclude_none=True))
            if item.type == "function_call":
                calls.append(item)
            elif item.type == "reasoning":
                log.reasoning.append("".join(p.text for p in item.content or item.summary))
        if not calls:
            log.final = response.output_text
            return
        for call in calls:
            result = log.use(call.name, call.arguments)
            items.append(
                {"type": "function_call_output", "call_id": call.call_id, "output": result}
            )


def _respond_once(client: Any, stream: bool, **body: Any) -> Any:
    if not stream:
        return client.responses.create(model="policy", **body)
    with client.responses.stream(model="policy", **body) as events:
        for _ in events:
            pass
        return events.get_final_response()


def play(ask: Order, log: ClientLog) -> None:
    """Do the task."""
    with openai.OpenAI(base_url=ask.base_url, api_key=ask.api_key, max_retries=0) as client:
        (chat if ask.dialect == "chat" else responses)(client, ask, log)


if __name__ == "__main__":
    log = ClientLog(Path())
    play(order(), log)
    log.close()
