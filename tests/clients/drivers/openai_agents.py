"""An openai-agents agent on either of its model classes; the framework keeps the history."""

import asyncio
from pathlib import Path
from typing import Any

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

from tests.clients.drivers.toolbox import QUESTION, SYSTEM, ClientLog, order


async def main() -> None:
    """Run the task once."""
    ask, log = order(), ClientLog(Path())
    set_tracing_disabled(True)

    @function_tool
    def bash(command: str, timeout: float) -> str:
        """Run a command in a shell and get what it prints."""
        return log.use("bash", {"command": command, "timeout": timeout})

    client = AsyncOpenAI(base_url=ask.base_url, api_key=ask.api_key, max_retries=0)
    kind: Any = OpenAIResponsesModel if ask.dialect == "responses" else OpenAIChatCompletionsModel
    agent = Agent("agent", instructions=SYSTEM, tools=[bash], model=kind("policy", client))
    if ask.stream:
        run: Any = Runner.run_streamed(agent, QUESTION)
        async for _ in run.stream_events():
            pass
    else:
        run = await Runner.run(agent, QUESTION)
    log.final = run.final_output
    log.close()


if __name__ == "__main__":
    asyncio.run(main())
