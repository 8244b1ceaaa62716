"""Settings as trees of tables, before they become structs: reading, merging, explaining, secrets.

- A table is merged into a table key by key; any other value replaces the earlier one.
- A mistake is a ConfigError, one line that names it.
- A literal secret is refused, because settings are copied to config.json. Settings named `*_key`,
  `*_token`, `*_secret` or `*password*`, in inner tables too, and those in an environment's
  `secret_settings` are secrets, read in the process that builds the environment.

    api_key = { env = "NAME" }      the text of an environment variable
    api_key = { file = "PATH" }     the line in a file that only its owner can read
    prompt_key = { value = "text" } a literal that is not a secret, in spite of its name
"""

import os
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import msgspec

from rollmesh.core.errors import ConfigError
from rollmesh.core.redaction import register_secret
from rollmesh.core.secret_files import read_secret
from rollmesh.core.text import MAX_CLOSE, close_names

EVERY_KEY = "`rollmesh init --all` writes a file with every key"
WRITES_ONE = "`rollmesh init` writes one"


def explain(message: str, known: Any, every_key: str = EVERY_KEY, where: str = "") -> str:
    """Rewrite msgspec's error message with the key as users write it, and the allowed values.

    `known` is the type that the tree was converted to, `where` the key of that tree in its file;
    `every_key` ends the line of an unknown key.
    """
    text, _, at = message.partition(" - at `")
    inner = at.rstrip("`").removeprefix("$").lstrip(".")
    key = f"{where}{'.' if where and inner and inner[0] != '[' else ''}{inner}"
    if "unknown field" in text:
        name = text.split("`")[1]
        full = f"{key}.{name}" if key else name
        return f"unknown key {full!r}; {_instead(name, inner, known)}{every_key}"
    if "invalid enum value" in text.lower() and (allowed := _allowed(known, inner)):
        given = text.partition("'")[2].rpartition("'")[0]
        close = close_names(given, allowed)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        return f"{key}: {given!r} is not one of {', '.join(allowed)}{hint}"
    return f"{key}: {text[0].lower()}{text[1:]}" if key else text


def dotted_keys(kind: Any, prefix: str = "") -> Iterator[str]:
    """Yield `section.key` of every field of a struct and of its inner structs."""
    for field in msgspec.structs.fields(kind):
        name = f"{prefix}{field.encode_name}"
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            yield from dotted_keys(field.type, f"{name}.")
        else:
            yield name


def _instead(name: str, section: str, known: Any) -> str:
    """Suggest a key of this section or another; else list all keys of the section."""
    if not (isinstance(known, type) and issubclass(known, msgspec.Struct)):
        return ""
    keys = list(dotted_keys(known))
    start = f"{section}." if section else ""
    inside = [key.removeprefix(start) for key in keys if key.startswith(start)]
    siblings = list(dict.fromkeys(key.partition(".")[0] for key in inside))
    close = [f"{start}{each}" for each in close_names(name, siblings)]
    close = close or [key for key in keys if key.rpartition(".")[2] == name]
    if close:
        return f"did you mean {' or '.join(map(repr, close[:MAX_CLOSE]))}? "
    has = f"[{section}] has" if section else "there are"
    return f"{has} {', '.join(siblings)}; " if siblings else ""


def _allowed(known: Any, key: str) -> list[str]:
    """Return the values of the Literal at `key`; empty if there is none."""
    kind = known
    for part in re.sub(r"\[.*?\]", "", key).split("."):
        if not (isinstance(kind, type) and issubclass(kind, msgspec.Struct)):
            return []
        kind = next((x.type for x in msgspec.structs.fields(kind) if x.encode_name == part), None)
    while get_origin(kind) is tuple:
        kind = get_args(kind)[0]
    return [str(each) for each in get_args(kind)] if get_origin(kind) is Literal else []


def read_file(path: Path, writes_one: str = WRITES_ONE) -> dict[str, Any]:
    """Read the tree of a TOML or JSON file; ConfigError if it is missing or does not parse."""
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
    """Merge `over` into `tree`, table by table; lists and values replace."""
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
    """Parse a TOML value; a bare word is a string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


WHERE = "env_settings"
_SECRET_NAME = re.compile(
    r"_(?:key|token|secret)$|^(?:api_?key|token|secret)$|password", re.IGNORECASE
)


def check_no_literals(settings: Mapping[str, Any], marked: Collection[str] = ()) -> None:
    """Raise ConfigError for a literal secret; `marked` are more names of secrets."""
    for where, name, value in _secrets_in(settings, WHERE, marked):
        _check(where, name, value, is_marked=where == f"{WHERE}.{name}" and name in marked)


def resolve_secrets(settings: Mapping[str, Any], marked: Collection[str] = ()) -> dict[str, Any]:
    """Return `settings` with the text of each secret; ConfigError if one is missing."""
    check_no_literals(settings, marked)
    return _resolved(settings, WHERE, marked)


def _is_secret(name: str, marked: Collection[str]) -> bool:
    return name in marked or _SECRET_NAME.search(name) is not None


def _secrets_in(
    settings: Mapping[str, Any], where: str, marked: Collection[str]
) -> Iterator[tuple[str, str, Any]]:
    """Yield full key, name and value of each secret."""
    for name, value in settings.items():
        key = f"{where}.{name}"
        if _is_secret(name, marked):
            yield key, name, value
            continue
        for inner in value if isinstance(value, list | tuple) else [value]:
            if isinstance(inner, Mapping):
                yield from _secrets_in(inner, key, ())


def _check(key: str, name: str, value: Any, *, is_marked: bool) -> None:
    is_literal = isinstance(value, str) and value != ""
    if not is_literal and not (is_marked and isinstance(value, Mapping) and "value" in value):
        return
    otherwise = "" if is_marked else ', or { value = "TEXT" } if it is not a secret'
    raise ConfigError(
        f"{key}: settings are copied to config.json, so a secret is not written there; write "
        f'{key} = {{ env = "{name.upper()}" }} or {{ file = "PATH" }}{otherwise}'
    )


def _resolved(settings: Mapping[str, Any], where: str, marked: Collection[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in settings.items():
        key = f"{where}.{name}"
        if _is_secret(name, marked):
            found[name] = _text_of(key, value)
        elif isinstance(value, Mapping):
            found[name] = _resolved(value, key, ())
        elif isinstance(value, list | tuple):
            found[name] = [
                _resolved(each, key, ()) if isinstance(each, Mapping) else each for each in value
            ]
        else:
            found[name] = value
    return found


def _text_of(key: str, value: Any) -> Any:
    """Return the secret that a table names; other values are returned unchanged."""
    if not (isinstance(value, Mapping) and len(value) == 1):
        return value
    [(kind, text)] = value.items()
    if kind == "value":
        return text
    if kind == "file":
        return _read(key, str(text))
    if kind != "env":
        return value
    secret = os.environ.get(str(text), "")
    if not secret:
        raise ConfigError(
            f'{key} = {{ env = "{text}" }}: the variable is not set; set it where the processes '
            "that load the environment start"
        )
    register_secret(secret)
    return secret


def _read(key: str, path: str) -> str:
    try:
        return read_secret(Path(path))
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from None
