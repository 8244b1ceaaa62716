"""Environments that converse with the model, over many turns or one.

    begin --> the model answers --> respond --None--> OVER --> finish --> Transcript --> score
                    ^                  +--messages, turns left--+
                    +-------------------------------------------+
    OVER by a limit (max_turns, the context, an answer cut at its end) is `truncated`

- The model's messages return to the history unchanged, so that the session recognises its own
  samples.
- `finish` runs once for each `begin`, whatever happens. Truncated answers are scored too.
"""

import abc
from collections.abc import Awaitable, Sequence
from typing import Any

import msgspec

from rollmesh.core.errors import ContextFull, EnvError
from rollmesh.core.types import Json, Score, Task
from rollmesh.envs.calls import call_hook
from rollmesh.envs.chat import ChatClient, ChatReply, Message
from rollmesh.envs.env import Endpoint, Env, Transcript

Prompt = str | Sequence[Message]
"""Text of a user's message, or whole messages."""


class Talk(msgspec.Struct, kw_only=True):
    """State of one rollout's conversation."""

    messages: list[Message] = []
    num_turns: int = 0
    """Answers of the model so far."""
    answer: str = ""
    """Text of the last answer."""
    data: dict[str, Json] = {}
    """JSON values that `score` finds in the transcript."""
    truncated: bool = False
    """True if a limit, not the model or the task, ends it; `respond` may set it too."""
    held: Any = None
    """State that is not JSON: an open game, a connection; `finish` releases it."""


class MultiTurnEnv(Env):
    """Base of multi-turn environments; subclasses add `tasks`, `respond` and `score`.

    Each of `begin`, `respond` and `finish` may be `async def`; plain ones run in a thread.
    """

    def __init__(self, *, max_turns: int = 16, max_tokens: int = 0, system: str = "") -> None:
        """`max_tokens` limits one answer, 0 leaves it to the session; `system` starts each
        conversation."""
        if max_turns < 1 or max_tokens < 0:
            raise EnvError("max_turns must be at least 1, and max_tokens not negative")
        self.max_turns = max_turns
        self._fields: dict[str, Json] = {"max_tokens": max_tokens} if max_tokens else {}
        self._system: list[Message] = [{"role": "system", "content": system}] if system else []
        self._chat = ChatClient()

    def begin(self, task: Task, talk: Talk) -> Prompt | Awaitable[Prompt]:
        """Return the opening message. Default: the task's `question`."""
        del talk
        return str(task.data["question"])

    @abc.abstractmethod
    def respond(
        self, task: Task, talk: Talk, reply: ChatReply
    ) -> Prompt | Awaitable[Prompt | None] | None:
        """Return the answer to the model's message; None ends the conversation."""

    def finish(self, task: Task, talk: Talk) -> Awaitable[None] | None:
        """Release `talk.held`, if `begin` set it. Default: nothing."""
        del task, talk
        return None

    def fields(self, talk: Talk) -> dict[str, Json]:
        """Return additional fields of each request's body."""
        del talk
        return self._fields

    async def run(self, task: Task, agent: Endpoint) -> Transcript:
        """Run one conversation; its transcript has `talk.data`, `messages`, `num_turns`,
        `answer`."""
        talk = Talk()
        try:
            await self._converse(task, talk, agent)
        finally:
            await call_hook(self.finish, task, talk)
        own = {"messages": talk.messages, "num_turns": talk.num_turns, "answer": talk.answer}
        return Transcript(data={**own, **talk.data}, truncated=talk.truncated)

    async def _converse(self, task: Task, talk: Talk, agent: Endpoint) -> None:
        talk.messages = [*self._system]
        prompt: Prompt | None = await call_hook(self.begin, task, talk)
        while prompt is not None:
            if talk.num_turns == self.max_turns:
                talk.truncated = True
                return
            talk.messages += as_messages(prompt)
            try:
                reply = await self._chat.complete(agent, talk.messages, **self.fields(talk))
            except ContextFull:
                talk.truncated = True
                return
            talk.messages.append(reply.message)
            talk.num_turns += 1
            talk.answer = reply.text
            prompt = await call_hook(self.respond, task, talk, reply)
            if prompt is None and reply.finish_reason == "length":
                talk.truncated = True

    async def close(self) -> None:
        """Close the agent's connections."""
        await self._chat.close()


def as_messages(prompt: Prompt) -> list[Message]:
    """Return text as a user's message, and messages unchanged."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*prompt]


class SingleTurnEnv(MultiTurnEnv):
    """Base of environments with one question and one answer; subclasses add `tasks` and `grade`.

    The question is the task's `question`, unless `begin` is overridden.
    """

    def __init__(self, *, max_tokens: int = 0, system: str = "") -> None:
        super().__init__(max_turns=1, max_tokens=max_tokens, system=system)

    @abc.abstractmethod
    def grade(self, task: Task, answer: str) -> float | Score | Awaitable[float | Score]:
        """Return the reward of an answer; a plain method runs in a thread."""

    async def respond(self, task: Task, talk: Talk, reply: ChatReply) -> None:
        """End after the first answer."""
        del task, talk, reply

    async def score(self, task: Task, transcript: Transcript) -> Score:
        """Return the grade of the answer."""
        answer = str(transcript.data["answer"])
        graded: float | Score = await call_hook(self.grade, task, answer)
        return graded if isinstance(graded, Score) else Score(graded)
