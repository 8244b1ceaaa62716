"""The litellm SDK, used directly: its openai, responses and anthropic providers, one task each."""

import os
from pathlib import Path
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # otherwise the import fetches a list

import litellm

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


def chat(ask: Order, log: ClientLog) -> None:
    """`completion`: litellm translates if the provider is anthropic."""
    provider = "anthropic" if ask.dialect == "messages" else "openai"
    root = ask.base_url.removesuffix("/v1") if provider == "anthropic" else ask.base_url
    reach = {"model": f"{provider}/policy", "api_base": root, "api_key": ask.api_key}
    messages: list[Any] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": QUESTION},
    ]
    tools = [{"type": "function", "function": FUNCTION}]
    for _ in range(MAX_TURNS):
        body = {"messages": messages, "tools": tools, "max_tokens": 400, "stream": ask.stream}
        answer = litellm.completion(**reach, **body, num_retries=0)
        if ask.stream:
            answer = litellm.stream_chunk_builder(list(answer), messages=messages)
        message = answer.choices[0].message
        log.reasoning.append(getattr(message, "reasoning_content", None) or "")
        messages.append(message.model_dump())
        if not message.tool_calls:
            log.final = message.content
            return
        for call in message.tool_calls:
            result = log.use(call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def responses(ask: Order, log: ClientLog) -> None:
    """`responses`: items are sent back unchanged."""
    items: list[Any] = [{"role": "user", "content": QUESTION}]
    tools = [{"type": "function", **FUNCTION}]
    for _ in range(MAX_TURNS):
        response: Any = litellm.responses(
            model="openai/policy",
            api_base=ask.base_url,
            api_key=ask.api_key,
            instructions=SYSTEM,
            input=items,
            tools=tools,
            stream=ask.stream,
        )
        if ask.stream:
            done = [event for event in response if event.type == "response.completed"]
            response = done[-1].response
        calls = []
        for item in response.output:
            read = item if isinstance(item, dict) else item.model_dump(exclude_none=True)
            items.append(read)
            if read["type"] == "function_call":
                calls.append(read)
            elif read["type"] == "reasoning":
                parts = read.get("content") or read["summary"]
                log.reasoning.append("".join(part["text"] for part in parts))
            elif read["type"] == "message":
                log.final = read["content"][0]["text"]
        if not calls:
            return
        for call in calls:
            result = log.use(call["name"], call["arguments"])
            items.append(
                {"type": "function_call_output", "call_id": call["call_id"], "output": result}
            )


def main() -> None:
    """Run the task once."""
    ask, log = order(), ClientLog(Path())
    (responses if ask.dialect == "responses" else chat)(ask, log)
    log.close()


if __name__ == "__main__":
    main()
