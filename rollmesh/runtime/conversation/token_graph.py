"""The token graph of a rollout: every distinct token that was sampled or used as context, once.

Also the branch of each chat (`main`, `subagent`, `side`) and the training samples: paths that are
cut so that no token trains twice.
"""

from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import overload

import msgspec

from rollmesh.core.types import Branch, DialectName, NodeRow, SamplingParams, VersionRun

ROOT = -1
NODE_BYTES = 410
"""Memory of a row, measured by tracemalloc: every second one sampled, with its own parameters (410
over 4,000 rows)."""


class TokenNode(msgspec.Struct, gc=False):
    """One row, mutable until the record is made."""

    parent: int
    start: int
    """Offset of its tokens in the graph's array."""
    num_tokens: int
    depth_tokens: int
    """Tokens from the root to its end."""
    run_start: int
    """Offset of the contiguous tokens in the graph's array that lead to its end."""
    above: int
    """The node whose end that contiguous run follows."""
    root: int
    """The root above it; a root's is itself."""
    logprob_start: int = 0
    """Offset of its log-probs, if it is sampled."""
    sampled: bool = False
    superseded: bool = False
    finish_reason: str = ""
    params: SamplingParams | None = None
    policy_versions: tuple[VersionRun, ...] = ()
    images: tuple[str, ...] = ()
    dialect: DialectName = ""


class Sampled(msgspec.Struct, frozen=True):
    """A finished generation for the graph."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    policy_versions: tuple[VersionRun, ...]
    params: SamplingParams
    finish_reason: str
    engines: Sequence[str] = ()
    """Engines that its runs refer to by position."""
    dialect: DialectName = ""


class Path(Sequence[int]):
    """All tokens up to the end of a node, copied out of the graph on access."""

    __slots__ = ("_graph", "_node")

    def __init__(self, graph: "TokenGraph", node: int) -> None:
        self._graph = graph
        self._node = node

    def __len__(self) -> int:
        return self._graph.depth_of(self._node)

    def __iter__(self) -> Iterator[int]:
        return iter(self._graph.path_ids(self._node))

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> "array[int]": ...
    def __getitem__(self, index: int | slice) -> "int | array[int]":
        return self._graph.path_ids(self._node)[index]


class TokenGraph:
    """The graph; append only."""

    __slots__ = ("engines", "logprobs", "nodes", "token_ids")

    def __init__(self) -> None:
        self.nodes: list[TokenNode] = []
        self.engines: list[str] = []
        """Engines that sampled its nodes, in order of their first token; runs refer to positions
        here."""
        self.token_ids: array[int] = array("i")
        self.logprobs: array[float] = array("f")

    def add_context(
        self, parent: int, token_ids: Sequence[int], images: tuple[str, ...] = ()
    ) -> int:
        """Add a node of tokens that were not sampled, with the images that they show; return its
        index."""
        node = self._new_node(parent, token_ids)
        node.images = images
        self.nodes.append(node)
        self.token_ids.extend(token_ids)
        return len(self.nodes) - 1

    def add_sampled(self, parent: int, sampled: Sampled) -> int:
        """Add a node of tokens that the model sampled; return its index."""
        assert len(sampled.token_ids) == len(sampled.logprobs)
        node = self._new_node(parent, sampled.token_ids)
        node.sampled = True
        node.logprob_start = len(self.logprobs)
        node.finish_reason = sampled.finish_reason
        node.params = sampled.params
        node.policy_versions = self._runs(sampled)
        node.dialect = sampled.dialect
        self.nodes.append(node)
        self.token_ids.extend(sampled.token_ids)
        self.logprobs.extend(sampled.logprobs)
        return len(self.nodes) - 1

    @property
    def num_bytes(self) -> int:
        """Bytes of ids, log-probs and rows."""
        num_items = len(self.token_ids) + len(self.logprobs)
        return 4 * num_items + NODE_BYTES * len(self.nodes)

    def ids_of(self, index: int) -> "array[int]":
        """The tokens of one node."""
        node = self.nodes[index]
        return self.token_ids[node.start : node.start + node.num_tokens]

    def logprobs_of(self, index: int) -> "array[float]":
        """The log-probs of one sampled node."""
        node = self.nodes[index]
        return self.logprobs[node.logprob_start : node.logprob_start + node.num_tokens]

    def depth_of(self, index: int) -> int:
        """Tokens from the root to the end of this node; 0 for ROOT."""
        return 0 if index == ROOT else self.nodes[index].depth_tokens

    def path_ids(self, index: int) -> "array[int]":
        """All tokens from the root to the end of this node.

        A line without interruptions is one run and one copy, however many nodes it has.
        """
        runs: list[tuple[int, int]] = []
        while index != ROOT:
            node = self.nodes[index]
            runs.append((node.run_start, node.start + node.num_tokens))
            index = node.above
        if len(runs) == 1:
            return self.token_ids[runs[0][0] : runs[0][1]]
        path: array[int] = array("i")
        for start, stop in reversed(runs):
            path.extend(self.token_ids[start:stop])
        return path

    def images_of(self, index: int) -> list[str]:
        """Digests of the images from the root to the end of this node, in order."""
        found: list[tuple[str, ...]] = []
        while index != ROOT:
            node = self.nodes[index]
            if node.images:
                found.append(node.images)
            index = node.parent
        return [digest for images in reversed(found) for digest in images]

    def rows(self, branch_of_root: dict[int, Branch]) -> list[NodeRow]:
        """The table in its wire form; each node is in its root's branch."""
        return [
            NodeRow(
                node.parent,
                node.num_tokens,
                node.sampled,
                node.policy_versions,
                branch_of_root[node.root],
                node.params,
                node.finish_reason,
                node.superseded,
                node.images,
                node.dialect,
            )
            for node in self.nodes
        ]

    def _runs(self, sampled: Sampled) -> tuple[VersionRun, ...]:
        """The node's runs with positions in this graph's engines; mostly one run at position 0."""
        runs = sampled.policy_versions
        if list(sampled.engines) == self.engines:
            return runs
        return tuple(
            [
                VersionRun(run.policy_version, run.num_tokens, self._place_of(sampled, run.engine))
                for run in runs
            ]
        )

    def _place_of(self, sampled: Sampled, engine: int) -> int:
        if engine < 0:
            return engine
        address = sampled.engines[engine]
        if address not in self.engines:
            self.engines.append(address)
        return self.engines.index(address)

    def _new_node(self, parent: int, token_ids: Sequence[int]) -> TokenNode:
        start = len(self.token_ids)
        run_start, above, root = start, parent, len(self.nodes)
        if parent != ROOT:
            before = self.nodes[parent]
            root = before.root
            if before.start + before.num_tokens == start:
                run_start, above = before.run_start, before.above
        depth = self.depth_of(parent) + len(token_ids)
        return TokenNode(parent, start, len(token_ids), depth, run_start, above, root)


