"""Low-rank adapters that train in place of a model's weights, and their files.

    y = W x + SCALE * B A x        A [rank, in], B [out, rank], SCALE = alpha / rank, alpha = 2 rank

    adapter folder     adapter_config.json, adapter_model.safetensors: PEFT's, over model.path
    merged             W + SCALE * B A, under the names of the original model

- Hu et al. 2021, "LoRA": W is frozen; A is Kaiming-uniform and B is zero, so that the model starts
  unchanged. Adapted are the linear layers of attention and MLP with the names that SGLang adapts;
  not the head, routers, or experts stored as one tensor.
- The model's own names do not change; A and B follow the name of their layer. All ranks draw the
  same A.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from rollmesh.core.errors import ModelError
from rollmesh.core.logs import get_logger
from rollmesh.trainer.models.folders import begin_folder, end_folder, save_model
from rollmesh.trainer.ranks import Ranks, full_tensor, named_weights

SCALE = 2.0
TARGETS = (
    "q_proj",
    "k_proj",
    "v_proj",
    "qkv_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "gate_up_proj",
    "down_proj",
)
DOWN, UP = ".lora_A.weight", ".lora_B.weight"
PEFT_PREFIX = "base_model.model."
INSIDE = "adapter"
"""Subfolder of a merged model's adapter: beside the config, transformers would ask for PEFT."""

log = get_logger()


class LoraLinear(nn.Linear):
    """A linear layer with the weights of `linear` and an adapter."""

    def __init__(self, linear: nn.Linear, rank: int) -> None:
        nn.Module.__init__(self)  # that of nn.Linear would draw new weights
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.lora_A = nn.Linear(self.in_features, rank, bias=False).to(linear.weight)
        self.lora_B = nn.Linear(rank, self.out_features, bias=False).to(linear.weight)
        nn.init.kaiming_uniform_(self.lora_A.weight, a=math.sqrt(5))
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, input: Tensor) -> Tensor:
        adapted: Tensor = self.lora_B(self.lora_A(input))
        return nn.functional.linear(input, self.weight, self.bias) + SCALE * adapted


class LoraAdapters:
    """The adapters of one model."""

    def __init__(self, model: PreTrainedModel, rank: int, source: Path) -> None:
        """Add adapters to `model`, before it is sharded, and freeze everything else.

        `source` is the model's folder. Raises ModelError if there is nothing to adapt.
        """
        self._model = model
        self._rank = rank
        self._source = source
        model.requires_grad_(False)
        self._targets = _inject(model, rank)
        if not self._targets:
            raise ModelError(
                f"{source}: trainer.lora_rank = {rank} finds no linear layer named {TARGETS[0]} or "
                f"alike in {type(model).__name__}; 0 trains all weights"
            )
        num = sum(each.numel() for each in model.parameters() if each.requires_grad)
        log.info("model.adapted", rank=rank, layers=self._targets, num_parameters=num)

    @torch.no_grad()
    def save(self, folder: Path, ranks: Ranks) -> None:
        """Write an adapter folder on the first rank; it is complete whenever it exists. A
        collective."""
        adapters, _ = _split(named_weights(self._model))
        weights = {name: full_tensor(each).cpu() for name, each in adapters.items()}
        if ranks.is_first:
            self._write(begin_folder(folder), weights)
            end_folder(folder)

    @torch.no_grad()
    def save_merged(self, folder: Path, ranks: Ranks) -> None:
        """Write the merged model with the adapter folder in it, on the first rank; a collective."""
        weights = {
            name: full_tensor(each).cpu() for name, each in named_weights(self._model).items()
        }
        if not ranks.is_first:
            return

        def write_inside(part: Path) -> None:
            (part / INSIDE).mkdir()
            self._write(part / INSIDE, _split(weights)[0])

        save_model(self._model, self._source, folder, _merged(weights), write_inside)

    def _write(self, folder: Path, weights: Mapping[str, Tensor]) -> None:
        named = {f"{PEFT_PREFIX}{name}": each.contiguous() for name, each in weights.items()}
        save_file(named, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        config = msgspec.json.format(msgspec.json.encode(self._config()), indent=2)
        # Last, so that a reader that finds it also finds the weights.
        (folder / "adapter_config.json").write_bytes(config + b"\n")

    def _config(self) -> dict[str, Any]:
        """PEFT's LoraConfig; omitted fields have its defaults."""
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": str(self._source.absolute()),
            "r": self._rank,
            "lora_alpha": SCALE * self._rank,
            "lora_dropout": 0.0,
            "target_modules": self._targets,
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
            "modules_to_save": None,
            "use_dora": False,
            "use_rslora": False,
        }


def _inject(model: PreTrainedModel, rank: int) -> list[str]:
    """Replace the layers that can be adapted; return their last names."""
    found = [
        (parent, name)
        for parent in model.modules()
        for name, part in parent.named_children()
        if name in TARGETS and type(part) is nn.Linear
    ]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for parent, name in found:
            setattr(parent, name, LoraLinear(getattr(parent, name), rank))
    return sorted({name for _, name in found})


def _split(weights: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(weights of the adapters, weights of the original model)."""
    adapters = {name: each for name, each in weights.items() if name.endswith((DOWN, UP))}
    return adapters, {name: each for name, each in weights.items() if name not in adapters}


def _merged(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    adapters, merged = _split(weights)
    for name in adapters:
        if name.endswith(DOWN):
            layer = name.removesuffix(DOWN)
            learned = SCALE * (adapters[f"{layer}{UP}"] @ adapters[name])
            merged[f"{layer}.weight"] = merged[f"{layer}.weight"] + learned
    return merged
