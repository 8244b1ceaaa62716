"""The ids of a line as JSON, so that an engine call encodes only what is new.

Owns the text of one session's newest long prompt, in a buffer that grows in place: at 100,000
tokens a copy of it would cost more than all else that a call does. Invariant: what `of` gives is
exactly the path's ids, comma by comma, without brackets, and does not change while somebody has it:
then the buffer is left to them, and a copy grows. A short prompt is not kept by its session: the
siblings of a group, which all begin with it, share a cache. Driven by holdings.py.
"""

import functools
from collections.abc import Sequence

import orjson

from rollmesh.runtime.graph import ROOT, TokenGraph

KEPT_FROM_TOKENS = 1024
_MAX_STEPS = 8
"""Nodes between a prompt and the one before it on its line; there are two or three."""


class PromptJson:
    """One per session."""

    __slots__ = ("_buffer", "_node")

    def __init__(self) -> None:
        self._node = ROOT
        self._buffer: bytearray | None = None

    def of(self, graph: TokenGraph, node: int) -> bytes | memoryview:
        """`1,2,3`: all tokens down to and with `node`."""
        if graph.depth_of(node) < KEPT_FROM_TOKENS:
            return _encode_short(graph.path_ids(node).tobytes())
        if node != self._node or self._buffer is None:
            self._move(graph, node)
        assert self._buffer is not None
        return memoryview(self._buffer).toreadonly()

    def _move(self, graph: TokenGraph, node: int) -> None:
        new = self._new_pieces(graph, node)
        if new is None or self._buffer is None:
            self._buffer = bytearray(encode(graph.path_ids(node)))
        else:
            try:
                self._buffer += new
            except BufferError:  # a call still sends it
                self._buffer = self._buffer + new
        self._node = node

    def _new_pieces(self, graph: TokenGraph, node: int) -> bytes | None:
        """What follows the kept text; None where `node` is not on its line."""
        pieces: list[bytes] = []
        for _ in range(_MAX_STEPS):
            if node == self._node:
                return b"".join(reversed(pieces))
            if node == ROOT:
                return None
            if graph.nodes[node].num_tokens:
                pieces.append(b"," + encode(graph.ids_of(node)))
            node = graph.nodes[node].parent
        return None


@functools.lru_cache(maxsize=256)
def _encode_short(token_ids: bytes) -> bytes:
    """Of int32s as they lie in memory."""
    return encode(memoryview(token_ids).cast("i"))


def encode(token_ids: Sequence[int]) -> bytes:
    """Ids as JSON without brackets."""
    return orjson.dumps(list(token_ids))[1:-1]
