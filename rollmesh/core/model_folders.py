"""Model folders in Hugging Face layout, by path or by hub id.

    models--ORG--NAME/refs/main -> revision;  models--ORG--NAME/snapshots/REVISION/config.json

- Nothing is downloaded: an id stands for the snapshot in the local Hugging Face cache.
- Layout of the cache: huggingface_hub, "Understand caching" (HF_HUB_CACHE, HF_HOME).

The weights that a run has published: folders, and what proves that an engine serves one.

    WEIGHTS/v000007/             a whole model, or an adapter
    WEIGHTS/v000007/probe.json   what these weights say of a fixed text, written behind them

Invariants: a folder is whole or not there; a probe is whole or not there, and one that is missing
proves nothing either way. Written by the publisher; read by launch, for engines that start, and by
the coordinator, for engines that wake.
"""

import os
import re
from collections.abc import Callable
from pathlib import Path

import msgspec

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
MODEL_FILES = ("config.json", "tokenizer.json")
EXAMPLE = "`rollmesh make-model tiny-model` writes a tiny one to try"


def resolve_model(path: str) -> str:
    """The folder that `path` means: itself, or the cached snapshot of a hub id if there is one."""
    if not HUB_ID.fullmatch(path) or Path(path).exists():
        return path
    repository = hub_cache() / f"models--{path.replace('/', '--')}"
    try:
        revision = (repository / "refs/main").read_text().strip()
    except OSError:
        return path
    snapshot = repository / "snapshots" / revision
    return str(snapshot) if snapshot.is_dir() else path


def hub_cache() -> Path:
    """The folder of the local Hugging Face cache."""
    home = os.environ.get("HF_HOME") or Path(
        os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "huggingface"
    )
    return Path(os.environ.get("HF_HUB_CACHE") or Path(home, "hub")).expanduser()


def why_no_folder(path: str) -> str:
    """Why `path` is no folder, with the remedy; '' if it is one."""
    if Path(path).is_dir():
        return ""
    if HUB_ID.fullmatch(path):
        return (
            "no such folder, and not in the Hugging Face cache; "
            f"if it is a model of the hub, download it: hf download {path}"
        )
    return f"no such folder; name one in Hugging Face layout, or a model of the hub; {EXAMPLE}"


def why_no_model(path: str) -> str:
    """Why `path` is no model with tokenizer and weights, with the remedy; '' if it is one."""
    if why := why_no_folder(path):
        return why
    folder = Path(path)
    missing = [name for name in MODEL_FILES if not (folder / name).is_file()]
    missing += [] if any(folder.glob("*.safetensors")) else ["*.safetensors"]
    if not missing:
        return ""
    return f"not a model folder: it has no {', '.join(missing)}{_download(folder)}"


def _download(folder: Path) -> str:
    """How to complete a snapshot of the cache; '' for other folders."""
    found = re.search(r"models--(.+?)--(.+?)/snapshots/", f"{folder}/")
    return f"; complete the download: hf download {found[1]}/{found[2]}" if found else ""


ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
PROBE_FILE = "probe.json"


class PublishedWeights(msgspec.Struct, frozen=True):
    """A whole model, or an adapter."""

    folder: Path
    policy_version: int


class WeightsProbe(msgspec.Struct, frozen=True, kw_only=True):
    """What weights say of a text, by the trainer's own reckoning."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Of all tokens but the first."""
    tolerance: float
    """Mean difference that still counts as equal."""

    def why_not(self, logprobs: list[float]) -> str:
        """Why these scores are not of the same weights, or ''."""
        if len(logprobs) != len(self.logprobs):
            return f"scored {len(logprobs)} tokens of {len(self.logprobs)}"
        gaps = [abs(mine - its) for mine, its in zip(self.logprobs, logprobs, strict=True)]
        gap = sum(gaps) / max(1, len(gaps))
        # Written so that a gap of NaN fails.
        if not gap <= self.tolerance:
            return f"its log-probs differ from the trainer's by {gap:.3g} on average"
        return ""


def newest_published(weights: Path) -> PublishedWeights | None:
    """The newest whole model of those that stand in a run's folder `weights`; None without any."""
    return _newest(weights, holds_model)


def newest_adapter(weights: Path) -> PublishedWeights | None:
    """The same of adapters."""
    return _newest(weights, holds_adapter)


def _newest(weights: Path, is_one: Callable[[Path], bool]) -> PublishedWeights | None:
    versions = {
        int(folder.name[1:]): folder
        for folder in weights.glob("v*")
        if folder.name[1:].isdecimal() and is_one(folder)
    }
    return PublishedWeights(versions[max(versions)], max(versions)) if versions else None


def holds_model(folder: Path) -> bool:
    """Whether an engine can begin with it: an adapter alone is no model."""
    has_files = all((folder / name).is_file() for name in MODEL_FILES)
    return has_files and any(folder.glob("*.safetensors"))


def holds_adapter(folder: Path) -> bool:
    """Whether it is one of PEFT's."""
    return all((folder / name).is_file() for name in ADAPTER_FILES)


def leave_probe(folder: Path, probe: WeightsProbe) -> None:
    """Write it behind the weights; OSError where that fails, or they are gone."""
    part = folder / f"{PROBE_FILE}.part"
    part.write_bytes(msgspec.json.encode(probe))
    os.replace(part, folder / PROBE_FILE)


def find_probe(folder: Path) -> WeightsProbe | None:
    """That of the weights in `folder`, if there is one."""
    try:
        return msgspec.json.decode((folder / PROBE_FILE).read_bytes(), type=WeightsProbe)
    except (OSError, msgspec.MsgspecError):
        return None
