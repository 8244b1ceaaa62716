"""The verbs that write files for users: init (mesh.toml), keys, and make-model (the demo's model).

- Keys, comments and defaults of mesh.toml come from core/config.py; with --all the file has every
  key and reads back as the defaults.
- A wrong --model or --env is refused and nothing is written.
- Key files are readable by the owner only, and existing ones are not overwritten.
- A model is overwritten only with --force; --keep keeps it and loads no torch.
"""

import argparse
import ast
import inspect
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from rollmesh.cli.options import context_of, parser
from rollmesh.core import config as settings
from rollmesh.core import engine_config as engine_settings
from rollmesh.core import network_config as network_settings
from rollmesh.core.config import Config
from rollmesh.core.config_section import Section
from rollmesh.core.errors import ConfigError, ModelError, UserError
from rollmesh.core.model_folders import EXAMPLE, resolve_model, why_no_model
from rollmesh.core.process import OK
from rollmesh.core.secret_files import (
    ADMIN_TOKEN_FILE_VARIABLE,
    ENGINE_KEY_FILE_VARIABLE,
    make_secret_file,
    read_or_make_secret,
)
from rollmesh.envs.loading import BUILT_IN, find_env, required_settings
from rollmesh.launch.keys import ENGINE_KEY, HOST_ROLES, export_host
from rollmesh.wire.keys import (
    KEYS_VARIABLE,
    MAKEABLE,
    RUN_KEYS,
    Role,
    add_member,
    new_keys,
    read_key_file,
    read_members,
    remove_member,
)

HEAD = """\
# Settings of a rollmesh run. Start it with `rollmesh up {path}`.
# `--set section.key=value` overrides a line. Secrets do not belong here.
"""
ALL = "# Every setting is here with its default.\n"
BASIC = "# `rollmesh init --all FILE` writes every setting; what is left out has its default.\n"
BASIC_KEYS = (
    "env",
    "env_settings",
    "run.name",
    "run.seed",
    "model.path",
    "model.max_context_tokens",
    "engine.urls",
    "engine.launch",
    "engine.num_servers",
    "engine.gpus_each",
    "engine.args",
    "engine.python",
    "worker.num_workers",
    "worker.max_rollouts",
    "worker.run_timeout_s",
    "sampling.max_tokens",
    "trainer.num_steps",
    "trainer.groups_per_step",
    "trainer.samples_per_group",
    "trainer.max_staleness",
    "trainer.learning_rate",
    "trainer.lora_rank",
    "trainer.device",
    "trainer.checkpoint_steps",
)
"""Settings that most users change."""


def init(argv: list[str]) -> int:
    """`rollmesh init`: write mesh.toml and print what is missing; UserError if the file exists."""
    arguments = parser("init", "Write a mesh.toml with the settings that most runs change.")
    arguments.add_argument("path", type=Path, nargs="?", default=Path("mesh.toml"))
    arguments.add_argument(
        "--model",
        "--model-dir",
        default="",
        metavar="DIR",
        help="model folder in Hugging Face layout, or the id of a downloaded Hub model",
    )
    arguments.add_argument(
        "--env",
        default="",
        help=f"package.module:Class, or a built-in name: {', '.join(sorted(BUILT_IN))}",
    )
    arguments.add_argument(
        "--engine",
        dest="engines",
        action="append",
        default=[],
        metavar="URL",
        help="SGLang server with that model; may be repeated (default: the embedded engine)",
    )
    arguments.add_argument(
        "--all",
        dest="is_all",
        action="store_true",
        help="write every setting, not only the basic ones",
    )
    options = arguments.parse_args(argv)
    path: Path = options.path
    missing = [*missing_model(options.model), *missing_env(options.env)]
    config = config_for(options.model, options.env, options.engines)
    write_toml(
        path,
        HEAD.format(path=path) + commented_toml(config, None if options.is_all else BASIC_KEYS),
    )
    if not missing:
        print(f"wrote {path}; `rollmesh up {path}` runs it")
        return 0
    print(f"wrote {path}; before `rollmesh up {path}`, edit it:")
    for line in missing:
        print(f"  {line}")
    return 0


