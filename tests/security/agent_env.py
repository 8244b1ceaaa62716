"""Environments whose agent is a program: one with the stock OpenAI client, one with httpx only, and
mini-swe-agent as it is published.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from examples.bugs.env import MINI_CONFIG, MINI_ENV
from rollmesh.core.types import Json, Score, Task
from rollmesh.envs.env import Transcript
from rollmesh.envs.harness import HarnessEnv
from tests.clients.harnesses import VENVS

OPENAI = """
from openai import OpenAI
client = OpenAI()
def call(messages):
    answer = client.chat.completions.create(model="policy", messages=messages)
    return answer.choices[0].message.content
"""
HTTPX = """
import os, httpx
client = httpx.Client(
    base_url=os.environ["OPENAI_BASE_URL"],
    headers={"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
    timeout=300,
)
def call(messages):
    answer = client.post("/chat/completions", json={"model": "policy", "messages": messages})
    return answer.raise_for_status().json()["choices"][0]["message"]["content"]
"""
TURNS = """
messages = [{"role": "user", "content": "Guess a number from 1 to 7."}]
for _ in range(2):
    messages.append({"role": "assistant", "content": call(messages)})
    messages.append({"role": "user", "content": "higher"})
open("answer.txt", "w").write(messages[-2]["content"])
"""
AGENTS = {"openai": OPENAI + TURNS, "httpx": HTTPX + TURNS}
MINI = VENVS / "mini/bin/mini"
SYSTEM, QUESTION = "You have a shell.", "Write a number from 1 to 7 into answer.txt."
"""Prompts of mini-swe-agent; its own are too long for a tiny model."""


class AnswerFileEnv(HarnessEnv):
    """The reward depends on the text that the agent leaves, so that groups have a signal."""

    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        del split, seed
        number = 0
        while True:
            yield Task(id=f"t{number}")
            number += 1

    def collect(self, task: Task, work: Path) -> dict[str, Json]:
        del task
        answer = work / "answer.txt"
        return {"answer": answer.read_text() if answer.exists() else ""}

    def score(self, task: Task, transcript: Transcript) -> Score:
        del task
        answer = str(transcript.data["answer"])
        return Score(float(sum(map(ord, answer)) % 2), {"has_answer": float(bool(answer))})


class Agent(AnswerFileEnv):
    """Two turns without tools."""

    def __init__(self, kind: str, mark: str) -> None:
        """`mark` is an argument of the program, by which a test finds its process."""
        super().__init__(argv=[sys.executable, "-c", AGENTS[kind], mark], timeout_s=300)


class MiniAgent(AnswerFileEnv):
    """mini-swe-agent, which runs the model's tool calls until one submits."""

    def __init__(self, mark: str) -> None:
        """`mark` is the task in the program's arguments; the prompt does not contain it."""
        prompts = (f"agent.system_template={SYSTEM}", f"agent.instance_template={QUESTION}")
        configs = ("{home}/gateway.yaml", *prompts, "agent.step_limit=4")
        words = [word for config in configs for word in ("-c", config)]
        super().__init__(
            argv=[str(MINI), *words, "-t", mark, "-y", "--exit-immediately"],
            files={"gateway.yaml": MINI_CONFIG},
            env=MINI_ENV,
            timeout_s=300,
        )
