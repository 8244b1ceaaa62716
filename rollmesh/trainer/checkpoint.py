"""Model folders in and out: a clear word where there is no model, whole folders or none.

Invariant: a folder that `save_model` names is complete at every moment it exists (written beside
it, then renamed), and stock transformers loads it: weights as safetensors, config, tokenizer.
Driven by the policy; its readers are the engines and people.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    PreTrainedModel,
)
from transformers.utils.logging import (
    disable_progress_bar,
    get_verbosity,
    set_verbosity,
    set_verbosity_error,
)

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
    return _load(AutoModelForCausalLM, folder)[0]


def load_scorer(folder: Path) -> tuple[PreTrainedModel, bool]:
    """A model that says one number of each token, and whether its head is new: then `folder` is a
    language model's, and the head is drawn alike everywhere. In float32; ModelError as above.

    Reward models of transformers' sequence classification have the same head, without a bias.
    """
    verbosity = get_verbosity()
    set_verbosity_error()  # transformers would tell of the new head at length
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model, missing = _load(AutoModelForTokenClassification, folder, _one_number)
    finally:
        set_verbosity(verbosity)
    return model, "score.weight" in missing


def _one_number(config: Any) -> None:
    """A head of one number; without a bias, unless the folder has it so."""
    config.num_labels = 1
    if not any("TokenClassification" in each for each in config.architectures or ()):
        config.token_classification_bias = False


def _load(
    kind: Any, folder: Path, change: Callable[[Any], None] | None = None
) -> tuple[PreTrainedModel, set[str]]:
    """The model in `folder`, its config changed, and what of it the folder lacks."""
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder}: no config.json in it; model.path wants a model folder")
    disable_progress_bar()
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        if change:
            change(config)
        model, told = kind.from_pretrained(
            folder,
            config=config,
            dtype=torch.float32,
            local_files_only=True,
            output_loading_info=True,
        )
    except Exception as error:  # door: transformers and safetensors raise what they like
        first_line = next(iter(str(error).splitlines()), type(error).__name__)
        raise ModelError(f"{folder}: cannot be loaded: {first_line}") from error
    assert isinstance(model, PreTrainedModel)
    return model, set(told["missing_keys"])


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
