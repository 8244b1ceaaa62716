"""An artificial language for recipes: good answers count on from their prompt, bad ones do not.

- Rows have the form that roles expect (rollmesh/trainer/roles/learner.py).
- Rows come in pairs, the better one first; the pairs of one prompt are one group.
"""

import random
from typing import Any

import torch

from rollmesh.trainer.roles.recipes import Rows

NUM_WORDS = 11
"""Token ids below this belong to the language."""
NUM_PROMPTS, NUM_PAIRS = 4, 2
"""Prompts per batch, and pairs per prompt."""
NUM_PROMPT_TOKENS = 2


def batch(seed: int, is_upside_down: bool = False) -> Rows:
    """Four prompts with two pairs each; `is_upside_down` swaps better and worse answers."""
    chance = random.Random(seed)
    rows: list[dict[str, Any]] = []
    for prompt in range(NUM_PROMPTS):
        start = chance.randrange(NUM_WORDS)
        for _ in range(NUM_PAIRS):
            length = chance.randrange(4, 12)
            right = [(start + at) % NUM_WORDS for at in range(NUM_PROMPT_TOKENS + length)]
            noise = [chance.randrange(NUM_WORDS) for _ in range(length)]
            pair = [right, right[:NUM_PROMPT_TOKENS] + noise]
            better, worse = reversed(pair) if is_upside_down else pair
            rows += [_row(better, 1.0, prompt), _row(worse, 0.0, prompt)]
    return rows


def _row(token_ids: list[int], reward: float, prompt: int) -> dict[str, Any]:
    return {
        "token_ids": torch.tensor(token_ids, dtype=torch.int32),
        "loss_mask": torch.arange(len(token_ids)) >= NUM_PROMPT_TOKENS,
        "reward": reward,
        "group": prompt,
    }
