"""Prompts that are no chats: which tokens of them a session holds already.

A client of the Completions API keeps the history itself, as text or as tokens. Owns where the
session's raw prompts and the answers to them end in the token graph. Invariant: a prompt goes on
from held tokens only where it repeats them exactly, by ids, or by the whole text that the tokens
stand for, special tokens included, and from the longest line that it repeats; what was sampled is
never tokenised again. Driven by
holdings.py.
"""

from array import array
from collections.abc import Sequence

import msgspec

from rollmesh.core.errors import SessionError
from rollmesh.runtime.graph import ROOT, TokenGraph
from rollmesh.runtime.prompts import Prompts
from rollmesh.runtime.spot import Spot
from rollmesh.runtime.turns import Turn

MAX_ENDS = 32
"""Answers that a later prompt may go on from, newest kept."""


class RawPrompt(msgspec.Struct, frozen=True):
    """A raw prompt as it meets the graph."""

    key: int
    """Equal for equal prompts."""
    parent: int
    token_ids: Sequence[int]
    """What follows the parent."""
    num_chars: int = 0
    """Of the text that stands for the parent and all above it."""


class _End(msgspec.Struct, frozen=True):
    """An answered raw prompt."""

    node: int
    num_chars: int
    """Of prompt and answer, as text; 0 where the prompt came as tokens."""
    text_hash: int


class RawPrompts:
    """One per session that has any."""

    __slots__ = ("_ends", "_prompts", "_spots")

    def __init__(self, prompts: Prompts) -> None:
        self._prompts = prompts
        self._spots: dict[int, Spot] = {}
        self._ends: list[_End] = []

    def plan(self, turn: Turn, graph: TokenGraph) -> RawPrompt:
        """Where `turn`'s prompt stands; SessionError 400 for ids that no model has."""
        if turn.prompt_ids is not None:
            return self._plan_ids(turn.prompt_ids, graph)
        text = turn.prompt_text or ""
        for end in sorted(self._ends, key=lambda end: end.num_chars, reverse=True):
            if 0 < end.num_chars <= len(text) and hash(text[: end.num_chars]) == end.text_hash:
                rest = self._prompts.raw(text[end.num_chars :])
                return RawPrompt(hash(text), end.node, rest, end.num_chars)
        ids = self._prompts.raw(text)
        if not ids:
            raise SessionError(400, "invalid_prompt", "prompt: expected a text that is not empty")
        return RawPrompt(hash(text), ROOT, ids)

    def spot(self, prompt: RawPrompt) -> Spot | None:
        """Where the same prompt was asked before."""
        return self._spots.get(prompt.key)

    def hold(self, prompt: RawPrompt, node: int) -> Spot:
        """Hold the prompt whose tokens end with `node`."""
        spot = self._spots[prompt.key] = Spot(None, b"")
        spot.node = node
        return spot

    def add_answer(self, turn_text: str | None, node: int, token_ids: Sequence[int]) -> None:
        """A later prompt may go on from the answer that ends with `node`."""
        text = "" if turn_text is None else turn_text + self._prompts.text(token_ids)
        self._ends = [*self._ends[1 - MAX_ENDS :], _End(node, len(text), hash(text))]

    def _plan_ids(self, token_ids: tuple[int, ...], graph: TokenGraph) -> RawPrompt:
        if not token_ids or min(token_ids) < 0 or max(token_ids) >= self._prompts.vocab_size:
            why = f"prompt: expected token ids from 0 to {self._prompts.vocab_size - 1}"
            raise SessionError(400, "invalid_prompt", why)
        ids = array("i", token_ids)
        for end in sorted(self._ends, key=lambda end: graph.depth_of(end.node), reverse=True):
            depth = graph.depth_of(end.node)
            if depth <= len(ids) and ids[:depth] == graph.path_ids(end.node):
                return RawPrompt(hash(token_ids), end.node, ids[depth:])
        return RawPrompt(hash(token_ids), ROOT, ids)
