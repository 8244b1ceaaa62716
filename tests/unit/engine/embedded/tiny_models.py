"""Write tiny random models in Hugging Face layout.

- The same arguments give the same files.
- Weights are large enough for a wrong position or mask to change the logits visibly.
- The module does not import transformers, which takes seconds.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

VOCAB_SIZE = 96
EOS = 7
CLASSES = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}


def tiny_config(family: str, **changes: Any) -> dict[str, Any]:
    """A config.json of `family`: two layers, grouped queries, heads wider than width / heads."""
    config = {
        "architectures": [CLASSES.get(family, "Other")],
        "model_type": family,
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 256,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "pad_token_id": None,
        "eos_token_id": EOS,
        "torch_dtype": "float32",
    }
    if family == "qwen2":  # its transformers class takes no head_dim
        config |= {"head_dim": 8}
    return config | changes


def tiny_weights(config: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """Random weights by Hugging Face's names."""
    generator = torch.Generator().manual_seed(seed)
    width, mlp, head_dim = (config[k] for k in ("hidden_size", "intermediate_size", "head_dim"))
    queries, keys = (config[k] * head_dim for k in ("num_attention_heads", "num_key_value_heads"))

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 0.35

    def norm(size: int) -> torch.Tensor:
        return 1 + random(size)

    weights = {"model.embed_tokens.weight": random(config["vocab_size"], width)}
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}."
        for name, rows in (("q", queries), ("k", keys), ("v", keys)):
            weights[f"{layer}self_attn.{name}_proj.weight"] = random(rows, width)
            if config["model_type"] == "qwen2" or config.get("attention_bias"):
                weights[f"{layer}self_attn.{name}_proj.bias"] = random(rows)
        weights[f"{layer}self_attn.o_proj.weight"] = random(width, queries)
        if config.get("attention_bias"):
            weights[f"{layer}self_attn.o_proj.bias"] = random(width)
        if config["model_type"] == "qwen3":
            weights[f"{layer}self_attn.q_norm.weight"] = norm(head_dim)
            weights[f"{layer}self_attn.k_norm.weight"] = norm(head_dim)
        for name in ("gate", "up"):
            weights[f"{layer}mlp.{name}_proj.weight"] = random(mlp, width)
        weights[f"{layer}mlp.down_proj.weight"] = random(width, mlp)
        weights[f"{layer}input_layernorm.weight"] = norm(width)
        weights[f"{layer}post_attention_layernorm.weight"] = norm(width)
    weights["model.norm.weight"] = norm(width)
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = random(config["vocab_size"], width)
    return weights


def write_model(folder: Path, family: str = "qwen3", seed: int = 0, **changes: Any) -> Path:
    """Write a model into `folder`; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    config = tiny_config(family, **changes)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tiny_weights(config, seed), folder / "model.safetensors", metadata={"format": "pt"})
    return folder
