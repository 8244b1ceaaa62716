"""A task that the model works on with tools, until it answers without calling one.

Invariants: the calls of one answer run one after the other, in its order, since they may share
state; every call gets exactly one result, an error as text. Driven by the worker; users derive from
it.
"""

from collections.abc import Sequence

from rollmesh.core.types import Json, Task
from rollmesh.envs.calls import Calls
from rollmesh.envs.chat import ChatReply, Message
from rollmesh.envs.multi_turn import MultiTurnEnv, Talk, Words
from rollmesh.envs.tools import Function, Toolbox, ToolSettings


class ToolEnv(MultiTurnEnv):
    """A class of the user's own adds `tasks` and `score`, and names its tools.

    Tools without state are named once: `super().__init__(tools=[search, fetch])`. Tools that work
    on a rollout's own state are methods of an object that `begin` makes and puts into
    `talk.held`; then `tools` names its methods.
    """

    def __init__(
        self,
        *,
        tools: Sequence[Function] = (),
        tool_settings: ToolSettings | None = None,
        max_turns: int = 16,
        max_tokens: int = 0,
        system: str = "",
    ) -> None:
        """EnvError where a tool has no schema; `tool_settings` bound every call."""
        super().__init__(max_turns=max_turns, max_tokens=max_tokens, system=system)
        Toolbox(tools)  # a tool without a schema is known at once
        self._tools = tools
        self._tool_settings = tool_settings or ToolSettings()
        self._calls = Calls()

    def tools(self, talk: Talk) -> Sequence[Function]:
        """The tools of this rollout. Default: those of the environment."""
        del talk
        return self._tools

    def fields(self, talk: Talk) -> dict[str, Json]:
        """The tools, beside what every request has."""
        specs = Toolbox(self.tools(talk)).specs
        return {**super().fields(talk), "tools": specs} if specs else super().fields(talk)

    async def respond(self, task: Task, talk: Talk, reply: ChatReply) -> Words | None:
        """The results of the calls; None, the end, where there are none."""
        del task
        if not reply.calls:
            return None
        toolbox = Toolbox(self.tools(talk))
        answers: list[Message] = []
        for call in reply.calls:
            result = await toolbox.call(self._calls, call, self._tool_settings)
            _count(talk, "num_tool_calls", 1)
            _count(talk, "num_tool_errors", int(result.failed))
            answers.append({"role": "tool", "tool_call_id": call.id, "content": result.text})
        return answers


def _count(talk: Talk, name: str, number: int) -> None:
    talk.data[name] = talk.data.get(name, 0) + number
