"""Write random PEFT adapters for the tiny models, and the models with the adapters merged.

The same arguments give the same files.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.unit.engine.embedded.tiny_models import write_model

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RANK, ALPHA = 4, 8.0
PREFIX = "base_model.model."


def write_adapter(
    folder: Path, base: Path, seed: int = 0, targets: Sequence[str] = TARGETS, size: float = 0.3
) -> Path:
    """Write an adapter over the linear layers of the model in `base`; return its folder."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in load_file(base / "model.safetensors").items():
        layer = name.removesuffix(".weight")
        if layer.rsplit(".", 1)[-1] in targets:
            rows, columns = weight.shape
            down = torch.randn((RANK, columns), generator=generator) * size
            up = torch.randn((rows, RANK), generator=generator) * size
            tensors[f"{PREFIX}{layer}.lora_A.weight"] = down
            tensors[f"{PREFIX}{layer}.lora_B.weight"] = up
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    write_adapter_config(folder, targets=targets)
    return folder


def write_adapter_config(folder: Path, targets: Sequence[str] = TARGETS, **changes: Any) -> None:
    """Write adapter_config.json."""
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "base",
        "r": RANK,
        "lora_alpha": ALPHA,
        "lora_dropout": 0.0,
        "target_modules": sorted(targets),
        "bias": "none",
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps({**config, **changes}))


def write_merged(folder: Path, base: Path, adapter: Path, family: str, seed: int) -> Path:
    """Write the model of `base` with weights W + SCALE * B A; return its folder."""
    write_model(folder, family, seed=seed)
    weights = load_file(base / "model.safetensors")
    tensors = load_file(adapter / "adapter_model.safetensors")
    for name, down in tensors.items():
        if name.endswith(".lora_A.weight"):
            layer = name.removeprefix(PREFIX).removesuffix(".lora_A.weight")
            up = tensors[f"{PREFIX}{layer}.lora_B.weight"]
            weights[f"{layer}.weight"] = weights[f"{layer}.weight"] + ALPHA / RANK * (up @ down)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
