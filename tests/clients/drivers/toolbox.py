"""Shared code of the drivers: the task, the one tool, and the report on stdout.

A driver runs in its client's own environment, so this imports only the standard library. It is
called as `python driver.py BASE_URL API_KEY DIALECT plain|stream` in the folder of the task's
files; its last line is the report of the model's output that the client saw. `play` of the drivers
of this environment's own SDKs also runs in the test's process.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

SYSTEM = "You are a careful agent with a shell."
QUESTION = "Which word do the notes hide?"
TOOL_NAME = "bash"
TOOL_TEXT = "Run a command in a shell and get what it prints."
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "command": {"type": "string", "description": "The command"},
        "timeout": {"type": "number", "description": "Seconds"},
    },
    "required": ["command"],
}
MAX_TURNS = 8


class Order(NamedTuple):
    """The command line of a driver."""

    base_url: str
    api_key: str
    dialect: str
    stream: bool


def order() -> Order:
    """Parse the command line."""
    base_url, api_key, dialect, mode = sys.argv[1:5]
    return Order(base_url, api_key, dialect, mode == "stream")


class ClientLog:
    """The model's output that the client saw."""

    def __init__(self, work: Path) -> None:
        self._work = work
        self.calls: list[tuple[str, Any]] = []
        self.reasoning: list[str] = []
        self.final = ""

    def use(self, name: str, arguments: Any) -> str:
        """Run a call of the model; its arguments are JSON text or already parsed."""
        values = json.loads(arguments) if isinstance(arguments, str) else arguments
        self.calls.append((name, values))
        return self._bash(**values)

    def report(self) -> str:
        """The report as JSON."""
        return json.dumps({"final": self.final, "calls": self.calls, "reasoning": self.reasoning})

    def close(self) -> None:
        """Print the report for the test."""
        sys.stdout.write(self.report() + "\n")

    def _bash(self, command: str, timeout: float = 10.0) -> str:
        done = subprocess.run(
            ["/bin/sh", "-c", command],
            cwd=self._work,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        return done.stdout + done.stderr
