"""A langgraph agent on langchain-openai or langchain-anthropic; the framework keeps the history."""

from pathlib import Path
from typing import Any

from langchain_anthropic import ChatAnthropic
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent

from tests.clients.drivers.toolbox import QUESTION, SYSTEM, TOOL_TEXT, ClientLog, Order, order


def model(ask: Order) -> Any:
    """The chat model of the dialect."""
    if ask.dialect == "messages":
        root = ask.base_url.removesuffix("/v1")
        return ChatAnthropic(
            model="policy", base_url=root, api_key=ask.api_key, max_tokens=400, max_retries=0
        )
    return ChatOpenAI(
        model="policy",
        base_url=ask.base_url,
        api_key=ask.api_key,
        max_retries=0,
        use_responses_api=ask.dialect == "responses",
    )


def main() -> None:
    """Run the task once."""
    ask, log = order(), ClientLog(Path())

    @tool(description=TOOL_TEXT)
    def bash(command: str, timeout: float = 10.0) -> str:
        return log.use("bash", {"command": command, "timeout": timeout})

    agent = create_react_agent(model(ask), [bash], prompt=SYSTEM)
    asked = {"messages": [{"role": "user", "content": QUESTION}]}
    if ask.stream:
        for mode, event in agent.stream(asked, stream_mode=["messages", "values"]):
            if mode == "values":
                state = event
    else:
        state = agent.invoke(asked)
    log.final = state["messages"][-1].text
    log.close()


if __name__ == "__main__":
    main()