def write_toml(path: Path, text: str) -> None:
    """Create the file; UserError if it exists or cannot be written."""
    try:
        with path.open("x") as file:
            file.write(text)
    except FileExistsError:
        raise UserError(f"{path} exists; remove it or name another file") from None
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; name another file") from None


def missing_model(model: str) -> Iterator[str]:
    """Yield a line if no model was named; ModelError if the named one is not a model folder."""
    if not model:
        yield f"model.path: a model folder in Hugging Face layout, or a Hub id; {EXAMPLE}"
    elif why := why_no_model(resolve_model(model)):
        raise ModelError(f"--model {model}: {why}")


def missing_env(env: str) -> Iterator[str]:
    """Yield a line for each argument that the environment needs; EnvError if it cannot be
    imported.
    """
    if not env:
        yield (
            f'env: "{Config().env}" is an example; name yours, "package.module:Class", '
            "or keep it to try rollmesh"
        )
        return
    for name in required_settings(find_env(env)):
        yield f"env_settings.{name}: an argument of {env} without a default"


def config_for(model: str, env: str, engines: list[str]) -> Config:
    """Return the defaults with the given values; the context is at most the model's."""
    config = Config()
    section = msgspec.structs.replace(config.model, path=model)
    num_tokens = context_of(Path(resolve_model(model))) if model else None
    if num_tokens and num_tokens < section.max_context_tokens:
        section = msgspec.structs.replace(section, max_context_tokens=num_tokens)
    engine = msgspec.structs.replace(config.engine, urls=tuple(engines))
    return msgspec.structs.replace(config, model=section, engine=engine, env=env or config.env)


def commented_toml(config: Config, names: tuple[str, ...] | None = None) -> str:
    """Return the settings `names` (all if None) as TOML: each docstring as a comment, then the
    value.
    """
    docs = docstrings()
    top, tables = [ALL if names is None else BASIC], []
    for name, value in fields(config):
        doc = docs[f"Config.{name}"] if f"Config.{name}" in docs else docs[type(value).__name__]
        if isinstance(value, Section):
            lines = list(table_lines(name, value, docs, names))
            tables += ["\n".join([f"{doc}[{name}]", *lines, ""])] if lines else []
        elif isinstance(value, dict):
            tables.append(f"{doc}[{name}]\n")
        elif names is None or name in names:
            unset = f"# {name} is not set\n"  # TOML has no null
            top.append(doc + (unset if value is None else f"{name} = {toml(value)}\n"))
    return "\n".join([*top, *tables])


def table_lines(
    table: str, section: Section, docs: dict[str, str], names: tuple[str, ...] | None
) -> Iterator[str]:
    """Yield the lines of one table."""
    for name, value in fields(section):
        if names is None or f"{table}.{name}" in names:
            yield f"{docs[f'{type(section).__name__}.{name}']}{name} = {toml(value)}"


def fields(section: Section) -> Iterator[tuple[str, Any]]:
    """Yield names and values, in the order of the source."""
    for name in section.__struct_fields__:
        yield name, getattr(section, name)


MODULES = (settings, engine_settings, network_settings)
"""Modules with the sections."""


