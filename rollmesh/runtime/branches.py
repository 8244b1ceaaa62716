"""Which line of talk each node belongs to: the main one, a sub-agent's, or a side call's.

Invariant: every node is in the branch of its root, and exactly one kind of chat is `main`. Read off
the finished graph by record.py.
"""

from collections import Counter

import msgspec

from rollmesh.core.types import Branch
from rollmesh.runtime.graph import TokenGraph


class RootKind(msgspec.Struct, frozen=True):
    """What tells one line of chat from another: the meanings of its tools and system text."""

    tools: int
    """0 for none."""
    system: int


def branches_of(graph: TokenGraph, kinds: dict[int, RootKind]) -> dict[int, Branch]:
    """The branch of each root: `main` is the kind of chat that sampled most tokens.

    A compacted history keeps tools and system text, so it stays main. A lone call without tools
    beside a main line with tools (titles, probes) is `side`; all others are sub-agents.
    """
    if len(kinds) == 1:
        return dict.fromkeys(kinds, "main")
    num_tokens: Counter[int] = Counter()
    num_turns: Counter[int] = Counter()
    for node in graph.nodes:
        if node.sampled:
            num_tokens[node.root] += node.num_tokens
            num_turns[node.root] += 1
    tokens_of_kind: Counter[RootKind] = Counter()
    for root, kind in kinds.items():
        tokens_of_kind[kind] += num_tokens[root]
    main = max(tokens_of_kind, key=lambda kind: tokens_of_kind[kind], default=RootKind(0, 0))
    branches: dict[int, Branch] = {}
    for root, kind in kinds.items():
        is_side = main.tools != 0 and kind.tools == 0 and num_turns[root] <= 1
        branches[root] = "main" if kind == main else "side" if is_side else "subagent"
    return branches
