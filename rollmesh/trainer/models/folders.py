"""Reads and writes model folders.

- A folder is complete whenever it exists: it is written beside its path, then renamed. Stock
  transformers loads it: safetensors in shards, config and tokenizer.
- Nothing is synced: a written folder survives kill -9 of its process, not a crash of the machine.
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
    """Remove torch's cache folder if it is empty; torch makes it again if it compiles."""
    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR", "")
    if os.path.dirname(folder) == tempfile.gettempdir():
        with contextlib.suppress(OSError):  # it is used, or missing
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
"""Files of a model folder beside config and weights, copied unchanged."""

drop_empty_cache()


def load_model(folder: Path) -> PreTrainedModel:
    """Load the causal language model in `folder`, in float32; raise ModelError if there is none."""
    return _load(AutoModelForCausalLM, folder)[0]


def load_scorer(folder: Path) -> tuple[PreTrainedModel, bool]:
    """Load a model with one output per token, in float32; return it, and whether its head is new.

    The head is new if `folder` has a language model; it is then the same on every rank. Reward
    models of transformers' sequence classification have the same head, without a bias. Raises
    ModelError if there is no model.
    """
    verbosity = get_verbosity()
    set_verbosity_error()  # transformers would log the new head at length
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model, missing = _load(AutoModelForTokenClassification, folder, _one_number)
    finally:
        set_verbosity(verbosity)
    return model, "score.weight" in missing


def num_parameters_in(folder: Path) -> int:
    """Count a model folder's parameters from the headers of its files; 0 without safetensors."""
    num = 0
    for path in folder.glob("*.safetensors"):
        with contextlib.suppress(OSError, SafetensorError), safe_open(path, "pt") as file:
            num += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118 - not a dict
    return num


def _one_number(config: Any) -> None:
    """Configure a head with one output, without a bias unless the folder has one."""
    config.num_labels = 1
    if not any("TokenClassification" in each for each in config.architectures or ()):
        config.token_classification_bias = False


def _load(
    kind: Any, folder: Path, change: Callable[[Any], None] | None = None
) -> tuple[PreTrainedModel, set[str]]:
    """Return the model in `folder` with a changed config, and the names missing in the folder."""
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder}: no config.json in it; set model.path to a model folder")
    disable_progress_bar()
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        if change:
            change(config)
        model, loading = kind.from_pretrained(
            folder,
            config=config,
            dtype=torch.float32,
            local_files_only=True,
            output_loading_info=True,
        )
    except Exception as error:  # door: transformers and safetensors may raise anything
        first_line = next(iter(str(error).splitlines()), type(error).__name__)
        raise ModelError(f"{folder}: cannot be loaded: {first_line}") from error
    assert isinstance(model, PreTrainedModel)
    return model, set(loading["missing_keys"])


def save_model(
    model: PreTrainedModel,
    source: Path,
    folder: Path,
    state: dict[str, Tensor] | None = None,
    inside: Callable[[Path], None] | None = None,
) -> None:
    """Write `model` with the companion files of `source` as `folder`, replacing an older one.

    `state` has the weights, if the model does not hold all of them; `inside` writes further files.
    """
    part = begin_folder(folder)
    if inside:
        inside(part)
    model.save_pretrained(part, state_dict=state, max_shard_size=MAX_FILE_BYTES)
    _copy_companions(source, part)
    end_folder(folder)


def begin_without_weights(model: PreTrainedModel, source: Path, folder: Path) -> None:
    """Begin `folder` with everything but the weights; another process adds those and ends it."""
    write_config_files(model, source, begin_folder(folder))


def write_config_files(model: PreTrainedModel, source: Path, folder: Path) -> None:
    """Write all files of a model folder except the weights."""
    # Engines select by the class name; FSDP2 adds a prefix to it.
    model.config.architectures = [type(model).__name__.removeprefix("FSDP")]
    model.config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
    _copy_companions(source, folder)


def has_native_layout(model: PreTrainedModel) -> bool:
    """Whether the model's folder has its tensors under their own names. For other models (fused
    experts, for example) transformers converts them as it writes."""
    return not getattr(model, "_weight_conversions", None)


@contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Turn disk errors while `folder` is written into ModelError, one line, or NoRoom if the disk
    is full."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        why = (getattr(error, "strerror", None) or str(error)).lower()
        is_full = any(os.strerror(each).lower() in why for each in FULL)
        kind = NoRoom if is_full else ModelError
        raise kind(f"{folder}: cannot be written: {why}; make room in run.folder") from error


def partial_path(folder: Path) -> Path:
    """The path at which a folder is written until it is complete."""
    return folder.with_name(f"{folder.name}.part")


def begin_folder(folder: Path) -> Path:
    """Return an empty partial folder; remove what an earlier try left."""
    part = partial_path(folder)
    for leftover in (part, _older(folder)):
        shutil.rmtree(leftover, ignore_errors=True)
    part.mkdir(parents=True)
    return part


def end_folder(folder: Path) -> None:
    """Rename the complete partial folder, replacing an older folder."""
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
