"""What every driver shares: the task, the one tool, and the report on stdout.

A driver runs in its client's own environment, so this imports the standard library alone. Called as
`python driver.py BASE_URL API_KEY DIALECT plain|stream` in the folder of the task's files; its last
line is what the client saw. `play` of the drivers of this environment's own SDKs also runs in the
test's process.
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
    """What the test asked for."""
    base_url, api_key, dialect, mode = sys.argv[1:5]
    return Order(base_url, api_key, dialect, mode == "stream")


class Diary:
    """What the client saw of the model."""

    def __init__(self, work: Path) -> None:
        self._work = work
        self.calls: list[tuple[str, Any]] = []
        self.reasoning: list[str] = []
        self.final = ""

    def use(self, name: str, arguments: Any) -> str:
        """Run a call of the model's; its arguments as JSON text or read."""
        values = json.loads(arguments) if isinstance(arguments, str) else arguments
        self.calls.append((name, values))
        return self._bash(**values)

    def report(self) -> str:
        """What the test wants to know."""
        return json.dumps({"final": self.final, "calls": self.calls, "reasoning": self.reasoning})

    def close(self) -> None:
        """Say it to the test."""
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
