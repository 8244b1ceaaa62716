"""Scripts that replace the model in the examples: they read the conversation and win.

Each is a Script of rollmesh/testing/engine.py.
"""

import json
import re
import shlex

from examples.bugs.functions import FUNCTIONS
from examples.words.server import WORDS, marks
from rollmesh.testing.engine import AgentContext, AgentReply, ToolUse

ANSWERS = {
    "17 + 25": "42",
    "closest to the sun": "Mercury",
    "Na?": "Sodium",
    "desserts": "stressed",
}
PATH = ("down", "down", "right", "right", "down", "right")
"""The way around the holes of the lake."""


def quiz(scene: AgentContext) -> AgentReply:
    """Answer the question."""
    question = messages_of(scene, "user")[-1]
    return AgentReply(next(answer for clue, answer in ANSWERS.items() if clue in question))


def bank(scene: AgentContext) -> AgentReply:
    """Query the balances, transfer them, and confirm."""
    question = messages_of(scene, "user")[0]
    heir, others = re.findall(r"(\w+) inherits all that ([\w ]+) have", question)[0]
    owners = others.split(" and ")
    if scene.num_called == 0:
        return AgentReply(
            uses=tuple(ToolUse("balance", json.dumps({"account": each})) for each in owners)
        )
    if scene.num_called == 1:
        balances = re.findall(r"\d+", " ".join(results(scene)))
        moves = (
            {"source": owner, "target": heir, "cents": int(cents)}
            for owner, cents in zip(owners, balances, strict=True)
        )
        return AgentReply(
            "Now I move it.", uses=tuple(ToolUse("transfer", json.dumps(m)) for m in moves)
        )
    assert results(scene)[-1].count("done") == len(owners)
    return AgentReply("It is done.")


def lake(scene: AgentContext) -> AgentReply:
    """Return the next step of the path."""
    return AgentReply(PATH[len(messages_of(scene, "assistant"))])


def words(scene: AgentContext) -> AgentReply:
    """Return a word that fits the feedback so far."""
    guesses = messages_of(scene, "assistant")
    feedback = [text.split()[0] for text in messages_of(scene, "user")[1:]]
    pairs = [*zip(guesses, feedback, strict=True)]
    return AgentReply(
        next(w for w in WORDS if all(marks(guess, w) == mark for guess, mark in pairs))
    )


def bugs(scene: AgentContext) -> AgentReply:
    """Read the file, rewrite it, and confirm."""
    name = _function_name(scene)
    if scene.num_called == 0:
        return AgentReply("I look.", uses=(_bash(f"cat {name}.py"),))
    if scene.num_called == 1:
        assert f"def {name}" in results(scene)[-1]
        return AgentReply("I see.", uses=(_bash(f"printf %s {_source(name)} > {name}.py"),))
    return AgentReply("It keeps its promise now.")


def mini(scene: AgentContext) -> AgentReply:
    """Do the same as `bugs`, but finish with the command that mini-swe-agent expects."""
    if scene.num_called < 2:
        return bugs(scene)
    return AgentReply("Done.", uses=(_bash("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),))


def messages_of(scene: AgentContext, role: str) -> list[str]:
    """Messages of one role, without results of tools."""
    return [t.strip() for r, t in scene.turns if r == role and "<tool_response>" not in t]


def results(scene: AgentContext) -> list[str]:
    """Results of tools, in order."""
    return [text for _, text in scene.turns if "<tool_response>" in text]


def _function_name(scene: AgentContext) -> str:
    found = re.search(r"The function in (\w+)\.py", " ".join(messages_of(scene, "user")))
    assert found
    return found[1]


def _source(name: str) -> str:
    return shlex.quote(next(each.source for each in FUNCTIONS if each.name == name))


def _bash(command: str) -> ToolUse:
    return ToolUse("bash", json.dumps({"command": command}))
