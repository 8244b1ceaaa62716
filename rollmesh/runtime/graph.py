"""The token graph of one rollout: every distinct token that its engines saw or sampled, once.

Owns flat arrays of ids and log-probs and a row per node; a node holds only the tokens that follow
its parent's. Invariant: memory is linear in distinct tokens; rows and tokens are only appended, in
creation order, which is the order the wire carries (core.types.NodeRow). A path from a root is
exactly the id sequence an engine was given and answered with. Driven by session.py.
"""

from array import array
from collections.abc import Iterator, Sequence
from typing import overload

import msgspec

from rollmesh.core.types import Branch, DialectName, NodeRow, SamplingParams, VersionRun

ROOT = -1
NODE_BYTES = 410
"""What a row takes, as tracemalloc counts it: every second one sampled, with parameters of its own
(410 over 4,000 rows)."""


class Node(msgspec.Struct, gc=False):
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
        self.nodes: list[Node] = []
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

    def _new_node(self, parent: int, token_ids: Sequence[int]) -> Node:
        start = len(self.token_ids)
        run_start, above, root = start, parent, len(self.nodes)
        if parent != ROOT:
            before = self.nodes[parent]
            root = before.root
            if before.start + before.num_tokens == start:
                run_start, above = before.run_start, before.above
        depth = self.depth_of(parent) + len(token_ids)
        return Node(parent, start, len(token_ids), depth, run_start, above, root)
