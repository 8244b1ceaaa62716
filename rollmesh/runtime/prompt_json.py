"""The ids of a line as JSON, so that an engine call encodes only what is new.

Owns the text of one session's newest long prompt, in a buffer that grows in place: at 100,000
tokens a copy of it would cost more than all else that a call does. A session begins with the text
of its opening, which it may share with others. Invariant: what `of` gives is exactly the path's
ids, comma by comma, without brackets, and does not change while somebody has it: then the buffer is
left to them, and a copy grows. Short prompts behind the opening are not kept. Driven by
holdings.py.
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
        self._text: bytes | bytearray = b""

    def begin(self, node: int, text: bytes) -> None:
        """`text` is that of all tokens down to and with `node`."""
        self._node, self._text = node, text

    @property
    def num_bytes(self) -> int:
        """Of the text that is kept."""
        return len(self._text)

    def of(self, graph: TokenGraph, node: int) -> bytes | memoryview:
        """`1,2,3`: all tokens down to and with `node`."""
        if node != self._node:
            if graph.depth_of(node) < KEPT_FROM_TOKENS:
                return encode(graph.path_ids(node))
            self._move(graph, node)
        text = self._text
        return text if isinstance(text, bytes) else memoryview(text).toreadonly()

    def _move(self, graph: TokenGraph, node: int) -> None:
        new = self._new_pieces(graph, node)
        if new is None:
            self._text = bytearray(encode(graph.path_ids(node)))
        elif isinstance(self._text, bytes):
            self._text = bytearray(self._text + new)
        else:
            try:
                self._text += new
            except BufferError:  # a call still sends it
                self._text = self._text + new
        self._node = node

    def _new_pieces(self, graph: TokenGraph, node: int) -> bytes | None:
        """What follows the kept text; None where `node` is not on its line."""
        pieces: list[bytes] = []
        if self._node == ROOT:
            return None
        for _ in range(_MAX_STEPS):
            if node == self._node:
                return b"".join(reversed(pieces))
            if node == ROOT:
                return None
            if graph.nodes[node].num_tokens:
                pieces.append(b"," + encode(graph.ids_of(node)))
            node = graph.nodes[node].parent
        return None


def encode(token_ids: Sequence[int]) -> bytes:
    """Ids as JSON without brackets."""
    return orjson.dumps(list(token_ids))[1:-1]
