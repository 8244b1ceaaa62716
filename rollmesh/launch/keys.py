"""Keys of a run, made when it starts, so that other users of the machine cannot join its mesh.

- They are in RUN/keys, readable by the owner only; a resumed run keeps its own.
- Each process gets the file of its role and no other; only the router gets the hub's secret.
- If the user has keys (ROLLMESH_KEYS), these are used; `--no-keys` makes none.
"""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from rollmesh.core.errors import ConfigError
from rollmesh.core.secret_files import (
    ENGINE_KEY_FILE_VARIABLE,
    engine_key,
    make_secret_file,
    read_or_make_secret,
    read_secret,
)
from rollmesh.launch.plan import ChildPlan
from rollmesh.wire.keys import (
    HUB,
    KEYS_VARIABLE,
    MAKEABLE,
    ONE_OF_EACH,
    RUN_KEYS,
    SCHEDULER_KEYS_VARIABLE,
    Keys,
    Role,
    add_member,
    new_keys,
    read_key_file,
    read_keys,
    read_members,
    remove_member,
)

ENGINE_KEY = "engine.key"
"""The engines' API key, in the run's key folder."""


def make_run_keys(run: Path, plans: Sequence[ChildPlan]) -> Path | None:
    """Create the keys of a run, or those that a resumed run lacks; None if the user has configured
    keys.

    Raise ConfigError if they cannot be created.
    """
    if os.environ.get(KEYS_VARIABLE):
        return None
    folder = run / RUN_KEYS
    named = [
        (plan.role, Role(plan.key))
        for plan in plans
        if plan.key and plan.key != HUB and not plan.key_name
    ]
    try:
        if not folder.is_dir():
            new_keys(folder, [*ONE_OF_EACH, *named])
            return folder
    except OSError as error:
        raise ConfigError(f"{folder}: cannot create it: {str(error.strerror).lower()}") from None
    known = {each.name for each in read_members(folder)}
    for name, role in named:
        if name not in known:
            add_member(folder, role, name)
    return folder


def check_run_keys(option: str, *, has_keys: bool) -> None:
    """Raise ConfigError if the run would have no keys of its own, which `option` needs."""
    if os.environ.get(KEYS_VARIABLE):
        raise ConfigError(f"{option} makes keys for the run and copies them: unset {KEYS_VARIABLE}")
    if not has_keys:
        raise ConfigError(
            f"{option} needs keys, since other machines can reach the router; leave out --no-keys"
        )


def make_engine_key(folder: Path) -> None:
    """Create the API key of engines that other machines can reach, in the run's key folder.

    A key that the user has set is copied there; a resumed run keeps its own.
    """
    path = folder / ENGINE_KEY
    try:
        if key := engine_key():
            path.unlink(missing_ok=True)
            make_secret_file(path, f"{key}\n".encode())
        else:
            read_or_make_secret(path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot create it: {str(error.strerror).lower()}") from None


def engine_key_of(keys: Keys | None) -> str:
    """Return the engines' API key of the run in whose folder `keys` are; '' if it has none."""
    path = Path(keys.folder) / ENGINE_KEY if keys and keys.folder else None
    return read_secret(path) if path and path.is_file() else ""


ENGINE = "engine"
"""A role of machines only: engines have no key of the mesh."""
HOST_ROLES = (*MAKEABLE, ENGINE)
USE_ENGINES = (Role.WORKER, Role.PUBLISHER, ENGINE)
"""Roles of machines whose processes send requests to engines, or serve them."""


def export_host(folder: Path, host: str, roles: Sequence[str], out: Path) -> list[Path]:
    """Write to the new folder `out` what a machine with these roles needs, and no other secret;
    return its files.

    - Each role gets a new pair, of the name HOST-ROLE, whose secret is in `out` alone.
    - The engines' API key is included, if there is one, for roles that use engines.

    ConfigError if a name is taken or `out` exists; then nothing is left of it.
    """
    wrong = [each for each in roles if each not in HOST_ROLES]
    if wrong or not roles:
        named = ",".join(wrong) or "none"
        raise ConfigError(f"--roles {named}: choose of {', '.join(HOST_ROLES)}")
    try:
        out.mkdir(mode=0o700)
    except OSError as error:
        why = str(error.strerror).lower()
        raise ConfigError(f"{out}: {why}; name another folder by --out") from None
    made: list[str] = []
    try:
        for role in dict.fromkeys(roles):
            if role != ENGINE:
                path = add_member(folder, Role(role), f"{host}-{role}")
                made.append(path.stem)
                make_secret_file(out / f"{role}.json", path.read_bytes())
                path.unlink()
        if not set(USE_ENGINES).isdisjoint(roles) and (key := _engine_key_of(folder)):
            make_secret_file(out / ENGINE_KEY, f"{key}\n".encode())
    except (OSError, ConfigError) as error:
        for name in made:
            remove_member(folder, name)
        shutil.rmtree(out, ignore_errors=True)
        if isinstance(error, OSError):
            raise ConfigError(f"{out}: {str(error.strerror).lower()}; free some space") from None
        raise
    return sorted(out.iterdir())


def _engine_key_of(folder: Path) -> str:
    """Return the API key of a run's engines, else that of this environment; '' if there is none."""
    path = folder / ENGINE_KEY
    return read_secret(path) if path.exists() else engine_key()


def key_variables(plan: ChildPlan, folder: Path | None) -> dict[str, str]:
    """Return the environment variables that name a process's key files."""
    if folder is None:
        return {}
    variables = {}
    if plan.uses_engines and (folder / ENGINE_KEY).is_file():
        variables[ENGINE_KEY_FILE_VARIABLE] = str((folder / ENGINE_KEY).absolute())
    if not plan.key:
        return {**variables, KEYS_VARIABLE: "", SCHEDULER_KEYS_VARIABLE: ""}
    name = HUB if plan.key == HUB else plan.key_name or plan.role
    scheduler = os.environ.get(SCHEDULER_KEYS_VARIABLE, "")
    return {
        **variables,
        KEYS_VARIABLE: str((folder / f"{name}.json").absolute()),
        SCHEDULER_KEYS_VARIABLE: scheduler if plan.key == Role.PUBLISHER else "",
    }


def keys_of(folder: Path | None, role: Role) -> Keys | None:
    """Return the keys of that role: the run's, or else the user's."""
    return read_key_file(folder, role) if folder else read_keys(role=role)
