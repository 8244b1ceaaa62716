"""Model folders in and out: a clear word where there is no model, whole folders or none.

Invariant: a folder that `save_model` names is complete at every moment it exists (written beside
it, then renamed), and stock transformers loads it: weights as safetensors, config, tokenizer.
Driven by the policy; its readers are the engines and people.
"""

import shutil
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from rollmesh.core.errors import ModelError

COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
"""What a model folder holds beside config and weights; copied as it is."""


def load_model(folder: Path) -> PreTrainedModel:
    """The causal language model in `folder`, in float32; ModelError where there is none."""
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder}: no config.json in it; model.path wants a model folder")
    disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True
        )
    except Exception as error:  # door: transformers and safetensors raise what they like
        first_line = next(iter(str(error).splitlines()), type(error).__name__)
        raise ModelError(f"{folder}: cannot be loaded: {first_line}") from error
    assert isinstance(model, PreTrainedModel)
    return model


def save_model(
    model: PreTrainedModel, source: Path, folder: Path, state: dict[str, Tensor] | None = None
) -> None:
    """Write `model` with the companions of `source` as `folder`, taking an older one's place;
    `state` are its weights, where it does not hold all of them."""
    part = folder.with_name(f"{folder.name}.part")
    older = folder.with_name(f"{folder.name}.old")
    for leftover in (part, older):
        shutil.rmtree(leftover, ignore_errors=True)
    part.mkdir(parents=True)
    model.save_pretrained(part, state_dict=state)
    for name in COMPANIONS:
        if (source / name).is_file():
            shutil.copyfile(source / name, part / name)
    if folder.exists():
        folder.rename(older)
    part.rename(folder)
    shutil.rmtree(older, ignore_errors=True)
