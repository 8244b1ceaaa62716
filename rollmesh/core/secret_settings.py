"""Settings of an environment that are secrets.

    api_key = { env = "NAME" }      the text of an environment variable
    api_key = { file = "PATH" }     the line in a file that only its owner can read
    prompt_key = { value = "text" } a literal that is not a secret, in spite of its name

- Settings named `*_key`, `*_token`, `*_secret` or `*password*` are secrets, in inner tables too.
  So are those that the environment's class lists in `secret_settings`.
- A literal secret is refused, because settings are copied to config.json.
- Secrets are read in the process that builds the environment, and registered with the logs.
"""

import os
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from rollmesh.core.errors import ConfigError
from rollmesh.core.redaction import register_secret
from rollmesh.core.secret_file import read_secret

WHERE = "env_settings"
_SECRET_NAME = re.compile(
    r"_(?:key|token|secret)$|^(?:api_?key|token|secret)$|password", re.IGNORECASE
)


def check_no_literals(settings: Mapping[str, Any], marked: Collection[str] = ()) -> None:
    """ConfigError for a secret that is written out; `marked` are more names of secrets."""
    for where, name, value in _secrets_in(settings, WHERE, marked):
        _check(where, name, value, is_marked=where == f"{WHERE}.{name}" and name in marked)


def resolve(settings: Mapping[str, Any], marked: Collection[str] = ()) -> dict[str, Any]:
    """Return `settings` with the text of each secret; ConfigError if one is missing."""
    check_no_literals(settings, marked)
    return _resolved(settings, WHERE, marked)


def _is_secret(name: str, marked: Collection[str]) -> bool:
    return name in marked or _SECRET_NAME.search(name) is not None


def _secrets_in(
    settings: Mapping[str, Any], where: str, marked: Collection[str]
) -> Iterator[tuple[str, str, Any]]:
    """Full key, name and value of each secret."""
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
    """The secret that a table names; any other value as it is."""
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
