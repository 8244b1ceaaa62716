"""Model folders in Hugging Face layout, by path or by hub id.

    models--ORG--NAME/refs/main -> revision;  models--ORG--NAME/snapshots/REVISION/config.json

- Nothing is downloaded: an id stands for the snapshot in the local Hugging Face cache.
- Layout of the cache: huggingface_hub, "Understand caching" (HF_HUB_CACHE, HF_HOME).
"""

import os
import re
from pathlib import Path

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
