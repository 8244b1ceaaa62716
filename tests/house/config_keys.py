"""Read the names of all settings from the config structs, nested ones as dotted keys.

tests/house/config_keys.txt holds the frozen list; CONTRIBUTING.md says how a key is added.
"""

from collections.abc import Iterator
from typing import Any, get_args, get_origin

import msgspec


def config_keys(section: type[msgspec.Struct], prefix: str = "") -> Iterator[str]:
    """`trainer.num_steps` for each leaf; `engines[].url` below a list or table of structs."""
    for field in msgspec.structs.fields(section):
        key = f"{prefix}{field.encode_name}"
        below = [(nested, many) for nested, many in _structs(field.type, many=False)]
        if not below:
            yield key
        for nested, many in below:
            yield from config_keys(nested, f"{key}[]." if many else f"{key}.")


def _structs(annotation: Any, many: bool) -> Iterator[tuple[type[msgspec.Struct], bool]]:
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        yield annotation, many
    else:
        inside = many or get_origin(annotation) in (list, tuple, dict)
        for argument in get_args(annotation):
            yield from _structs(argument, inside)
