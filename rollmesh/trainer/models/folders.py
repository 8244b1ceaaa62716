"""The cache folder that torch makes in TMPDIR as transformers imports its compiler.

Model folders in and out: a clear word where there is no model, whole folders or none.

Invariant: a folder that `save_model` names is complete at every moment it exists (written beside
it, then renamed), and stock transformers loads it: weights as safetensors in shards, config,
tokenizer. Nothing is synced: what a process wrote outlives its kill -9, and of a machine's crash
no weights are promised. Driven by the policy and by carriers; its readers are engines and people.
"""

import contextlib
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
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

from rollmesh.core.errors import FULL, ModelError, NoRoom
from rollmesh.trainer.models.safetensors_layout import MAX_FILE_BYTES


def drop_empty_cache() -> None:
    """Remove it while it is empty; torch makes it again if it compiles anything."""
    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR", "")
    if os.path.dirname(folder) == tempfile.gettempdir():
        with contextlib.suppress(OSError):  # it is in use, or gone
            os.rmdir(folder)


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

drop_empty_cache()


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


def num_parameters_in(folder: Path) -> int:
    """Count the numbers in the weights of a model folder by the heads of its files alone; 0 where
    it has no safetensors."""
    num = 0
    for path in folder.glob("*.safetensors"):
        with contextlib.suppress(OSError, SafetensorError), safe_open(path, "pt") as file:
            num += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118 - not a dict
    return num


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
    model: PreTrainedModel,
    source: Path,
    folder: Path,
    state: dict[str, Tensor] | None = None,
    inside: Callable[[Path], None] | None = None,
) -> None:
    """Write `model` with the companions of `source` as `folder`, taking an older one's place;
    `state` are its weights, where it does not hold all of them; `inside` writes what else is to be
    in it."""
    part = begin_folder(folder)
    if inside:
        inside(part)
    model.save_pretrained(part, state_dict=state, max_shard_size=MAX_FILE_BYTES)
    _copy_companions(source, part)
    end_folder(folder)


def begin_without_weights(model: PreTrainedModel, source: Path, folder: Path) -> None:
    """Begin `folder` with everything but the weights, which another writes before it is ended."""
    write_config_files(model, source, begin_folder(folder))


def write_config_files(model: PreTrainedModel, source: Path, folder: Path) -> None:
    """Everything of a model's folder but the weights."""
    # An engine goes by the name of the class; FSDP2 puts its own in front of it.
    model.config.architectures = [type(model).__name__.removeprefix("FSDP")]
    model.config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
    _copy_companions(source, folder)


def has_native_layout(model: PreTrainedModel) -> bool:
    """Whether its folder has the tensors that it holds, by their names; of others (fused experts,
    say) transformers makes the folder's as it writes."""
    return not getattr(model, "_weight_conversions", None)


@contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Within, `folder` is written: ModelError, in one line, where the disk refuses it; NoRoom where
    that is full."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        why = (getattr(error, "strerror", None) or str(error)).lower()
        is_full = any(os.strerror(each).lower() in why for each in FULL)
        kind = NoRoom if is_full else ModelError
        raise kind(f"{folder}: cannot be written: {why}; give run.folder room") from error


def partial_path(folder: Path) -> Path:
    """Where a folder is written until it is whole."""
    return folder.with_name(f"{folder.name}.part")


def begin_folder(folder: Path) -> Path:
    """An empty part of it; what an earlier try left is gone."""
    part = partial_path(folder)
    for leftover in (part, _older(folder)):
        shutil.rmtree(leftover, ignore_errors=True)
    part.mkdir(parents=True)
    return part


def end_folder(folder: Path) -> None:
    """Its part is whole, and takes the place of an older folder."""
    older = _older(folder)
    if folder.exists():
        folder.rename(older)
    partial_path(folder).rename(folder)
    shutil.rmtree(older, ignore_errors=True)


def _older(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.old")


def _copy_companions(source: Path, part: Path) -> None:
    for name in COMPANIONS:
        if (source / name).is_file():
            shutil.copyfile(source / name, part / name)
