"""One question, one answer, one reward.

Invariant: an answer that a limit cut short is scored too, and its outcome is `truncated`. Driven by
the worker; users derive from it.
"""

import abc
from collections.abc import Awaitable

from rollmesh.core.types import Score, Task
from rollmesh.envs.chat import ChatReply
from rollmesh.envs.env import Transcript
from rollmesh.envs.hooks import call_hook
from rollmesh.envs.multi_turn import MultiTurnEnv, Talk


class SingleTurnEnv(MultiTurnEnv):
    """A class of the user's own adds `tasks` and `grade`.

    The question is the task's `question`; `begin` of a class may make another of it.
    """

    def __init__(self, *, max_tokens: int = 0, system: str = "") -> None:
        super().__init__(max_turns=1, max_tokens=max_tokens, system=system)

    @abc.abstractmethod
    def grade(self, task: Task, answer: str) -> float | Score | Awaitable[float | Score]:
        """The reward of an answer; `async def` where it waits, else it runs in a thread."""

    async def respond(self, task: Task, talk: Talk, reply: ChatReply) -> None:
        """The first answer is the last."""
        del task, talk, reply

    async def score(self, task: Task, transcript: Transcript) -> Score:
        """The grade of the answer."""
        answer = str(transcript.data["answer"])
        graded: float | Score = await call_hook(self.grade, task, answer)
        return graded if isinstance(graded, Score) else Score(graded)