def docstrings() -> dict[str, str]:
    """Return the docstrings of `Class` and `Class.field` as TOML comments, from the source."""
    docs: dict[str, str] = {}
    sources = "".join(inspect.getsource(each) for each in MODULES)
    for owner in ast.parse(sources).body:
        if not isinstance(owner, ast.ClassDef):
            continue
        docs[owner.name] = comment(ast.get_docstring(owner) or "")
        for field, text in zip(owner.body, owner.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                value = ast.literal_eval(text.value)
                docs[f"{owner.name}.{ast.unparse(field.target)}"] = comment(inspect.cleandoc(value))
    return docs


def comment(text: str) -> str:
    """Prefix each line with a hash."""
    return "".join(f"# {line}\n" for line in text.splitlines())


def toml(value: Any) -> str:
    """Format a value as TOML, which is JSON for the types of our settings."""
    return msgspec.json.encode(value).decode()


MEMBER_VERBS = ("add", "export", "list", "remove")


def keys(argv: list[str]) -> int:
    """`rollmesh keys`: make, list and revoke the keys of a mesh.

    rollmesh keys FOLDER                       the hub's pair, and one for each role
    rollmesh keys add ROLE [--name N]          one more member
    rollmesh keys list                         names, roles and files
    rollmesh keys export --host H --roles R    a folder with the keys of one machine
    rollmesh keys remove NAME                  hubs refuse that key within a second
    """
    if argv and argv[0] in MEMBER_VERBS:
        return change_members(argv)
    arguments = parser(
        "keys",
        "Make a mesh's keys: the hub's and one for each role. "
        "`rollmesh keys add`, `export`, `list` and `remove` change them.",
    )
    arguments.add_argument("folder", type=Path)
    arguments.add_argument(
        "--admin-token-file",
        type=Path,
        help="also create the router's admin token, if it is missing",
    )
    arguments.add_argument("--keep", action="store_true", help="keep existing keys")
    arguments.add_argument(
        "--export",
        action="append",
        default=[],
        metavar="NAME=FILE",
        help="copy a member's key file, such as worker=/worker-keys/worker.json; may be repeated",
    )
    options = arguments.parse_args(argv)
    settings = {KEYS_VARIABLE: options.folder.absolute()}
    write_keys(options.folder, keep=options.keep)
    if options.admin_token_file:
        read_or_make_secret(options.admin_token_file)
        settings[ADMIN_TOKEN_FILE_VARIABLE] = options.admin_token_file.absolute()
    for words in options.export:
        export_key(options.folder, words)
    shown = " ".join(f"{name}={path}" for name, path in settings.items())
    print(f"set {shown} for the mesh's processes on this machine")
    print(f"copy only {options.folder}/worker.json to other machines, for their workers")
    return 0


def change_members(argv: list[str]) -> int:
    """Run `add`, `export`, `list` or `remove`."""
    verb = argv[0]
    arguments = parser(f"keys {verb}", "Change or list the members of a mesh.")
    if verb == "add":
        roles = [role.value for role in MAKEABLE]
        arguments.add_argument("role", choices=roles, help=f"one of {', '.join(roles)}")
        arguments.add_argument("--name", help="name of the key and its file (default: the role)")
    elif verb == "export":
        add_export(arguments)
    elif verb == "remove":
        arguments.add_argument("name", help="name of the key; `rollmesh keys list` shows them")
    arguments.add_argument(
        "--keys", type=Path, metavar="DIR", help=f"key folder (default: {KEYS_VARIABLE}, or keys)"
    )
    arguments.add_argument("--run", type=Path, metavar="DIR", help="the keys of this run folder")
    options = arguments.parse_args(argv[1:])
    folder = folder_of(options)
    if verb == "add":
        if not folder.exists():
            new_keys(folder, ())
        path = add_member(folder, Role(options.role), options.name or options.role)
        print(f"wrote {path}")
        print(f"copy it to its machine with mode 0600 and set {KEYS_VARIABLE} to its path there")
    elif verb == "export":
        export_keys(folder, options)
    elif verb == "list":
        for each in read_members(folder):
            print(f"{each.name:<20} {each.role:<10} {folder / each.name}.json")
    else:
        remove_member(folder, options.name)
        print(f"removed {options.name}: hubs that read {folder} refuse its key")
    return 0


def add_export(arguments: argparse.ArgumentParser) -> None:
    """Add the arguments of `export`."""
    arguments.add_argument("--host", required=True, metavar="NAME", help="name of the machine")
    arguments.add_argument(
        "--roles",
        required=True,
        metavar="ROLE,...",
        help=f"what runs there, of {', '.join(HOST_ROLES)} (a trainer is a publisher)",
    )
    arguments.add_argument(
        "--out", type=Path, metavar="DIR", help="new folder (default: the machine's name)"
    )


def export_keys(folder: Path, options: argparse.Namespace) -> None:
    """Write the folder of one machine, and print what to do with it."""
    roles = [each.strip() for each in options.roles.split(",")]
    out: Path = options.out or Path(options.host)
    written = export_host(folder, options.host, roles, out)
    settings = [f"{KEYS_VARIABLE}={out}"] if any(x.suffix == ".json" for x in written) else []
    if out / ENGINE_KEY in written:
        settings.append(f"{ENGINE_KEY_FILE_VARIABLE}={out / ENGINE_KEY}")
    print(f"wrote {', '.join(map(str, written)) or f'{out}, empty: no engine key is set'}")
    print(f"move {out} to {options.host}, with its modes (scp -rp), and set there, with its path:")
    print(" ".join(settings))


def folder_of(options: argparse.Namespace) -> Path:
    """Return the key folder that the options name."""
    if options.keys and options.run:
        raise ConfigError("--keys and --run exclude each other; leave one out")
    if options.run:
        folder: Path = options.run / RUN_KEYS
        return folder
    named = options.keys or Path(os.environ.get(KEYS_VARIABLE) or RUN_KEYS)
    if named.is_file():
        raise ConfigError(f"{named}: is a key file; name a key folder by --keys")
    return Path(named)


def write_keys(folder: Path, *, keep: bool) -> None:
    """Create keys, unless existing ones are kept; UserError if they cannot be created."""
    try:
        new_keys(folder)
        print(f"wrote {folder}")
    except FileExistsError as error:
        if not keep:
            raise _refusal(folder, error) from None
        read_key_file(folder)
        print(f"kept {folder}")
    except OSError as error:
        raise _refusal(folder, error) from None


def export_key(folder: Path, words: str) -> None:
    """Copy a member's key file to `NAME=FILE`, unless a copy is there."""
    name, _, target = words.partition("=")
    if not name or not target:
        raise ConfigError(f"--export {words}: write it as NAME=FILE")
    source, path = folder / f"{name}.json", Path(target)
    keys = read_key_file(source)
    try:
        make_secret_file(path, source.read_bytes())
        print(f"wrote {path}")
    except FileExistsError:
        if read_key_file(path).public != keys.public:
            raise ConfigError(f"{path}: holds another key than {source}; remove it") from None
        print(f"kept {path}")
    except OSError as error:
        raise _refusal(path, error) from None


def _refusal(file: Path, error: OSError) -> UserError:
    return UserError(f"{file}: {str(error.strerror).lower()}; choose another name")


# ruff: noqa: PLC0415 - torch is loaded where there is something to make


LAST_FILE = "config.json"
"""Written last: a folder that has it holds a complete model."""


def make_model(argv: list[str]) -> int:
    """`rollmesh make-model FOLDER`: write the demo's tiny model; return the exit code."""
    arguments = parser("make-model", "Write the demo's warm-started tiny model.")
    arguments.add_argument("folder", type=Path)
    arguments.add_argument(
        "--seed", type=int, default=0, help="random seed of weights (default: 0)"
    )
    existing = arguments.add_mutually_exclusive_group()
    existing.add_argument("--keep", action="store_true", help="keep an existing model")
    existing.add_argument("--force", action="store_true", help="overwrite an existing model")
    options = arguments.parse_args(argv)
    folder: Path = options.folder
    if is_made(folder):
        if options.keep:
            return OK
        if not options.force:
            raise UserError(
                f"{folder}: a model exists; name another folder, "
                "overwrite it with --force, or keep it with --keep"
            )
    write_demo_model(folder, options.seed)
    print(f"wrote {folder}; `rollmesh init --model {folder}` uses it", flush=True)
    return OK


def write_demo_model(folder: Path, seed: int) -> None:
    """Write the model; UserError if it cannot be written."""
    from rollmesh.trainer.models.tiny import write_model

    try:
        write_model(folder, seed, LAST_FILE)
    except OSError as error:
        raise UserError(f"{folder}: {error.strerror}; name another folder") from None


def is_made(folder: Path) -> bool:
    """Return whether the folder holds a complete model."""
    return (folder / LAST_FILE).is_file()
