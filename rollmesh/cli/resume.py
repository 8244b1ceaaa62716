"""`--resume`: go on with a run that is there, with its settings below those of the command line;
`--go-on`: the same for one that was cut off, and else begin one, for who is started by a machine.

Invariant: what the run's past depends on stays as it was, and who asks for something else is told
so in one line; what else mesh.toml or the command line changes is told, too. Driven by the verbs
that train.
"""

import argparse
import shlex
from collections.abc import Iterator
from functools import reduce
from typing import Any

import msgspec

from rollmesh.cli.init import fields, toml
from rollmesh.cli.options import config_of
from rollmesh.core.config import Config, Section, load_config
from rollmesh.core.errors import ConfigError
from rollmesh.launch.folder import config_path, was_cut_off

FIXED = (
    "env",
    "env_settings",
    "run.seed",
    "model.path",
    "trainer.samples_per_group",
    "trainer.lora_rank",
)
"""Settings that a run keeps: its tasks, what its groups are, and which weights are trained."""


def add_resume(parser: argparse.ArgumentParser) -> None:
    """`--resume`, for `settings_of`."""
    parser.add_argument(
        "--resume", action="store_true", help="go on with the run that is there; nothing is lost"
    )


def add_go_on(parser: argparse.ArgumentParser) -> None:
    """`--go-on`, for `settings_of`."""
    parser.add_argument(
        "--go-on",
        action="store_true",
        help="as --resume if the run that is there was cut off, else begin one",
    )


def resume_command(verb: str, argv: list[str]) -> str:
    """The command that resumes the run which `rollmesh VERB ARGV` begins."""
    words = [*argv, *([] if {"--resume", "--go-on"} & set(argv) else ["--resume"])]
    return shlex.join(["rollmesh", verb, *words])


def settings_of(options: argparse.Namespace, defaults: dict[str, Any] | None = None) -> Config:
    """As `config_of`; with `--resume` the run's own settings take the place of `defaults`."""
    config = config_of(options, defaults)
    options.resume = options.resume or (getattr(options, "go_on", False) and was_cut_off(config))
    if not options.resume:
        return config
    path = config_path(config)
    if not path.is_file():
        raise ConfigError(
            f"{path.parent}: no run to go on with; name it by run.folder and run.name, or begin "
            "one without --resume"
        )
    was = load_config(path)
    # A folder may have been moved since: it is where we found it.
    was = msgspec.structs.replace(was, run=moved(was, config))
    config = config_of(options, msgspec.to_builtins(was))
    check_kept(was, config)
    if changed := changes(was, config):
        print(f"{path.parent} goes on, with changed settings: {', '.join(changed)}", flush=True)
    return config


def moved(was: Config, config: Config) -> Any:
    """The run's section, with the place of its folder as `config` has it."""
    return msgspec.structs.replace(was.run, name=config.run.name, folder=config.run.folder)


def check_kept(was: Config, config: Config) -> None:
    """ConfigError where a setting has changed that a run keeps."""
    for name in FIXED:
        before, now = setting(was, name), setting(config, name)
        if before != now:
            raise ConfigError(
                f"{name} = {toml(now)}: the run began with {toml(before)} and keeps that; name "
                "that, on the command line or in mesh.toml, or begin anew: without --resume, or, "
                "for --go-on, with the run's folder out of the way"
            )


def changes(was: Config, config: Config) -> list[str]:
    """`section.key = now (was before)` of each setting that is no longer what it was."""
    before = dict(leaves(was))
    return [
        f"{name} = {toml(now)} (was {toml(before[name])})"
        for name, now in leaves(config)
        if now != before[name]
    ]


def leaves(config: Config) -> Iterator[tuple[str, Any]]:
    """`section.key` and value of every setting."""
    for name, value in fields(config):
        if isinstance(value, Section):
            yield from ((f"{name}.{key}", each) for key, each in fields(value))
        else:
            yield name, value


def setting(config: Config, name: str) -> Any:
    """The value of `section.key`."""
    return reduce(getattr, name.split("."), config)
