"""The roles that a process plays: made once, called by name.

Invariants: what is imported is what the plan names, and nothing that a message says; names that
begin with an underscore are nobody's business. Driven by rank.py, and by plain.py.
"""

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollmesh.core.errors import ConfigError
from rollmesh.trainer.controller.meeting import Place
from rollmesh.trainer.controller.spec import RoleSpec


class Cast:
    """See the module."""

    def __init__(self, specs: Mapping[str, RoleSpec], place: Place) -> None:
        """Make each at `place`; ConfigError where a spec names nothing to make one with, and
        whatever a maker raises."""
        self._roles = {name: _make(spec, place) for name, spec in specs.items()}

    def method(self, role: str, name: str) -> Callable[..., Any]:
        """ConfigError where there is none."""
        found = None if name.startswith("_") else getattr(self._roles.get(role), name, None)
        if not callable(found):
            raise ConfigError(f"no {role}.{name} here: {', '.join(self._roles) or 'no roles'}")
        method: Callable[..., Any] = found
        return method

    def fitting(
        self, role: str, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Callable[..., Any]:
        """The method, if it takes these arguments; else ConfigError."""
        method = self.method(role, name)
        try:
            inspect.signature(method).bind(*args, **kwargs)
        except TypeError as error:
            raise ConfigError(f"{role}.{name}: {error}") from None
        return method


def _make(spec: RoleSpec, place: Place) -> object:
    module_name, _, name = spec.make.partition(":")
    make = getattr(importlib.import_module(module_name), name, None)
    if not callable(make):
        raise ConfigError(f"{spec.make!r} is nothing to make a role with")
    return make(place, **spec.settings)
