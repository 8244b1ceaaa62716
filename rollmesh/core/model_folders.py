"""Model folders in Hugging Face layout, by path or Hub id, and the weights that a run publishes.

- Nothing is downloaded: an id means the snapshot in the local cache (huggingface_hub, "Understand
  caching"; HF_HUB_CACHE, HF_HOME).
- A published folder, and the probe in it, is complete or absent; a missing probe proves nothing.

    models--ORG--NAME/refs/main -> revision;  models--ORG--NAME/snapshots/REVISION/config.json
    WEIGHTS/v000007/             a whole model, or an adapter
    WEIGHTS/v000007/probe.json   the log-probs that these weights give a fixed text
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
    """Return the folder for `path`: itself, or the cached snapshot of a Hub id if there is one."""
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
    """Return the folder of the local Hugging Face cache."""
    home = os.environ.get("HF_HOME") or Path(
        os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "huggingface"
    )
    return Path(os.environ.get("HF_HUB_CACHE") or Path(home, "hub")).expanduser()


def why_no_folder(path: str) -> str:
    """Return why `path` is not a folder, with the remedy; '' if it is one."""
    if Path(path).is_dir():
        return ""
    if HUB_ID.fullmatch(path):
        return (
            "no such folder, and not in the Hugging Face cache; "
            f"if it is a model of the hub, download it: hf download {path}"
        )
    return f"no such folder; name one in Hugging Face layout, or a model of the hub; {EXAMPLE}"


def why_no_model(path: str) -> str:
    """Return why `path` is not a model with tokenizer and weights, with the remedy; '' if it is
    one.
    """
    if why := why_no_folder(path):
        return why
    folder = Path(path)
    missing = [name for name in MODEL_FILES if not (folder / name).is_file()]
    missing += [] if any(folder.glob("*.safetensors")) else ["*.safetensors"]
    if not missing:
        return ""
    return f"not a model folder: it has no {', '.join(missing)}{_download(folder)}"


def _download(folder: Path) -> str:
    """Return how to complete a snapshot of the cache; '' for other folders."""
    found = re.search(r"models--(.+?)--(.+?)/snapshots/", f"{folder}/")
    return f"; complete the download: hf download {found[1]}/{found[2]}" if found else ""


ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
PROBE_FILE = "probe.json"


class PublishedWeights(msgspec.Struct, frozen=True):
    """A published model or adapter."""

    folder: Path
    policy_version: int


class WeightsProbe(msgspec.Struct, frozen=True, kw_only=True):
    """The log-probs that weights give a text, by the trainer's computation."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Log-probs of all tokens but the first."""
    tolerance: float
    """Largest mean difference that counts as equal."""

    def why_not(self, logprobs: list[float]) -> str:
        """Return why these log-probs are not of the same weights, or ''."""
        if len(logprobs) != len(self.logprobs):
            return f"scored {len(logprobs)} tokens of {len(self.logprobs)}"
        gaps = [abs(mine - its) for mine, its in zip(self.logprobs, logprobs, strict=True)]
        gap = sum(gaps) / max(1, len(gaps))
        # NaN must fail.
        if not gap <= self.tolerance:
            return f"its log-probs differ from the trainer's by {gap:.3g} on average"
        return ""


def newest_published(weights: Path) -> PublishedWeights | None:
    """Return the newest complete model in a run's folder `weights`; None if there is none."""
    return _newest(weights, holds_model)


def newest_adapter(weights: Path) -> PublishedWeights | None:
    """Return the newest complete adapter in a run's folder `weights`; None if there is none."""
    return _newest(weights, holds_adapter)


def _newest(weights: Path, is_one: Callable[[Path], bool]) -> PublishedWeights | None:
    versions = {
        int(folder.name[1:]): folder
        for folder in weights.glob("v*")
        if folder.name[1:].isdecimal() and is_one(folder)
    }
    return PublishedWeights(versions[max(versions)], max(versions)) if versions else None


def holds_model(folder: Path) -> bool:
    """Return whether an engine can load it; an adapter alone is not a model."""
    has_files = all((folder / name).is_file() for name in MODEL_FILES)
    return has_files and any(folder.glob("*.safetensors"))


def holds_adapter(folder: Path) -> bool:
    """Return whether it is a PEFT adapter."""
    return all((folder / name).is_file() for name in ADAPTER_FILES)


def leave_probe(folder: Path, probe: WeightsProbe) -> None:
    """Write the probe into the weights' folder; OSError if that fails, or the folder is gone."""
    part = folder / f"{PROBE_FILE}.part"
    part.write_bytes(msgspec.json.encode(probe))
    os.replace(part, folder / PROBE_FILE)


def find_probe(folder: Path) -> WeightsProbe | None:
    """Return the probe in `folder`, if there is one."""
    try:
        return msgspec.json.decode((folder / PROBE_FILE).read_bytes(), type=WeightsProbe)
    except (OSError, msgspec.MsgspecError):
        return None
