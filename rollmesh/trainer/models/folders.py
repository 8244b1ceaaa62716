"""Read and write model folders, and the place of each tensor in their files.

    model.safetensors                     or   model-00001-of-00003.safetensors ...
                                               model.safetensors.index.json

- A folder is complete whenever it exists: it is written beside its path, then renamed. Stock
  transformers loads it: safetensors in shards, config and tokenizer.
- Nothing is synced: a written folder survives kill -9 of its process, not a crash of the machine.
- A file has the safetensors format (https://github.com/huggingface/safetensors, "Format"): u64
  length of the header, little-endian; the header, JSON padded by spaces; the tensors, row by row,
  one after the other. Names and index are those of transformers.
- The layout follows from names, types and full shapes only, so ranks agree on it without messages,
  and each can write its rows at their place in the full tensor.
"""

import contextlib
import math
import os
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
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


DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
"""Safetensors' names of element types."""
MAX_FILE_BYTES = 4 * 2**30
"""Limit of the tensors in one file; a larger tensor has its own. Stock transformers reads both."""
SUFFIX = ".safetensors"
INDEX = f"{SUFFIX}.index.json"
_ALIGN = 8
_METADATA = {"format": "pt"}
"""Required by transformers."""


class TensorSpec(NamedTuple):
    """Name, type and full shape of a tensor."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)


class FileOffset(NamedTuple):
    """The place at which a tensor begins."""

    file_name: str
    offset: int


class FolderLayout(NamedTuple):
    """The layout of one folder."""

    heads: dict[str, bytes]
    """The first bytes of each file: length and header."""
    spots: dict[str, FileOffset]
    """Place of each tensor by name, in order."""
    table: bytes
    """Transformers' index of tensors by file; empty if there is one file."""


def plan_layout(
    specs: Iterable[TensorSpec], stem: str, max_bytes: int = MAX_FILE_BYTES
) -> FolderLayout:
    """Return the layout of tensors in files named after `stem`."""
    # Wide elements first, so that each tensor begins at a multiple of its element size.
    ordered = sorted(specs, key=lambda each: -each.dtype.itemsize)
    files = _split_files(ordered, max_bytes)
    heads: dict[str, bytes] = {}
    spots: dict[str, FileOffset] = {}
    for number, members in enumerate(files, 1):
        name = f"{stem}{SUFFIX}"
        if len(files) > 1:
            name = f"{stem}-{number:05d}-of-{len(files):05d}{SUFFIX}"
        heads[name] = _head(members)
        offset = len(heads[name])
        for each in members:
            spots[each.name] = FileOffset(name, offset)
            offset += each.num_bytes
    total_bytes = sum(each.num_bytes for each in ordered)
    return FolderLayout(heads, spots, _index(spots, total_bytes) if len(files) > 1 else b"")


def _split_files(ordered: Sequence[TensorSpec], max_bytes: int) -> list[list[TensorSpec]]:
    files: list[list[TensorSpec]] = [[]]
    filled = 0
    for each in ordered:
        if files[-1] and filled + each.num_bytes > max_bytes:
            files.append([])
            filled = 0
        files[-1].append(each)
        filled += each.num_bytes
    return files


def _head(members: Sequence[TensorSpec]) -> bytes:
    header: dict[str, Any] = {"__metadata__": _METADATA}
    start = 0
    for each in members:
        stop = start + each.num_bytes
        where = {
            "dtype": DTYPE_NAMES[each.dtype],
            "shape": each.shape,
            "data_offsets": (start, stop),
        }
        header[each.name] = where
        start = stop
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % _ALIGN)
    return struct.pack("<Q", len(text)) + text


def _index(spots: dict[str, FileOffset], total_bytes: int) -> bytes:
    files = {name: spot.file_name for name, spot in spots.items()}
    index = {"metadata": {"total_size": total_bytes}, "weight_map": files}
    return msgspec.json.format(msgspec.json.encode(index), indent=2) + b"\n"
