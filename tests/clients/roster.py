"""The clients: package and version, dialects, and start command of each.

A row of docs/reference/clients.md is one client in one dialect and mode. Clients of this
interpreter's environment (`home` '') run in `make test` too; the others are installed in
.venv-clients/HOME.
"""

import json
from collections.abc import Callable, Sequence
from typing import NamedTuple

from rollmesh.testing.engine import AgentReply, ToolUse
from tests.clients import harnesses
from tests.clients.harnesses import Command, Visit
from tests.clients.script import ANSWER, WriteUse, bash

CHAT, RESPONSES, LINKED, MESSAGES = "chat", "responses", "responses-linked", "messages"
PLAIN, STREAM = "plain", "stream"
TOKENS, RELAY = "tokens", "relay"


class Client(NamedTuple):
    """A client and its properties."""

    name: str
    package: str
    home: str
    dialects: tuple[str, ...]
    start: Callable[[Visit], Command]
    modes: tuple[str, ...] = (PLAIN, STREAM)
    use: WriteUse = bash
    """How the model calls this client's shell tool."""
    ending: AgentReply | None = None
    """The model's last turn, if it is not text."""
    reports: bool = True
    """Whether it is a driver of this repository, which reports what it saw."""
    sees_reasoning: bool = False
    """Whether its report has the model's reasoning."""
    num_asides: int = 0
    """Calls beside the task, such as for a title; each is its own branch."""


class Row(NamedTuple):
    """One task."""

    client: Client
    dialect: str
    mode: str
    capture: str = TOKENS

    @property
    def id(self) -> str:
        return f"{self.client.package}-{self.dialect}-{self.mode}-{self.capture}"


def _driver(home: str, script: str) -> Callable[[Visit], Command]:
    return lambda visit: harnesses.driver(visit, home, script)


def _described(command: str) -> ToolUse:
    return ToolUse("bash", json.dumps({"command": command, "description": "Look"}))


def _exec(command: str) -> ToolUse:
    return ToolUse("exec_command", json.dumps({"cmd": command}))


_SUBMIT = AgentReply(
    ANSWER, uses=(ToolUse("bash", '{"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}'),)
)
_OPENAI = (CHAT, RESPONSES, LINKED)
_ALL = (CHAT, RESPONSES, MESSAGES)

ROSTER = (
    Client(
        "openai SDK", "openai 3.52.0", "", _OPENAI, _driver("", "openai_sdk"), sees_reasoning=True
    ),
    Client(
        "openai SDK",
        "openai 2.54.0",
        "openai-2",
        _OPENAI,
        _driver("openai-2", "openai_sdk"),
        sees_reasoning=True,
    ),
    Client(
        "openai SDK",
        "openai 1.109.1",
        "openai-1",
        _OPENAI,
        _driver("openai-1", "openai_sdk"),
        sees_reasoning=True,
    ),
    Client(
        "anthropic SDK",
        "anthropic 2.11.0",
        "",
        (MESSAGES,),
        _driver("", "anthropic_sdk"),
        sees_reasoning=True,
    ),
    Client(
        "anthropic SDK",
        "anthropic 0.125.0",
        "anthropic-0",
        (MESSAGES,),
        _driver("anthropic-0", "anthropic_sdk"),
        sees_reasoning=True,
    ),
    Client(
        "litellm SDK",
        "litellm 1.106.2",
        "litellm",
        _ALL,
        _driver("litellm", "litellm_sdk"),
        sees_reasoning=True,
    ),
    Client(
        "langgraph agent",
        "langchain-openai 1.7.3, langchain-anthropic 1.7.7",
        "langchain",
        _ALL,
        _driver("langchain", "langgraph_agent"),
    ),
    Client(
        "pydantic-ai agent",
        "pydantic-ai-slim 2.68.0",
        "pydantic-ai",
        _ALL,
        _driver("pydantic-ai", "pydantic_agent"),
    ),
    Client(
        "openai-agents",
        "openai-agents 0.24.0",
        "openai-agents",
        (CHAT, RESPONSES),
        _driver("openai-agents", "openai_agents"),
    ),
    Client(
        "Vercel AI SDK",
        "ai 6.0.325, @ai-sdk/openai 3.0.141",
        "ai-sdk",
        (CHAT, RESPONSES),
        harnesses.ai_sdk,
    ),
    Client(
        "mini-swe-agent",
        "mini-swe-agent 2.4.6",
        "mini",
        (CHAT,),
        harnesses.mini,
        modes=(PLAIN,),
        ending=_SUBMIT,
        reports=False,
    ),
    Client(
        "pi",
        "@mariozechner/pi-coding-agent 0.73.1",
        "pi",
        _ALL,
        harnesses.pi,
        modes=(STREAM,),
        reports=False,
    ),
    Client(
        "codex",
        "@openai/codex 0.169.0",
        "codex",
        (RESPONSES,),
        harnesses.codex,
        modes=(STREAM,),
        use=_exec,
        reports=False,
    ),
    Client(
        "opencode",
        "opencode-ai 1.18.33",
        "opencode",
        _ALL,
        harnesses.opencode,
        modes=(STREAM,),
        use=_described,
        reports=False,
        num_asides=1,
    ),
)


def rows(clients: Sequence[Client] = ROSTER) -> list[Row]:
    """All tasks of these clients."""
    return [
        Row(client, dialect, mode)
        for client in clients
        for dialect in client.dialects
        for mode in client.modes
    ]


def relayed() -> list[Row]:
    """A row of each dialect and mode in relay mode, by the clients that read it most strictly."""
    strict = [each for each in ROSTER if each.name in ("anthropic SDK", "codex", "pi")]
    strict += [each for each in IN_HOUSE if each.name == "openai SDK"]
    return [row._replace(capture=RELAY) for row in rows(strict) if row.dialect != LINKED]


IN_HOUSE = tuple(client for client in ROSTER if not client.home)
