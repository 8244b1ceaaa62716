"""A conversation: the environment opens, the model speaks, the environment answers, and so on.

    begin --> the model speaks --> respond --None--> OVER --> finish --> Transcript --> score
                    ^                 +--messages, turns left--+
                    +------------------------------------------+
    OVER by a limit (max_turns, the context, an answer cut at its end) is `truncated`

Invariants: the model's messages go back into the history as they came, so that the session finds
what it sampled; `finish` runs once for every `begin`, whatever happened. Driven by the worker;
users derive from it.
"""

import abc
from collections.abc import Awaitable, Sequence
from typing import Any

import msgspec

from rollmesh.core.errors import ContextFull, EnvError
from rollmesh.core.types import Json, Task
from rollmesh.envs.chat import ChatClient, ChatReply, Message
from rollmesh.envs.env import Endpoint, Env, Transcript
from rollmesh.envs.hooks import call_hook

Words = str | Sequence[Message]
"""What an environment says: the text of a user's message, or whole messages."""


class Talk(msgspec.Struct, kw_only=True):
    """One rollout's conversation under way."""

    messages: list[Message] = []
    num_turns: int = 0
    """Answers of the model so far."""
    answer: str = ""
    """The text of the last one."""
    data: dict[str, Json] = {}
    """JSON; `score` finds it in the transcript."""
    truncated: bool = False
    """True where a limit, and not the model or the task, ends it; `respond` may set it too."""
    held: Any = None
    """What is not JSON: an open game, a connection; `finish` gives it back."""


class MultiTurnEnv(Env):
    """A class of the user's own adds `tasks`, `respond` and `score`.

    Each of `begin`, `respond` and `finish` may be `async def`; plain ones run in a thread.
    """

    def __init__(self, *, max_turns: int = 16, max_tokens: int = 0, system: str = "") -> None:
        """`max_tokens` is for one answer, 0 leaves it to the session; `system` opens every talk."""
        if max_turns < 1 or max_tokens < 0:
            raise EnvError("max_turns must be at least 1, and max_tokens not negative")
        self.max_turns = max_turns
        self._fields: dict[str, Json] = {"max_tokens": max_tokens} if max_tokens else {}
        self._system: list[Message] = [{"role": "system", "content": system}] if system else []
        self._chat = ChatClient()

    def begin(self, task: Task, talk: Talk) -> Words | Awaitable[Words]:
        """The opening words. Default: the task's `question`."""
        del talk
        return str(task.data["question"])

    @abc.abstractmethod
    def respond(
        self, task: Task, talk: Talk, reply: ChatReply
    ) -> Words | Awaitable[Words | None] | None:
        """The answer to what the model said; None ends the conversation."""

    def finish(self, task: Task, talk: Talk) -> Awaitable[None] | None:
        """Give back what `talk.held` holds, if `begin` got that far. Default: nothing to do."""
        del task, talk
        return None

    def fields(self, talk: Talk) -> dict[str, Json]:
        """What goes into the body of each request beside the messages."""
        del talk
        return self._fields

    async def run(self, task: Task, agent: Endpoint) -> Transcript:
        """One conversation; its transcript has `talk.data`, `messages`, `num_turns`, `answer`."""
        talk = Talk()
        try:
            await self._converse(task, talk, agent)
        finally:
            await call_hook(self.finish, task, talk)
        said = {"messages": talk.messages, "num_turns": talk.num_turns, "answer": talk.answer}
        return Transcript(data={**said, **talk.data}, truncated=talk.truncated)

    async def _converse(self, task: Task, talk: Talk, agent: Endpoint) -> None:
        talk.messages = [*self._system]
        words: Words | None = await call_hook(self.begin, task, talk)
        while words is not None:
            if talk.num_turns == self.max_turns:
                talk.truncated = True
                return
            talk.messages += as_messages(words)
            try:
                reply = await self._chat.complete(agent, talk.messages, **self.fields(talk))
            except ContextFull:
                talk.truncated = True
                return
            talk.messages.append(reply.message)
            talk.num_turns += 1
            talk.answer = reply.text
            words = await call_hook(self.respond, task, talk, reply)
            if words is None and reply.finish_reason == "length":
                talk.truncated = True

    async def close(self) -> None:
        """Close the agent's connections."""
        await self._chat.close()


def as_messages(words: Words) -> list[Message]:
    """A text as a user's message; messages as they are."""
    return [{"role": "user", "content": words}] if isinstance(words, str) else [*words]
