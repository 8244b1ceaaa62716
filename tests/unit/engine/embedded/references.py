"""Reference log-probs from transformers: one teacher-forced float32 pass, without a cache."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch


class Reference:
    """The transformers model in a folder."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM  # noqa: PLC0415 - takes seconds to import

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # transformers' own warnings
            self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._model.eval()

    @torch.inference_mode()
    def logprobs(self, tokens: Sequence[int], temperature: float = 1.0) -> list[float]:
        """Log-prob of each token but the first, given those before it."""
        ids = torch.tensor([list(tokens)], dtype=torch.int64)
        logits = self._model(ids).logits[0, :-1].float() / temperature
        picked = logits.log_softmax(-1).gather(1, ids[0, 1:, None])
        found: list[float] = picked[:, 0].tolist()
        return found

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """float32 logits (tokens, vocabulary)."""
        logits: torch.Tensor = self._model(torch.tensor([list(tokens)])).logits[0]
        return logits.float()
