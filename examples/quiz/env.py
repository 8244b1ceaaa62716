"""Questions from a file, each with its accepted answers: the smallest environment.

The reward is 1 if the last word of the model's answer is an accepted one, ignoring case, else 0.
"""

import re
from collections.abc import Iterator

from rollmesh import SingleTurnEnv, Task, read_tasks, rounds


class QuizEnv(SingleTurnEnv):
    """`path`: a file of lines such as {"id": "1", "question": "2 + 2?", "answers": ["4"]}."""

    def __init__(self, *, path: str = "examples/quiz/questions.jsonl") -> None:
        super().__init__(max_tokens=256, system="Answer with one word.")
        self._tasks = read_tasks(path)

    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        """Return the questions of the file."""
        return rounds(self._tasks, split, seed)

    async def grade(self, task: Task, answer: str) -> float:
        """Return 1 if the last word is correct."""
        words = re.findall(r"\w+", answer.lower())
        return float(bool(words) and words[-1] in task.data["answers"])
