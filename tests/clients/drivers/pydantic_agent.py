"""A pydantic-ai agent on each of its three model classes; the framework keeps the history."""

import asyncio
from pathlib import Path
from typing import Any

from pydantic_ai import Agent, AgentRunResultEvent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

from tests.clients.drivers.toolbox import QUESTION, SYSTEM, ClientLog, Order, order


def model(ask: Order) -> Any:
    """The model class of the dialect."""
    if ask.dialect == "messages":
        root = ask.base_url.removesuffix("/v1")
        provider: Any = AnthropicProvider(api_key=ask.api_key, base_url=root)
        return AnthropicModel("policy", provider=provider)
    provider = OpenAIProvider(base_url=ask.base_url, api_key=ask.api_key)
    kind = OpenAIResponsesModel if ask.dialect == "responses" else OpenAIChatModel
    return kind("policy", provider=provider)


async def main() -> None:
    """Run the task once."""
    ask, log = order(), ClientLog(Path())
    agent = Agent(model(ask), system_prompt=SYSTEM)

    @agent.tool_plain(sequential=True)
    def bash(command: str, timeout: float = 10.0) -> str:
        """Run a command in a shell and get what it prints."""
        return log.use("bash", {"command": command, "timeout": timeout})

    if ask.stream:
        async with agent.run_stream_events(QUESTION) as events:
            async for event in events:
                if isinstance(event, AgentRunResultEvent):
                    log.final = event.result.output
    else:
        log.final = (await agent.run(QUESTION)).output
    log.close()


if __name__ == "__main__":
    asyncio.run(main())
