"""The scripted model of a client's task, and the files of the task.

Three turns: a call, two calls at once, the answer. Harnesses are known to change its kinds of
spacing, numbers, letters and outer white space when they send a turn back.
"""

import json
from collections.abc import Callable
from pathlib import Path

from rollmesh.testing.engine import AgentReply, AgentScript, ToolUse, steps

COMMANDS = ("ls", "cat notes.txt", "cat 'caf\u00e9.txt'")
ANSWER = "The notes hide the word zebra \U0001f993."
REASONINGS = ("The folder first:  what is in it?", "Both files, then.", "")
TITLE = "Hidden words"

WriteUse = Callable[[str], ToolUse]
"""Makes a call of the client's own tool from a shell command."""


def write_files(folder: Path) -> None:
    """The working directory of a task."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "notes.txt").write_text("zebra\n")
    (folder / "caf\u00e9.txt").write_text("closed \u2615\n")


def bash(command: str) -> ToolUse:
    """A call of the drivers' tool; most harnesses write its arguments back with other spacing."""
    return ToolUse("bash", f'{{"command":   {json.dumps(command)}, "timeout": 5.0}}')


def task(use: WriteUse = bash, answer: AgentReply | None = None) -> AgentScript:
    """The three turns; `answer` is for clients that do not end with text."""
    look, *read = map(use, COMMANDS)
    return steps(
        AgentReply("Let me look\u2026", reasoning=REASONINGS[0], uses=(look,)),
        AgentReply("", reasoning=REASONINGS[1], uses=tuple(read)),
        answer or AgentReply(f" {ANSWER}\n"),
        aside=AgentReply(TITLE),
    )
