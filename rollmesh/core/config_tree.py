"""Settings before they are checked: trees of tables from files, laid over one another.

Owns what a file and a `--set` may look like. Invariants: a table is laid over a table key by key,
anything else replaces what was there; whatever is wrong with a file or an override is a
ConfigError that names it. What the keys mean, config.py says, which drives this.
"""

import tomllib
from pathlib import Path
from typing import Any

import msgspec

from rollmesh.core.errors import ConfigError

EVERY_KEY = "`rollmesh init` writes a file with every key"
WRITES_ONE = "`rollmesh init` writes one"


def explain(message: str, every_key: str = EVERY_KEY) -> str:
    """msgspec's words, with the key in the notation that users write; `every_key` says where an
    unknown one could be looked up."""
    text, _, where = message.partition(" - at `")
    key = where.rstrip("`").removeprefix("$").lstrip(".")
    if "unknown field" in text:
        name = text.split("`")[1]
        full = f"{key}.{name}" if key else name
        return f"unknown key {full!r}; {every_key}"
    return f"{key}: {text[0].lower()}{text[1:]}" if key else text


def read_file(path: Path, writes_one: str = WRITES_ONE) -> dict[str, Any]:
    """The tree of a TOML or JSON file; ConfigError if it does not parse, or is missing, which ends
    with where one comes from."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; {writes_one}") from None
    try:
        if path.suffix == ".json":
            return msgspec.json.decode(raw, type=dict[str, Any])
        return tomllib.loads(raw.decode())
    except (msgspec.MsgspecError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid: {error}") from None


def merge(tree: dict[str, Any], over: dict[str, Any]) -> None:
    """Lay `over` on `tree`, table by table; lists and values replace."""
    for key, value in over.items():
        if isinstance(value, dict) and isinstance(tree.get(key), dict):
            merge(tree[key], value)
        else:
            tree[key] = dict(value) if isinstance(value, dict) else value


def apply_override(tree: dict[str, Any], override: str) -> None:
    """Set one `section.key=value` in `tree`."""
    name, equals, text = override.partition("=")
    if not equals or not name.strip():
        raise ConfigError(f"--set {override}: write it as section.key=value")
    *tables, key = name.strip().split(".")
    for table in tables:
        tree = tree.setdefault(table, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"--set {override}: {table!r} is not a section")
    tree[key] = parse_value(text.strip())


def parse_value(text: str) -> Any:
    """A TOML value; a bare word is a string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
