"""The token graph of a rollout: every distinct token that was sampled or used as context, once.

Also the branch of each chat (`main`, `subagent`, `side`) and the training samples, which are paths
cut so that no token trains twice.
"""

from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import overload

import msgspec

from rollmesh.core.types import Branch, DialectName, NodeRow, SamplingParams, VersionRun

ROOT = -1
NODE_BYTES = 410
"""What a row takes, as tracemalloc counts it: every second one sampled, with parameters of its own
(410 over 4,000 rows)."""


class TokenNode(msgspec.Struct, gc=False):
    """One row, mutable until the record is made."""

    parent: int
    start: int
    """Where its tokens begin in the graph's array."""
    num_tokens: int
    depth_tokens: int
    """Tokens from the root to its end."""
    run_start: int
    """Where the tokens begin that lead to its end without a gap in the graph's array."""
    above: int
    """The node whose end that run follows."""
    root: int
    """The root above it, which for a root is itself."""
    logprob_start: int = 0
    """Where its log-probs begin, if it is sampled."""
    sampled: bool = False
    superseded: bool = False
    finish_reason: str = ""
    params: SamplingParams | None = None
    policy_versions: tuple[VersionRun, ...] = ()
    images: tuple[str, ...] = ()
    dialect: DialectName = ""


class Sampled(msgspec.Struct, frozen=True):
    """A finished generation as it enters the graph."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    policy_versions: tuple[VersionRun, ...]
    params: SamplingParams
    finish_reason: str
    engines: Sequence[str] = ()
    """That its runs name, by their place here."""
    dialect: DialectName = ""


class Path(Sequence[int]):
    """All tokens down to a node, copied out of the graph only where somebody looks at them."""

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
    """Append only."""

    __slots__ = ("engines", "logprobs", "nodes", "token_ids")

    def __init__(self) -> None:
        self.nodes: list[TokenNode] = []
        self.engines: list[str] = []
        """That sampled its nodes, in the order of their first token; runs name places in it."""
        self.token_ids: array[int] = array("i")
        self.logprobs: array[float] = array("f")

    def add_context(
        self, parent: int, token_ids: Sequence[int], images: tuple[str, ...] = ()
    ) -> int:
        """A node of tokens that nobody sampled, and the images they show; returns its index."""
        node = self._new_node(parent, token_ids)
        node.images = images
        self.nodes.append(node)
        self.token_ids.extend(token_ids)
        return len(self.nodes) - 1

    def add_sampled(self, parent: int, sampled: Sampled) -> int:
        """A node of tokens that the model sampled; returns its index."""
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
        """Of ids, log-probs and rows."""
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
        """All tokens from the root down to and with this node.

        A line that nothing interrupted is one run, and one copy, however many nodes it has.
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
        """Digests of the images shown from the root down to and with this node, in order."""
        found: list[tuple[str, ...]] = []
        while index != ROOT:
            node = self.nodes[index]
            if node.images:
                found.append(node.images)
            index = node.parent
        return [digest for images in reversed(found) for digest in images]

    def rows(self, branch_of_root: dict[int, Branch]) -> list[NodeRow]:
        """The table as the wire carries it; each node is in its root's branch."""
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
        """Its runs, with engines by their places here: mostly there is one, and it is the first."""
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


class RootChat(msgspec.Struct):
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


def assign(chats: Mapping[int, RootChat]) -> dict[int, Branch]:
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
    chats = {root: RootChat(kind, root, root, 0) for root, kind in kinds.items()}
    for row, node in enumerate(graph.nodes):
        chat = chats[node.root]
        chat.last = row
        chat.num_calls += node.sampled
    return assign(chats)


def _group(chats: Mapping[int, RootChat]) -> dict[int, int]:
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


class SamplePath(msgspec.Struct, frozen=True):
    """One sample's rows."""

    path: list[int]
    """From the root down to its last node."""
    trained: set[int]
    """Those of the path that train here."""


def sample_paths(nodes: Sequence[NodeRow], trains: Sequence[bool]) -> list[SamplePath]:
    """The samples of a table whose rows in `trains` train, by creation of their last node.

    Children stand after their parents, so that going backwards every last node comes before what
    it stands on; each claims what nobody below claimed. A row sampled at another temperature ends
    a sample of its own.
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
    """The rows from the root down to `row`."""
    path = []
    while row >= 0:
        path.append(row)
        row = nodes[row].parent
    return path[::-1]


def images_on(nodes: Sequence[NodeRow], path: Sequence[int]) -> tuple[str, ...]:
    """Digests of the images that a path's tokens have placeholders for, in order."""
    return tuple([digest for row in path for digest in nodes[row].images])


def reasons_of(nodes: Sequence[NodeRow], branches: Collection[Branch]) -> list[str]:
    """Why each row does not train; '' for those that do. `branches` says which branches train."""
    with_children = {node.parent for node in nodes}
    return [_reason(node, row in with_children, branches) for row, node in enumerate(nodes)]


def temperature_of(node: NodeRow) -> float:
    """What a row was sampled with; its log-probs are of that distribution."""
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
