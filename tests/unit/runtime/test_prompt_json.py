"""Prompts as JSON, extended in place."""

import random

from rollmesh.core.types import SamplingParams
from rollmesh.runtime.conversation import KEPT_FROM_TOKENS, PromptJson, encode
from rollmesh.runtime.token_graph import ROOT, Sampled, TokenGraph


def grow(graph: TokenGraph, parent: int, chance: random.Random) -> int:
    """A sampled turn and the context behind it; returns the latter."""
    ids = [chance.randrange(150_000) for _ in range(chance.randrange(1, 40))]
    params = SamplingParams(max_tokens=1)
    node = graph.add_sampled(parent, Sampled(ids, [0.0] * len(ids), (), params, "stop"))
    return graph.add_context(node, [chance.randrange(150_000) for _ in range(chance.randrange(9))])


def test_the_text_is_that_of_the_path_whatever_was_asked_before() -> None:
    chance = random.Random(3)
    graph, text = TokenGraph(), PromptJson()
    first = graph.add_context(ROOT, range(KEPT_FROM_TOKENS + 1))
    ends = [first, graph.add_context(ROOT, range(7))]
    for _ in range(200):
        node = ends[-1] if chance.random() < 0.7 else chance.choice(ends)
        node = grow(graph, node, chance) if chance.random() < 0.8 else node
        ends.append(node)
        assert bytes(text.of(graph, node)) == encode(graph.path_ids(node))


def test_a_text_that_is_still_being_sent_does_not_change() -> None:
    chance = random.Random(4)
    graph, text = TokenGraph(), PromptJson()
    node = graph.add_context(ROOT, range(KEPT_FROM_TOKENS))
    sending = text.of(graph, node)
    before = bytes(sending)
    after = grow(graph, node, chance)
    assert bytes(text.of(graph, after)) == encode(graph.path_ids(after))
    assert bytes(sending) == before


def test_a_short_prompt_is_not_kept() -> None:
    graph, text = TokenGraph(), PromptJson()
    node = graph.add_context(ROOT, [5, 6, 7])
    assert text.of(graph, node) == b"5,6,7"
