"""Reads a model folder in Hugging Face's layout (Qwen2, Qwen3, Llama): architecture and weights.

A folder that is no such model is refused in one line (ModelError) before a weight is read. Files:
config.json, generation_config.json, model.safetensors or its sharded form.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import orjson
import torch
from safetensors import SafetensorError, safe_open

from rollmesh.core.errors import ModelError

FAMILIES = ("qwen2", "qwen3", "llama")


class RopeScaling(msgspec.Struct, frozen=True, kw_only=True):
    """Scaling of rotary frequencies; `kind` is default, linear or llama3.

    The formulas are those of Hugging Face's `modeling_rope_utils`; llama3's other fields are
    described in the Llama 3.1 model card.
    """

    kind: str = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192


class Architecture(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers that define a model's forward pass."""

    family: str
    vocab_size: int
    width: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    max_context: int
    ties_embeddings: bool
    rope: RopeScaling
    eos_token_ids: tuple[int, ...]
    """From generation_config.json and config.json; generation stops at any of them."""
    name: str
    """Hugging Face's class name, for /model_info."""


def read_architecture(folder: Path) -> Architecture:
    """Return the architecture of the model in `folder`; ModelError names the file and the
    reason."""
    path = folder / "config.json"
    config = read_json(path)
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ModelError(
            f"{path}: model_type {family!r} is not run by the embedded engine, which runs "
            f"{', '.join(FAMILIES)}; use SGLang for others (engine.urls)"
        )
    refuse_unsupported(path, config)
    try:
        heads = int(config["num_attention_heads"])
        return Architecture(
            family=family,
            vocab_size=int(config["vocab_size"]),
            width=int(config["hidden_size"]),
            num_layers=int(config["num_hidden_layers"]),
            num_heads=heads,
            num_kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or config["hidden_size"] // heads),
            norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            max_context=int(config.get("max_position_embeddings", 4096)),
            ties_embeddings=bool(config.get("tie_word_embeddings", False)),
            rope=read_rope(path, config),
            eos_token_ids=read_eos(folder, config),
            name=(config.get("architectures") or [family])[0],
        )
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"{path}: not a complete {family} config: {error!r}") from None


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; ModelError if there is none."""
    try:
        tree = orjson.loads(path.read_bytes())
    except OSError as error:
        why = (error.strerror or "cannot be read").lower()
        raise ModelError(
            f"{path.parent}: not a model folder: config.json: {why}; name a folder that "
            "holds config.json and *.safetensors"
        ) from None
    except orjson.JSONDecodeError as error:
        raise ModelError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(tree, dict):
        raise ModelError(f"{path}: holds no JSON object")
    return tree


def refuse_unsupported(path: Path, config: Mapping[str, Any]) -> None:
    """ModelError, in one line, for settings of a supported family that this engine does not
    compute."""
    if config.get("use_sliding_window"):
        raise ModelError(f"{path}: use_sliding_window is not run by the embedded engine")
    if config.get("quantization_config"):
        raise ModelError(f"{path}: quantized weights are not run by the embedded engine")
    if config.get("hidden_act", "silu") != "silu":
        raise ModelError(f"{path}: hidden_act {config['hidden_act']!r} is not run; only silu is")


def read_rope(path: Path, config: Mapping[str, Any]) -> RopeScaling:
    """Return rotary settings from `rope_parameters` (transformers 5) or `rope_scaling` (before)."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind not in ("default", "linear", "llama3"):
        raise ModelError(
            f"{path}: rope scaling {kind!r} is not run by the embedded engine, which runs "
            "default, linear and llama3"
        )
    return RopeScaling(
        kind=kind,
        theta=float(given.get("rope_theta") or config.get("rope_theta") or 10_000.0),
        factor=float(given.get("factor", 1.0)),
        low_freq_factor=float(given.get("low_freq_factor", 1.0)),
        high_freq_factor=float(given.get("high_freq_factor", 4.0)),
        original_context=int(given.get("original_max_position_embeddings", 8192)),
    )


def read_eos(folder: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the end tokens of both files, merged as in SGLang."""
    found: set[int] = set()
    path = folder / "generation_config.json"
    for source in (config, read_json(path) if path.exists() else {}):
        eos = source.get("eos_token_id")
        found.update([] if eos is None else eos if isinstance(eos, list) else [eos])
    return tuple(sorted(found))


def rotary_frequencies(rope: RopeScaling, head_dim: int) -> torch.Tensor:
    """Return inverse frequencies of the rotary embedding, float32 of shape (head_dim / 2,).

    Formulas: Su et al., RoFormer (2021); linear interpolation: Chen et al. (2023); llama3: the
    smoothed interpolation published with Llama 3.1.
    """
    inverse = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if rope.kind == "linear":
        return inverse / rope.factor
    if rope.kind == "default":
        return inverse
    wavelength = 2 * math.pi / inverse
    low, high = rope.low_freq_factor, rope.high_freq_factor
    smooth = ((rope.original_context / wavelength - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * inverse / rope.factor + smooth * inverse


def read_weights(folder: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return all tensors of the folder's safetensors files, by Hugging Face's names, as `dtype`."""
    weights: dict[str, torch.Tensor] = {}
    for path in weight_files(folder):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - safe_open is no mapping
                    weights[name] = file.get_tensor(name).to(dtype)
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{path}: cannot be read: {error}") from None
    return weights


def weight_files(folder: Path) -> list[Path]:
    """Return the folder's safetensors files: one, or those that its index names."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        return [folder / name for name in sorted(set(read_json(index)["weight_map"].values()))]
    single = folder / "model.safetensors"
    if not single.exists():
        raise ModelError(f"{folder}: not a model folder: no model.safetensors in it")
    return [single]
