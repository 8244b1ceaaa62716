"""Registry of the scheduling policies, by name.

- A policy is one module of this folder whose class carries `@register_policy`. The fleet file, the
  command line and the simulator take its name and settings from here.
- A policy adds to the builder and reads nothing else.
"""

import importlib
import pkgutil
from collections.abc import Callable
from typing import Protocol, TypeVar, cast

import msgspec

from rollmesh.core.errors import ConfigError
from rollmesh.scheduler.planning.planner import SchedulingPolicy

DEFAULT_POLICY = "fair"
BASELINE_POLICY = "static"
"""Comparisons measure the other policies against it."""


class _PolicyType(Protocol):
    name: str


P = TypeVar("P", bound=type[_PolicyType])
_policies: dict[str, type] = {}


def register_policy(policy: P) -> P:
    """Class decorator: register a SchedulingPolicy under its `name`.

    A class attribute `Settings`, a msgspec struct of seconds with ranges, is the type of the fleet
    file's table [NAME] and of the class's only argument.
    """
    _policies[policy.name] = policy
    return policy


def policy_names() -> tuple[str, ...]:
    """Names of all policies, in alphabetical order."""
    return tuple(sorted(_policies))


def policy_settings_type(name: str) -> type[msgspec.Struct] | None:
    """Type of the settings of a policy; None if it has none."""
    return getattr(_policies[name], "Settings", None)


def make_policy(name: str, settings: msgspec.Struct | None = None) -> SchedulingPolicy:
    """Return a new policy; ConfigError for an unknown name."""
    if name not in _policies:
        raise ConfigError(f"no policy {name!r}; available: {', '.join(policy_names())}")
    make = cast(Callable[..., SchedulingPolicy], _policies[name])
    return make(settings) if settings is not None else make()


for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"rollmesh.scheduler.planning.policies.{_module.name}")
