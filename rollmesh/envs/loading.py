"""From the setting `env = "package.module:Class"` to an environment, or one clear line.

Invariant: whatever a user's module or constructor raises becomes an EnvError that names the
target and the cause. Short names stand for the built-in environments. Driven by the worker (at
start, so that a broken environment is known at once) and by the trainer, for its tasks.
"""

import importlib
import inspect
import os
import sys
from collections.abc import Mapping

from rollmesh.core.errors import EnvError
from rollmesh.core.types import Json
from rollmesh.envs.env import Env

BUILT_IN = {
    "guess": "rollmesh.envs.guess:GuessEnv",
    "echo": "rollmesh.envs.echo:EchoEnv",
    "gym": "rollmesh.envs.gym:GymEnv",
    "openenv": "rollmesh.envs.openenv:OpenEnvEnv",
}


def load_env(target: str, settings: Mapping[str, Json]) -> Env:
    """The environment that `target` names, built with `settings` as keyword arguments.

    `target` is a built-in name or `package.module:Class`; modules in the working directory are
    found too. Raises EnvError, one line, where it cannot be had.
    """
    module_name, colon, class_name = BUILT_IN.get(target, target).partition(":")
    if not (module_name and colon and class_name):
        names = ", ".join(sorted(BUILT_IN))
        raise EnvError(
            f'env = "{target}" is neither built in ({names}) nor of the form "package.module:Class"'
        )
    env_class = _env_class(target, module_name, class_name)
    _check_settings(target, env_class, settings)
    try:
        return env_class(**settings)
    except (Exception, SystemExit) as error:  # door: a user's constructor may raise anything
        raise EnvError(f'env = "{target}" could not be built: {_cause(error)}') from error


def _env_class(target: str, module_name: str, class_name: str) -> type[Env]:
    cwd = os.getcwd()
    if cwd not in sys.path and "" not in sys.path:
        sys.path.append(cwd)  # last, so that a user's file shadows nothing that is installed
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # door: a user's module may raise anything
        raise EnvError(
            f'env = "{target}": module {module_name} cannot be imported: {_cause(error)}'
        ) from error
    found = getattr(module, class_name, None)
    if found is None:
        raise EnvError(f'env = "{target}": module {module_name} has no class {class_name}')
    if not (inspect.isclass(found) and issubclass(found, Env)):
        raise EnvError(f'env = "{target}" is not a subclass of rollmesh.envs.env.Env')
    missing = sorted(getattr(found, "__abstractmethods__", ()))
    if missing:
        raise EnvError(f'env = "{target}" does not define {", ".join(missing)}')
    return found


def _check_settings(target: str, env_class: type[Env], settings: Mapping[str, Json]) -> None:
    """Refuse settings that the constructor does not know or misses, by name."""
    signature = inspect.signature(env_class)
    try:
        signature.bind(**settings)
    except TypeError as error:
        known = ", ".join(signature.parameters) or "none"
        raise EnvError(
            f'env = "{target}" refuses its settings: {error} (it takes: {known})'
        ) from None


def _cause(error: BaseException) -> str:
    """One line: the kind of error and the first line of what it says."""
    first_line = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {first_line}" if first_line else type(error).__name__
