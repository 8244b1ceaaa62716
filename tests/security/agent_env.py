"""An environment whose agent is a program with the stock OpenAI client, or with httpx only."""

import sys
from collections.abc import Iterator
from pathlib import Path

from rollmesh.core.types import Json, Score, Task
from rollmesh.envs.env import Transcript
from rollmesh.envs.harness import HarnessEnv

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


class Agent(HarnessEnv):
    """Two turns; the reward depends on the last answer, so that groups have a signal."""

    def __init__(self, kind: str, mark: str) -> None:
        """`mark` is an argument of the program, by which a test finds its process."""
        super().__init__(argv=[sys.executable, "-c", AGENTS[kind], mark], timeout_s=300)

    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        del split, seed
        number = 0
        while True:
            yield Task(id=f"t{number}")
            number += 1

    def collect(self, task: Task, work: Path) -> dict[str, Json]:
        del task
        return {"answer": (work / "answer.txt").read_text()}

    def score(self, task: Task, transcript: Transcript) -> Score:
        del task
        answer = str(transcript.data["answer"])
        return Score(float(sum(map(ord, answer)) % 2))
