"""Load the environment named by `env = "package.module:Class"` or a built-in name.

An exception of a user's module or constructor becomes an EnvError: one line with target and cause.
"""

import importlib
import inspect
import os
import sys
from collections.abc import Mapping

from rollmesh.core.config_parsing import resolve_secrets
from rollmesh.core.errors import ConfigError, EnvError
from rollmesh.core.text import close_names, instead_of
from rollmesh.core.types import Json
from rollmesh.envs.env import Env

BUILT_IN = {
    "guess": "rollmesh.envs.guess:GuessEnv",
    "echo": "rollmesh.envs.echo:EchoEnv",
    "gym": "rollmesh.envs.gym:GymEnv",
    "openenv": "rollmesh.envs.openenv:OpenEnvEnv",
}


def load_env(target: str, settings: Mapping[str, Json]) -> Env:
    """Return the environment `target`, built with `settings` as keyword arguments.

    Secret settings are read from their sources. Raises EnvError, one line, if the environment
    cannot be found or built.
    """
    env_class = find_env(target)
    _check_settings(target, env_class, settings)
    try:
        resolved = resolve_secrets(settings, env_class.secret_settings)
    except ConfigError as error:
        raise EnvError(f'env = "{target}": {error}') from None
    try:
        return env_class(**resolved)
    except (Exception, SystemExit) as error:  # door: a user's constructor may raise anything
        raise EnvError(f'env = "{target}" could not be built: {_cause(error)}') from error


def find_env(target: str) -> type[Env]:
    """Import and return the environment's class; EnvError if there is none.

    `target` is a built-in name or `package.module:Class`; modules in the working directory are
    found too.
    """
    module_name, colon, class_name = BUILT_IN.get(target, target).partition(":")
    if not (module_name and colon and class_name):
        close = close_names(target, BUILT_IN)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise EnvError(
            f'env = "{target}" is neither built in ({", ".join(sorted(BUILT_IN))}) nor of the form '
            f'"package.module:Class"{hint}'
        )
    return _env_class(target, module_name, class_name)


def required_settings(env_class: type[Env]) -> list[str]:
    """Return the names of constructor arguments without default."""
    return [
        name
        for name, parameter in inspect.signature(env_class).parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]


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
        known = [name for name, each in vars(module).items() if _is_env(each)]
        hint = f"; {instead_of(class_name, known)}" if known else ""
        raise EnvError(f'env = "{target}": module {module_name} has no class {class_name}{hint}')
    if not (inspect.isclass(found) and issubclass(found, Env)):
        raise EnvError(f'env = "{target}" is not a subclass of rollmesh.Env')
    missing = sorted(getattr(found, "__abstractmethods__", ()))
    if missing:
        raise EnvError(f'env = "{target}" does not define {", ".join(missing)}')
    return found


def _is_env(value: object) -> bool:
    return inspect.isclass(value) and issubclass(value, Env) and not inspect.isabstract(value)


def _check_settings(target: str, env_class: type[Env], settings: Mapping[str, Json]) -> None:
    """Refuse settings that the constructor does not know or misses, by name."""
    signature = inspect.signature(env_class)
    try:
        signature.bind(**settings)
    except TypeError as error:
        known = list(signature.parameters)
        unknown = [name for name in settings if name not in known]
        close = close_names(unknown[0], known) if unknown else []
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise EnvError(
            f'env = "{target}" refuses its settings: {error} '
            f"(it takes: {', '.join(known) or 'none'}){hint}"
        ) from None


def _cause(error: BaseException) -> str:
    """Return the kind of error and the first line of its message."""
    first_line = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {first_line}" if first_line else type(error).__name__
