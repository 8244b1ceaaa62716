"""A radix tree from token sequences to the memory slots of their keys and values.

- A slot is in at most one node.
- A node pinned by a running request, and all above it, is never evicted.
- Trees of different `extra_key` share nothing.
- Tokens are int32 bytes, so that an edge is compared with one memcmp.
- Source: RadixAttention (Zheng et al., SGLang, 2024, section 3).
"""

import heapq
import itertools

import numpy as np
from numpy.typing import NDArray

Slots = NDArray[np.int64]

_TOKEN_BYTES = 4


class PrefixNode:
    """An edge of tokens and the slots of those tokens; the root has none."""

    __slots__ = ("children", "edge", "last_used", "num_pins", "parent", "slots")

    def __init__(self, edge: bytes, slots: Slots, parent: "PrefixNode | None") -> None:
        self.edge = edge
        self.slots = slots
        self.parent = parent
        self.children: dict[bytes, PrefixNode] = {}
        self.num_pins = 0
        self.last_used = 0


class PrefixTree:
    """Finds, keeps and evicts prefixes."""

    def __init__(self) -> None:
        self._roots: dict[str, PrefixNode] = {}
        self._ticks = itertools.count(1)
        self.num_evictable = 0
        """Slots in nodes without pins."""

    def match(self, tokens: bytes, extra_key: str) -> tuple[Slots, PrefixNode]:
        """Return the slots of the longest known prefix of `tokens`, and its last node."""
        node = self._root(extra_key)
        parts: list[Slots] = []
        at = 0
        while at < len(tokens):
            child = node.children.get(tokens[at : at + _TOKEN_BYTES])
            if child is None:
                break
            shared = shared_bytes(child.edge, tokens, at)
            if shared < len(child.edge):
                child = self._split(child, shared)
            child.last_used = next(self._ticks)
            parts.append(child.slots)
            node = child
            at += shared
        return (parts[0] if len(parts) == 1 else np.concatenate([EMPTY, *parts])), node

    def insert(self, tokens: bytes, slots: Slots, extra_key: str) -> tuple[int, PrefixNode]:
        """Store `slots` for `tokens`; return how many leading tokens were known, and the last node.

        The tree takes over the slots past that number; those before it remain the caller's.
        """
        known, node = self.match(tokens, extra_key)
        num_known = len(known)
        if num_known < len(slots):
            edge = tokens[num_known * _TOKEN_BYTES :]
            child = PrefixNode(edge, slots[num_known:].copy(), node)
            child.last_used = next(self._ticks)
            node.children[edge[:_TOKEN_BYTES]] = child
            self.num_evictable += len(child.slots)
            node = child
        return num_known, node

    def pin(self, node: PrefixNode) -> None:
        """Protect `node` and all above it from eviction until `unpin`."""
        step: PrefixNode | None = node
        while step is not None:
            if step.num_pins == 0:
                self.num_evictable -= len(step.slots)
            step.num_pins += 1
            step = step.parent

    def unpin(self, node: PrefixNode) -> None:
        """Undo one `pin`."""
        step: PrefixNode | None = node
        while step is not None:
            assert step.num_pins > 0, "unpinned a node that has no pins"
            step.num_pins -= 1
            if step.num_pins == 0:
                self.num_evictable += len(step.slots)
            step = step.parent

    def evict(self, num_slots: int) -> list[Slots]:
        """Evict least recently used leaves until `num_slots` are free or none is left."""
        leaves = [
            (node.last_used, id(node), node)
            for root in self._roots.values()
            for node in descendants(root)
            if not node.children and node.num_pins == 0
        ]
        heapq.heapify(leaves)
        freed: list[Slots] = []
        while num_slots > 0 and leaves:
            _, _, node = heapq.heappop(leaves)
            freed.append(node.slots)
            num_slots -= len(node.slots)
            self.num_evictable -= len(node.slots)
            parent = node.parent
            assert parent is not None, "a root is no leaf"
            del parent.children[node.edge[:_TOKEN_BYTES]]
            if not parent.children and parent.num_pins == 0 and parent.parent is not None:
                heapq.heappush(leaves, (parent.last_used, id(parent), parent))
        self._roots = {
            key: root for key, root in self._roots.items() if root.children or root.num_pins
        }
        return freed

    def _root(self, extra_key: str) -> PrefixNode:
        root = self._roots.get(extra_key)
        if root is None:
            root = self._roots[extra_key] = PrefixNode(b"", EMPTY, None)
        return root

    def _split(self, node: PrefixNode, num_bytes: int) -> PrefixNode:
        """Split `node`'s edge; the new upper node has the first `num_bytes` and the same pins."""
        parent = node.parent
        assert parent is not None, "a root has no edge to split"
        num_tokens = num_bytes // _TOKEN_BYTES
        upper = PrefixNode(node.edge[:num_bytes], node.slots[:num_tokens], parent)
        upper.num_pins = node.num_pins
        parent.children[upper.edge[:_TOKEN_BYTES]] = upper
        node.edge = node.edge[num_bytes:]
        node.slots = node.slots[num_tokens:]
        node.parent = upper
        upper.children[node.edge[:_TOKEN_BYTES]] = node
        return upper


EMPTY: Slots = np.empty(0, dtype=np.int64)


def descendants(root: PrefixNode) -> list[PrefixNode]:
    """Return all nodes below `root`."""
    found: list[PrefixNode] = list(root.children.values())
    for node in found:  # grows during the walk: breadth first
        found.extend(node.children.values())
    return found


def shared_bytes(edge: bytes, tokens: bytes, at: int) -> int:
    """Return how many leading bytes of `edge` equal `tokens` from `at`; a multiple of a token's
    size."""
    if tokens.startswith(edge, at):
        return len(edge)
    num_tokens = min(len(edge), len(tokens) - at) // _TOKEN_BYTES
    left = np.frombuffer(edge, dtype=np.int32, count=num_tokens)
    right = np.frombuffer(tokens, dtype=np.int32, count=num_tokens, offset=at)
    differs = np.flatnonzero(left != right)
    return int(differs[0] if len(differs) else num_tokens) * _TOKEN_BYTES
