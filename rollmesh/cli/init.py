"""`rollmesh init`: write a mesh.toml, and name what is missing before `rollmesh up` can run it.

- Keys, comments and defaults come from core/config.py, so they cannot go stale; with --all the file
  has every key and reads back as the defaults.
- A wrong --model or --env is refused and nothing is written.
"""

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from rollmesh.cli.options import context_of, parser
from rollmesh.core import config as settings
from rollmesh.core.config import Config, Section
from rollmesh.core.errors import ModelError, UserError
from rollmesh.core.model_folder import EXAMPLE, resolve_model, why_no_model
from rollmesh.envs.loading import BUILT_IN, find_env, required_settings

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


def main(argv: list[str]) -> int:
    """Write the file and print what is missing; UserError if the file exists."""
    arguments = parser("init", "Write a mesh.toml with the settings that most runs change.")
    arguments.add_argument("path", type=Path, nargs="?", default=Path("mesh.toml"))
    arguments.add_argument(
        "--model",
        "--model-dir",
        default="",
        metavar="DIR",
        help="model folder in Hugging Face layout, or the id of a downloaded model of the hub",
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
        "--all", dest="is_all", action="store_true", help="write every setting, not only the basic"
    )
    options = arguments.parse_args(argv)
    path: Path = options.path
    missing = [*missing_model(options.model), *missing_env(options.env)]
    config = config_for(options.model, options.env, options.engines)
    write(
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


def write(path: Path, text: str) -> None:
    """Create the file; UserError if it exists or cannot be written."""
    try:
        with path.open("x") as file:
            file.write(text)
    except FileExistsError:
        raise UserError(f"{path} is there already; remove it or name another file") from None
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; name another file") from None


def missing_model(model: str) -> Iterator[str]:
    """A line if no model was named; ModelError if the named one is not a model folder."""
    if not model:
        yield f"model.path: a model folder in Hugging Face layout, or a hub id; {EXAMPLE}"
    elif why := why_no_model(resolve_model(model)):
        raise ModelError(f"--model {model}: {why}")


def missing_env(env: str) -> Iterator[str]:
    """A line for each thing that the environment needs; EnvError if it cannot be imported."""
    if not env:
        yield (
            f'env: "{Config().env}" is an example; name yours, "package.module:Class", '
            "or keep it to try rollmesh"
        )
        return
    for name in required_settings(find_env(env)):
        yield f"env_settings.{name}: an argument of {env} without a default"


def config_for(model: str, env: str, engines: list[str]) -> Config:
    """The defaults with what the command line names; the context is at most the model's."""
    config = Config()
    section = msgspec.structs.replace(config.model, path=model)
    num_tokens = context_of(Path(resolve_model(model))) if model else None
    if num_tokens and num_tokens < section.max_context_tokens:
        section = msgspec.structs.replace(section, max_context_tokens=num_tokens)
    engine = msgspec.structs.replace(config.engine, urls=tuple(engines))
    return msgspec.structs.replace(config, model=section, engine=engine, env=env or config.env)


def commented_toml(config: Config, names: tuple[str, ...] | None = None) -> str:
    """The settings `names`, all if None: each docstring as a comment, then the value."""
    docs = docstrings()
    top, tables = [ALL if names is None else BASIC], []
    for name, value in fields(config):
        doc = docs[f"Config.{name}"] if f"Config.{name}" in docs else docs[type(value).__name__]
        if isinstance(value, Section):
            lines = list(keys(name, value, docs, names))
            tables += ["\n".join([f"{doc}[{name}]", *lines, ""])] if lines else []
        elif isinstance(value, dict):
            tables.append(f"{doc}[{name}]\n")
        elif names is None or name in names:
            unset = f"# {name} is not set\n"  # TOML has no null
            top.append(doc + (unset if value is None else f"{name} = {toml(value)}\n"))
    return "\n".join([*top, *tables])


def keys(
    table: str, section: Section, docs: dict[str, str], names: tuple[str, ...] | None
) -> Iterator[str]:
    """The lines of one table."""
    for name, value in fields(section):
        if names is None or f"{table}.{name}" in names:
            yield f"{docs[f'{type(section).__name__}.{name}']}{name} = {toml(value)}"


def fields(section: Section) -> Iterator[tuple[str, Any]]:
    """Names and values, in the order of the source."""
    for name in section.__struct_fields__:
        yield name, getattr(section, name)


def docstrings() -> dict[str, str]:
    """`Class` and `Class.field` to their docstrings as TOML comments, from the source."""
    docs: dict[str, str] = {}
    for owner in ast.parse(inspect.getsource(settings)).body:
        if not isinstance(owner, ast.ClassDef):
            continue
        docs[owner.name] = comment(ast.get_docstring(owner) or "")
        for field, text in zip(owner.body, owner.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                value = ast.literal_eval(text.value)
                docs[f"{owner.name}.{ast.unparse(field.target)}"] = comment(inspect.cleandoc(value))
    return docs


def comment(text: str) -> str:
    """Lines that begin with a hash."""
    return "".join(f"# {line}\n" for line in text.splitlines())


def toml(value: Any) -> str:
    """A value in TOML's notation, which is JSON's for what settings hold."""
    return msgspec.json.encode(value).decode()
