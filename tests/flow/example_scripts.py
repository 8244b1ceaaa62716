"""What a model would have to say in the examples: scripts that read what they are told, and win.

Each is a Script of rollmesh/testing/engine.py. Driven by test_envs.py and by the test of
mini-swe-agent in tests/clients.
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
"""Over the lake, around its holes."""


def quiz(scene: AgentContext) -> AgentReply:
    """The answer to the question."""
    question = said(scene, "user")[-1]
    return AgentReply(next(answer for words, answer in ANSWERS.items() if words in question))


def bank(scene: AgentContext) -> AgentReply:
    """Ask what the others have, move that, and say so."""
    question = said(scene, "user")[0]
    heir, others = re.findall(r"(\w+) inherits all that ([\w ]+) have", question)[0]
    owners = others.split(" and ")
    if scene.num_called == 0:
        return AgentReply(
            uses=tuple(ToolUse("balance", json.dumps({"account": each})) for each in owners)
        )
    if scene.num_called == 1:
        told = re.findall(r"\d+", " ".join(results(scene)))
        moves = (
            {"source": owner, "target": heir, "cents": int(cents)}
            for owner, cents in zip(owners, told, strict=True)
        )
        return AgentReply(
            "Now I move it.", uses=tuple(ToolUse("transfer", json.dumps(m)) for m in moves)
        )
    assert results(scene)[-1].count("done") == len(owners)
    return AgentReply("It is done.")


def lake(scene: AgentContext) -> AgentReply:
    """The next step of the path."""
    return AgentReply(PATH[len(said(scene, "assistant"))])


def words(scene: AgentContext) -> AgentReply:
    """A word that fits all that was told."""
    guesses = said(scene, "assistant")
    told = [text.split()[0] for text in said(scene, "user")[1:]]
    pairs = [*zip(guesses, told, strict=True)]
    return AgentReply(
        next(w for w in WORDS if all(marks(guess, w) == mark for guess, mark in pairs))
    )


def bugs(scene: AgentContext) -> AgentReply:
    """Look at the file, write it anew, and say so."""
    name = _function_name(scene)
    if scene.num_called == 0:
        return AgentReply("I look.", uses=(_bash(f"cat {name}.py"),))
    if scene.num_called == 1:
        assert f"def {name}" in results(scene)[-1]
        return AgentReply("I see.", uses=(_bash(f"printf %s {_source(name)} > {name}.py"),))
    return AgentReply("It keeps its promise now.")


def mini(scene: AgentContext) -> AgentReply:
    """The same in the way of mini-swe-agent, which ends by a command."""
    if scene.num_called < 2:
        return bugs(scene)
    return AgentReply("Done.", uses=(_bash("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),))


def said(scene: AgentContext, role: str) -> list[str]:
    """What one side has said, results of tools apart."""
    return [t.strip() for r, t in scene.turns if r == role and "<tool_response>" not in t]


def results(scene: AgentContext) -> list[str]:
    """What the tools have said, turn by turn."""
    return [text for _, text in scene.turns if "<tool_response>" in text]


def _function_name(scene: AgentContext) -> str:
    found = re.search(r"The function in (\w+)\.py", " ".join(said(scene, "user")))
    assert found
    return found[1]


def _source(name: str) -> str:
    return shlex.quote(next(each.source for each in FUNCTIONS if each.name == name))


def _bash(command: str) -> ToolUse:
    return ToolUse("bash", json.dumps({"command": command}))
