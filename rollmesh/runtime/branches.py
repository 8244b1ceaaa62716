"""Assign each chat of a session to a branch: `main`, `subagent` or `side`. Used by both captures.

- Chats form a line if two of these three are equal: tools, system text, first message. So a line
  keeps a compacted history (other first message) and a last call without tools.
- `main` is the line that began with tools and lasts longest, from its first call to its last in the
  order of the session. A main line starts its sub-agents and uses their results, so it encloses
  them, however many turns they take and tokens they sample. Among equals the last active one.
- In a session whose lines all began without tools `main` is the line of the first call.
- A lone call without tools beside a main line with tools (title, topic, probe) is `side`; chats of
  all other lines are `subagent`.
"""

from collections.abc import Mapping

import msgspec

from rollmesh.core.types import Branch
from rollmesh.runtime.graph import TokenGraph


class RootKind(msgspec.Struct, frozen=True):
    """The meanings that distinguish lines."""

    tools: int
    """0 for none."""
    system: int
    """0 for none."""
    opening: int = 0
    """The first message behind the system text; 0 if it is not known."""

    def shared_keys(self) -> list[tuple[str, int, int]]:
        """Chats that share one of these are one line."""
        keys = [("tools and system", self.tools, self.system)]
        if self.opening:
            keys.append(("system and opening", self.system, self.opening))
            keys += [("tools and opening", self.tools, self.opening)] if self.tools else []
        return keys


class Chat(msgspec.Struct):
    """One chat of a session, that is a root of its graph, or a single call."""

    kind: RootKind
    first: int
    """Its place in the session's order of calls, or of nodes."""
    last: int
    num_calls: int = 1


class _Line(msgspec.Struct):
    first: int
    last: int
    began_with_tools: bool

    @property
    def length(self) -> tuple[int, int]:
        return self.last - self.first, self.last


def assign(chats: Mapping[int, Chat]) -> dict[int, Branch]:
    """The branch of each chat, by the keys of `chats`."""
    names = _group(chats)
    lines: dict[int, _Line] = {}
    for name, chat in sorted(chats.items(), key=lambda item: item[1].first):
        line = lines.setdefault(
            names[name], _Line(chat.first, chat.last, began_with_tools=chat.kind.tools != 0)
        )
        line.last = max(line.last, chat.last)
    with_tools = [name for name, line in lines.items() if line.began_with_tools]
    if with_tools:
        main = max(with_tools, key=lambda name: lines[name].length)
    else:
        main = min(lines, key=lambda name: lines[name].first, default=-1)
    branches: dict[int, Branch] = {}
    for name, chat in chats.items():
        is_side = bool(with_tools) and not chat.kind.tools and chat.num_calls <= 1
        branches[name] = "main" if names[name] == main else "side" if is_side else "subagent"
    return branches


def branches_of(graph: TokenGraph, kinds: Mapping[int, RootKind]) -> dict[int, Branch]:
    """The branch of each root of a graph; `kinds` has the kind of each root."""
    chats = {root: Chat(kind, root, root, 0) for root, kind in kinds.items()}
    for row, node in enumerate(graph.nodes):
        chat = chats[node.root]
        chat.last = row
        chat.num_calls += node.sampled
    return assign(chats)


def _group(chats: Mapping[int, Chat]) -> dict[int, int]:
    """The line of each chat, named by one of its chats."""
    parents = {name: name for name in chats}

    def line_of(name: int) -> int:
        while parents[name] != name:
            parents[name] = parents[parents[name]]
            name = parents[name]
        return name

    seen: dict[tuple[str, int, int], int] = {}
    for name, chat in chats.items():
        for key in chat.kind.shared_keys():
            parents[line_of(name)] = line_of(seen.setdefault(key, name))
    return {name: line_of(name) for name in chats}
