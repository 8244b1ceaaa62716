"""Reads an adapter folder in PEFT's layout, and fuses it like the model's projections.

    adapter_config.json         r, lora_alpha; settings that change the formula are refused
    adapter_model.safetensors   base_model.model.<layer>.lora_A.weight [r, in], lora_B [out, r]

Every tensor of the file must belong to the model, or the folder is refused in one line
(ModelError). Source: PEFT's LoraConfig and its save_pretrained. Shapes: as in model.py.
"""

import math
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rollmesh.core.errors import ModelError
from rollmesh.core.ids import new_id
from rollmesh.engine.embedded.checkpoint import Architecture, read_json
from rollmesh.engine.embedded.model import Adapter, LayerAdapter, LoraPair, Model, interleave

PREFIX = "base_model.model."
"""Prefix of each name in the file."""
GROUPS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "output": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
"""Parts of each of the model's projections."""
NOT_RUN = ("use_dora", "rank_pattern", "alpha_pattern", "modules_to_save", "fan_in_fan_out")
"""Settings that change what an adapter computes."""


def read_adapter(name: str, folder: Path, model: Model) -> Adapter:
    """Read the adapter in `folder`; ModelError, naming the file, if it does not fit the model."""
    scale = _scale_of(folder / "adapter_config.json")
    path = folder / "adapter_model.safetensors"
    tensors = _read_tensors(path, model.dtype)
    layers: list[LayerAdapter] = []
    for index in range(model.architecture.num_layers):
        pairs: dict[str, LoraPair | None] = {}
        for group, weight in model.projections(index).items():
            sizes = _sizes(group, len(weight), model.architecture)
            parts = _take(tensors, [f"model.layers.{index}.{part}" for part in GROUPS[group]])
            try:
                pairs[group] = _fused(parts, sizes, weight, model.architecture.head_dim, scale)
            except RuntimeError as error:
                why = str(error).splitlines()[0]
                raise ModelError(f"{path}: layer {index} does not fit the model: {why}") from None
        layers.append(LayerAdapter(**pairs))
    if tensors:
        raise ModelError(f"{path}: {min(tensors)} is not run by the embedded engine")
    return Adapter(name, str(folder), new_id("a"), tuple(layers))


def _scale_of(path: Path) -> float:
    if not path.is_file():
        raise ModelError(f"{path.parent}: not an adapter folder: it has no {path.name}")
    config = read_json(path)
    kind, bias = config.get("peft_type"), config.get("bias", "none")
    refused = [key for key in NOT_RUN if config.get(key)]
    if kind != "LORA" or bias != "none" or refused:
        why = refused[0] if refused else f"peft_type {kind!r} with bias {bias!r}"
        raise ModelError(f"{path}: {why} is not run by the embedded engine; plain LORA is")
    try:
        rank, alpha = int(config["r"]), float(config["lora_alpha"])
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{path}: not a complete adapter: {error!r}") from None
    if rank < 1:
        raise ModelError(f"{path}: r = {rank}: an adapter has a rank of 1 at least")
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _read_tensors(path: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    """Read the tensors by the names of the model's own weights."""
    tensors: dict[str, Tensor] = {}
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - safe_open is no mapping
                tensors[name.removeprefix(PREFIX)] = file.get_tensor(name).to(dtype)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from None
    return tensors


def _sizes(group: str, num_rows: int, arch: Architecture) -> list[int]:
    """Return the output sizes of the parts of one projection."""
    if group == "qkv":
        keys = arch.num_kv_heads * arch.head_dim
        return [arch.num_heads * arch.head_dim, keys, keys]
    num_parts = len(GROUPS[group])
    return [num_rows // num_parts] * num_parts


def _take(tensors: dict[str, Tensor], layers: list[str]) -> list[tuple[Tensor, Tensor] | None]:
    """Remove (A, B) of each of `layers` from `tensors`; None for one without adapter."""
    found: list[tuple[Tensor, Tensor] | None] = []
    for layer in layers:
        down, up = f"{layer}.lora_A.weight", f"{layer}.lora_B.weight"
        is_whole = down in tensors and up in tensors  # an incomplete pair is left, and reported
        found.append((tensors.pop(down), tensors.pop(up)) if is_whole else None)
    return found


def _fused(
    parts: list[tuple[Tensor, Tensor] | None],
    sizes: list[int],
    weight: Tensor,
    head_dim: int,
    scale: float,
) -> LoraPair | None:
    """Fuse the parts of a projection; RuntimeError if shapes do not fit `weight`."""
    downs = [part[0] for part in parts if part]
    if not downs:
        return None
    down_RW = torch.cat([weight.new_empty(0, weight.shape[1]), *downs]).contiguous()
    up = weight.new_zeros(len(weight), len(down_RW))
    row = column = 0
    for at, (part, size) in enumerate(zip(parts, sizes, strict=True)):
        if part:
            down, own_up = part
            if len(parts) > 2 and at < 2:
                own_up = interleave(own_up, head_dim)
            stop = column + len(down)
            up[row : row + size, column:stop].copy_(own_up * scale)
            column = stop
        row += size
    return LoraPair(down_RW, up)
