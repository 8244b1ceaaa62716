"""The order in which a reply's parts are told, for dialects that answer in blocks.

Invariant: reasoning, then content, then calls; content that comes once a call has begun stands
behind the calls, as deltas.py says. A plain answer's blocks are those that its events would have
made. Driven by message_events.py and response_events.py.
"""

from collections.abc import Iterator

import msgspec

from rollmesh.runtime.chat import CallDelta, Delta, ToolCall
from rollmesh.serve.interception.reply_view import ReplyView


class Said(msgspec.Struct, frozen=True):
    """The next piece of the answer's text."""

    text: str


class Thought(msgspec.Struct, frozen=True):
    """The next piece of its reasoning."""

    text: str


def parts_of(delta: Delta, has_called: bool) -> Iterator[Thought | Said | CallDelta]:
    """The parts in order; `has_called` where an earlier delta began a call."""
    if delta.reasoning:
        yield Thought(delta.reasoning)
    if delta.content and not has_called:
        yield Said(delta.content)
    yield from delta.calls
    if delta.content and has_called:
        yield Said(delta.content)


def blocks_of(view: ReplyView) -> list[Thought | Said | ToolCall]:
    """The blocks of an ended reply; adjacent pieces of a kind are one."""
    blocks: list[Thought | Said | ToolCall] = []
    calls = dict(enumerate(view.answer.tool_calls))
    has_called = False
    for delta in view.deltas():
        for part in parts_of(delta, has_called):
            if isinstance(part, CallDelta):
                blocks += [calls.pop(part.index)] if part.index in calls else []
                has_called = True
            elif blocks and type(blocks[-1]) is type(part):
                blocks[-1] = type(part)(blocks[-1].text + part.text)
            else:
                blocks.append(part)
    return blocks
