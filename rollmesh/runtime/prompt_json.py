"""The ids of a line as JSON, so that an engine call encodes only what is new.

Owns the text of one session's newest long prompt. Invariant: what `of` gives is exactly the path's
ids, comma by comma, without brackets; a short prompt is not kept, since encoding it anew costs
less than its memory. Driven by holdings.py.
"""

from collections.abc import Sequence

import orjson

from rollmesh.runtime.graph import ROOT, TokenGraph

KEPT_FROM_TOKENS = 1024
_MAX_STEPS = 8
"""Nodes between a prompt and the one before it on its line; there are two or three."""


class PromptJson:
    """One per session."""

    __slots__ = ("_node", "_text")

    def __init__(self) -> None:
        self._node = ROOT
        self._text = b""

    def of(self, graph: TokenGraph, node: int) -> bytes:
        """`1,2,3`: all tokens down to and with `node`."""
        if node == self._node:
            return self._text
        text = self._extended(graph, node) or encode(graph.path_ids(node))
        if graph.depth_of(node) >= KEPT_FROM_TOKENS:
            self._node, self._text = node, text
        return text

    def _extended(self, graph: TokenGraph, node: int) -> bytes:
        """The kept text and what follows it; empty where `node` is not on its line."""
        if self._node == ROOT:
            return b""
        pieces: list[bytes] = []
        for _ in range(_MAX_STEPS):
            if node == self._node:
                pieces.append(self._text)
                return b",".join(reversed(pieces))
            if node == ROOT:
                break
            if graph.nodes[node].num_tokens:
                pieces.append(encode(graph.ids_of(node)))
            node = graph.nodes[node].parent
        return b""


def encode(token_ids: Sequence[int]) -> bytes:
    """Ids as JSON without brackets."""
    return orjson.dumps(list(token_ids))[1:-1]
