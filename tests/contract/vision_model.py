"""A tiny random vision model, and pictures for it.

It is the same on every call; its processor makes one token of 32 by 32 pixels, so that images of
different sizes have different lengths in the engine.
"""

import base64
import json
import struct
import zlib
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from rollmesh.testing.model_folder import write_large_folder

_PIXELS = {"shortest_edge": 32 * 32, "longest_edge": 200_000}
_CUTTING = {"patch_size": 16, "temporal_patch_size": 2, "merge_size": 2, "size": _PIXELS}
_COLOURS = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "rescale_factor": 1 / 255}
_STEPS = dict.fromkeys(("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"), True)
_MARKS = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
}


def write_seeing_model(folder: Path) -> Path:
    """Write a Qwen3-VL of two layers for text and two for images; return the folder."""
    write_large_folder(folder, "qwen3_vl")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = {f"{name}_id": tokenizer.token_to_id(mark) for name, mark in _MARKS.items()}
    end = tokenizer.token_to_id("<|im_end|>")
    text = {
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 4096,
        "rope_scaling": {"rope_type": "default", "mrope_section": [6, 5, 5]},
        "eos_token_id": end,
        "initializer_range": 0.2,  # else all tokens are equally likely
    }
    sight = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "out_hidden_size": 64,
        "num_position_embeddings": 256,
        "deepstack_visual_indexes": [0, 1],
        "initializer_range": 0.2,
    }
    torch.manual_seed(0)
    config = Qwen3VLConfig(text_config=text, vision_config=sight, **ids)
    Qwen3VLForConditionalGeneration(config).save_pretrained(folder)
    _add(
        folder / "config.json", architectures=["Qwen3VLForConditionalGeneration"], eos_token_id=end
    )
    _add(folder / "generation_config.json", eos_token_id=[end])
    processor = {"processor_class": "Qwen3VLProcessor"}
    image = {"image_processor_type": "Qwen2VLImageProcessor", **_CUTTING, **_COLOURS, **_STEPS}
    _add(folder / "preprocessor_config.json", **image, **processor)
    video = {"video_processor_type": "Qwen3VLVideoProcessor", **_CUTTING, **_COLOURS}
    _add(folder / "video_preprocessor_config.json", **video, **processor)
    tokens = {"tokenizer_class": "Qwen2TokenizerFast", "pad_token": "<|endoftext|>", **_MARKS}
    _add(folder / "tokenizer_config.json", **tokens, **processor)
    return folder


def _add(path: Path, **more: Any) -> None:
    known = json.loads(path.read_bytes()) if path.exists() else {}
    path.write_text(json.dumps(known | more))


def picture(width: int, height: int, colour: tuple[int, int, int]) -> str:
    """Return the data address of a PNG in one colour."""
    row = b"\0" + bytes(colour) * width
    chunks = [
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(row * height)),
        (b"IEND", b""),
    ]
    raw = b"\x89PNG\r\n\x1a\n"
    for kind, data in chunks:
        raw += struct.pack(">I", len(data)) + kind + data
        raw += struct.pack(">I", zlib.crc32(kind + data))
    return "data:image/png;base64," + base64.b64encode(raw).decode()
