"""The anthropic SDK, used directly: Messages with tools; each turn counts its tokens before its
call.

The key is sent as `x-api-key` (0.x) or as Bearer (2.x), the default of each generation.
"""

from pathlib import Path
from typing import Any

import anthropic

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

TOOLS = [{"name": TOOL_NAME, "description": TOOL_TEXT, "input_schema": PARAMETERS}]


def messages(client: Any, stream: bool, log: ClientLog) -> None:
    """The assistant's blocks are sent back unchanged."""
    history: list[Any] = [{"role": "user", "content": QUESTION}]
    for _ in range(MAX_TURNS):
        body: dict[str, Any] = {"messages": history, "tools": TOOLS, "system": SYSTEM}
        counted = client.messages.count_tokens(model="policy", **body).input_tokens
        message = _once(client, stream, max_tokens=400, **body)
        usage = message.usage
        asked = usage.input_tokens + (usage.cache_read_input_tokens or 0)
        assert counted == asked, f"counted {counted} tokens, then asked with {asked}"
        history.append({"role": "assistant", "content": [b.model_dump() for b in message.content]})
        results = []
        for block in message.content:
            if block.type == "tool_use":
                result = log.use(block.name, block.input)
                results.append({"type": "tool_result", "tool_use_id": block.id, "content": result})
            elif block.type == "thinking":
                log.reasoning.append(block.thinking)
            else:
                log.final = block.text
        if message.stop_reason != "tool_use":
            return
        history.append({"role": "user", "content": results})


def _once(client: Any, stream: bool, **body: Any) -> Any:
    if not stream:
        return client.messages.create(model="policy", **body)
    with client.messages.stream(model="policy", **body) as events:
        for _ in events:
            pass
        return events.get_final_message()


def play(ask: Order, log: ClientLog) -> None:
    """Do the task."""
    root = ask.base_url.removesuffix("/v1")
    with anthropic.Anthropic(base_url=root, api_key=ask.api_key, max_retries=0) as client:
        messages(client, ask.stream, log)


if __name__ == "__main__":
    log = ClientLog(Path())
    play(order(), log)
    log.close()