class RootKind(msgspec.Struct, frozen=True):
    """The meanings by which branches are distinguished."""

    tools: int
    """0 for none."""
    system: int
    """0 for none."""
    opening: int = 0
    """The first message after the system text; 0 if it is not known."""

    def shared_keys(self) -> list[tuple[str, int, int]]:
        """Chats with one of these keys in common are one branch."""
        keys = [("tools and system", self.tools, self.system)]
        if self.opening:
            keys.append(("system and opening", self.system, self.opening))
            keys += [("tools and opening", self.tools, self.opening)] if self.tools else []
        return keys


class RootChat(msgspec.Struct):
    """One chat of a session: a root of its graph, or a single call."""

    kind: RootKind
    first: int
    """Its position in the session's order of calls or nodes."""
    last: int
    num_calls: int = 1


class _BranchGroup(msgspec.Struct):
    first: int
    last: int
    began_with_tools: bool

    @property
    def length(self) -> tuple[int, int]:
        return self.last - self.first, self.last


def assign(chats: Mapping[int, RootChat]) -> dict[int, Branch]:
    """The branch of each chat, by the keys of `chats`."""
    names = _group(chats)
    lines: dict[int, _BranchGroup] = {}
    for name, chat in sorted(chats.items(), key=lambda item: item[1].first):
        line = lines.setdefault(
            names[name], _BranchGroup(chat.first, chat.last, began_with_tools=chat.kind.tools != 0)
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
    chats = {root: RootChat(kind, root, root, 0) for root, kind in kinds.items()}
    for row, node in enumerate(graph.nodes):
        chat = chats[node.root]
        chat.last = row
        chat.num_calls += node.sampled
    return assign(chats)


def _group(chats: Mapping[int, RootChat]) -> dict[int, int]:
    """The group of each chat, named by one of its chats."""
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


class SamplePath(msgspec.Struct, frozen=True):
    """The rows of one sample."""

    path: list[int]
    """Rows from the root to its last node."""
    trained: set[int]
    """Rows of the path that train in this sample."""


def sample_paths(nodes: Sequence[NodeRow], trains: Sequence[bool]) -> list[SamplePath]:
    """The samples of a table whose rows in `trains` train, in order of creation of their last node.

    Children come after their parents, so in reverse order every last node precedes its ancestors;
    each sample claims the rows that no later one claimed. A row with another temperature ends a
    sample of its own.
    """
    claimed = [False] * len(nodes)
    claims = []
    for last in range(len(nodes) - 1, -1, -1):
        if not trains[last] or claimed[last]:
            continue
        path = path_to(nodes, last)
        temperature = temperature_of(nodes[last])
        trained = {
            row
            for row in path
            if trains[row] and not claimed[row] and temperature_of(nodes[row]) == temperature
        }
        for row in trained:
            claimed[row] = True
        claims.append(SamplePath(path, trained))
    return claims[::-1]


def path_to(nodes: Sequence[NodeRow], row: int) -> list[int]:
    """The rows from the root to `row`."""
    path = []
    while row >= 0:
        path.append(row)
        row = nodes[row].parent
    return path[::-1]


def images_on(nodes: Sequence[NodeRow], path: Sequence[int]) -> tuple[str, ...]:
    """Digests of the images with a placeholder in a path's tokens, in order."""
    return tuple([digest for row in path for digest in nodes[row].images])


def reasons_of(nodes: Sequence[NodeRow], branches: Collection[Branch]) -> list[str]:
    """Why each row does not train; '' if it does. `branches` are the branches that train."""
    with_children = {node.parent for node in nodes}
    return [_reason(node, row in with_children, branches) for row, node in enumerate(nodes)]


def temperature_of(node: NodeRow) -> float:
    """The temperature that a row was sampled at, to which its log-probs refer."""
    return node.params.temperature if node.params else 1.0


def _reason(node: NodeRow, has_children: bool, branches: Collection[Branch]) -> str:
    if not node.sampled or not node.num_tokens:
        return "context"
    if node.finish_reason == "void":
        return "void"
    if node.superseded and not has_children:
        return "superseded"
    if node.branch not in branches:
        return f"branch: {node.branch}"
    return ""
