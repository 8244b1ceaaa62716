"""Rows for tests of roles."""

import random
from typing import Any

import torch


def row(token_ids: list[int], num_prompt: int = 1, **columns: Any) -> dict[str, Any]:
    """A row of which all but the prompt trains."""
    ids = torch.tensor(token_ids, dtype=torch.int32)
    return {"token_ids": ids, "loss_mask": torch.arange(len(ids)) >= num_prompt, **columns}


def drawn(seed: int, *lengths: int) -> list[dict[str, Any]]:
    """Rows of these lengths, with prompts of one to three tokens."""
    chance = random.Random(seed)
    return [
        row([chance.randrange(200) for _ in range(length)], chance.randrange(1, 4))
        for length in lengths
    ]
