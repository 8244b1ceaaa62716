"""Stock transformers: log-probs of rows one at a time, and a model that cannot pack."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma2ForCausalLM


def one_by_one(folder: Path, rows: list[dict[str, Any]]) -> list[Tensor]:
    """Return the log-probs of each row's trained tokens."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    logprobs = []
    for each in rows:
        ids_T = each["token_ids"].long()
        with torch.no_grad():
            scaled_TV = model(ids_T[None]).logits[0] / each.get("temperature", 1.0)
        logprobs_TV = scaled_TV.log_softmax(-1)
        logprobs_T = logprobs_TV[:-1].gather(1, ids_T[1:, None])[:, 0]
        logprobs.append(logprobs_T[each["loss_mask"][1:]])
    return logprobs


def write_soft_capped(folder: Path) -> None:
    """A tiny Gemma 2, whose attention has a soft cap."""
    config = Gemma2Config(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        attn_logit_softcapping=5.0,
        sliding_window=16,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        Gemma2ForCausalLM(config).save_pretrained(folder)
