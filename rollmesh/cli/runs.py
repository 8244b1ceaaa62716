"""The verbs that start a run, `up` and `demo`, and how they resume one.

- A verb returns only when every process that it started has ended; its exit code says how the run
  went.
- `--resume` continues the run in the folder, with its settings below those of the command line;
  `--go-on`, for service managers, resumes a run that was cut off and else starts one;
  `--until-done`, for Kubernetes, also resumes a stopped run and never starts a second one.
- Settings on which the run's past depends cannot change on resume; other changes are printed.
- The demo downloads nothing and needs no GPU.
"""

import argparse
import os
import shlex
from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from typing import Any

import msgspec

from rollmesh.cli.files import fields, is_made, toml
from rollmesh.cli.options import (
    add_no_keys,
    add_set,
    add_share,
    add_view,
    config_of,
    parser,
    share_of,
)
from rollmesh.core.config import Config, load_config
from rollmesh.core.config_section import Section
from rollmesh.core.errors import ConfigError
from rollmesh.core.process import OK
from rollmesh.launch.folder import config_path, was_cut_off
from rollmesh.launch.run import RunOptions, launch
from rollmesh.launch.sbatch import in_job, job_script, submit

SETTINGS: dict[str, Any] = {
    "env": "guess",
    "run": {"name": "demo"},
    "model": {"max_context_tokens": 512},
    "sampling": {"max_tokens": 16},
    "trainer": {
        "eval_rollouts": 1000,
        "num_steps": 100,
        "device": "cpu",
        "learning_rate": 5e-4,
        "entropy_coef": 0.01,
        "max_importance_weight": 2.0,
    },
}

ABOUT = """\
A tiny Qwen3-shaped model (100k parameters) learns to guess a number from 1 to 7 in three guesses.
It starts from random weights and a few seconds of supervised warm start on games played at random
but consistently with the hints, which win about 68 %. Reinforcement learning must find binary
search, which always wins. One engine, one router, two workers, one trainer, one dashboard."""


def demo(argv: list[str]) -> int:
    """`rollmesh demo`: make a tiny model and train it while the user watches; return the exit
    code.
    """
    arguments = parser("demo", "Train a tiny agent by reinforcement learning on this machine.")
    arguments.add_argument(
        "--seed", type=int, help="random seed for weights, tasks and sampling (default: 0)"
    )
    arguments.add_argument("--ranks", type=int, help="number of trainer processes (default: 1)")
    arguments.set_defaults(config=None)
    add_share(arguments)
    add_resume(arguments)
    add_set(arguments)
    add_no_keys(arguments)
    add_view(arguments)
    options = arguments.parse_args(argv)
    if options.seed is not None:
        options.overrides.append(f"run.seed={options.seed}")
    if options.ranks is not None:
        options.overrides.append(f"trainer.num_ranks={options.ranks}")
    config = with_model(settings_of(options, SETTINGS))
    is_written = options.resume and is_made(Path(config.model.path))
    make_model = ("make-model", config.model.path, "--seed", str(config.run.seed))
    run = RunOptions(
        config=config,
        make_model=() if is_written else make_model,
        is_live=options.is_live,
        has_keys=options.has_keys,
        about="" if is_written else ABOUT,
        resume=options.resume,
        share=share_of(options),
        resume_command=resume_command("demo", argv),
    )
    return launch(run)


def with_model(config: Config) -> Config:
    """Set the model's path to the run's own folder."""
    path = str(config.run_folder() / "model")
    return msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, path=path))


def up(argv: list[str]) -> int:
    """`rollmesh up [mesh.toml]`: start a mesh and watch it until it ends; return the exit code."""
    arguments = parser(
        "up", "Start engines, router, workers, trainer and dashboard, and watch them."
    )
    arguments.add_argument(
        "config",
        type=Path,
        nargs="?",
        default=Path("mesh.toml"),
        help="settings file (default: mesh.toml); `rollmesh init` writes one",
    )
    arguments.add_argument(
        "--on",
        dest="cluster",
        choices=("ray", "slurm"),
        help="run the processes on a cluster's nodes",
    )
    add_slurm(arguments)
    arguments.add_argument(
        "--detach", action="store_true", help="with --on ray: return, and let the cluster run it"
    )
    arguments.add_argument(
        "--down", action="store_true", help="with --on ray: stop a run that was started by --detach"
    )
    add_share(arguments)
    add_resume(arguments)
    add_go_on(arguments)
    add_set(arguments)
    add_no_keys(arguments)
    add_view(arguments)
    options = arguments.parse_args(argv)
    if options.num_nodes is not None and options.cluster != "slurm":
        arguments.error("--nodes needs --on slurm")
    if options.num_nodes is not None:
        options.overrides.append(f"slurm.nodes={options.num_nodes}")
    if options.cluster == "slurm" and (options.num_nodes or not in_job() or options.is_dry):
        return submit_job(settings_of(options), argv, is_dry=options.is_dry)
    if options.detach or options.down:
        return up_detached(options, argv)
    return launch(
        RunOptions(
            config=settings_of(options),
            is_live=options.is_live,
            has_keys=options.has_keys,
            resume=options.resume,
            share=share_of(options),
            resume_command=resume_command("up", [*argv, *job_size(options)]),
            cluster=options.cluster,
        )
    )


def add_slurm(parser: argparse.ArgumentParser) -> None:
    """Add `--nodes` and `--dry-run`, for jobs of Slurm."""
    parser.add_argument(
        "--nodes",
        dest="num_nodes",
        type=positive,
        metavar="N",
        help="with --on slurm: submit a job with so many nodes; inside a job, leave it out to run "
        "on the job's nodes",
    )
    parser.add_argument(
        "--dry-run",
        dest="is_dry",
        action="store_true",
        help="with --on slurm: print the job's script, and submit nothing",
    )


def job_size(options: argparse.Namespace) -> list[str]:
    """Return the option that submits a job of the size of this one."""
    num_nodes = os.environ.get("SLURM_JOB_NUM_NODES", "")
    return ["--nodes", num_nodes] if options.cluster == "slurm" and num_nodes else []


def positive(word: str) -> int:
    """Return a number of at least 1; ValueError otherwise."""
    if (number := int(word)) < 1:
        raise ValueError
    return number


def submit_job(config: Config, argv: list[str], *, is_dry: bool) -> int:
    """Submit a run as a job of Slurm, or print its script; return the exit code."""
    in_job = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_slurm(in_job)
    _, words = in_job.parse_known_args(argv)
    if is_dry:
        print(job_script(config, words), end="")
    else:
        print("\n".join(submit(config, words)))
    return OK


def up_detached(options: argparse.Namespace, argv: list[str]) -> int:
    """`rollmesh up --on ray --detach`, or `--down`."""
    if options.cluster != "ray":
        raise ConfigError("--detach and --down need --on ray")
    from rollmesh.launch.hosts.ray import connect_to_cluster  # noqa: PLC0415 - an extra
    from rollmesh.launch.hosts.ray_detached import (  # noqa: PLC0415 - an extra
        start_detached,
        stop_detached,
    )

    config = config_of(options)
    connect_to_cluster(config.ray.address)
    if options.down:
        stop_detached(config)
        print(f"run {config.run.name} was stopped")
        return OK
    words = [word for word in argv if word != "--detach"]
    output = start_detached(config, [*words, "--no-live", "--go-on"])
    print(f"run {config.run.name} is on the cluster; its output: {output}")
    print(f"to stop it: {shlex.join(['rollmesh', 'up', *words, '--down'])}")
    return OK


FIXED = (
    "env",
    "env_settings",
    "run.seed",
    "model.path",
    "trainer.samples_per_group",
    "trainer.lora_rank",
)
"""Settings that a run keeps: its tasks, its groups, and which weights are trained."""


def add_resume(parser: argparse.ArgumentParser) -> None:
    """Add `--resume`, for `settings_of`."""
    parser.add_argument(
        "--resume", action="store_true", help="resume the run in the folder; nothing is lost"
    )


def add_go_on(parser: argparse.ArgumentParser) -> None:
    """Add `--go-on`, for `settings_of`."""
    parser.add_argument(
        "--go-on",
        action="store_true",
        help="like --resume if the run in the folder was cut off, else start a run",
    )


def add_until_done(parser: argparse.ArgumentParser) -> None:
    """Add `--until-done`, for `settings_of`."""
    parser.add_argument(
        "--until-done",
        action="store_true",
        help="for Kubernetes, which restarts a trainer that ends: like --resume if there is a run "
        "in the folder, else start one; after its last step wait for SIGTERM",
    )


def resume_command(verb: str, argv: list[str]) -> str:
    """Return the command that resumes the run which `rollmesh VERB ARGV` starts."""
    words = [*argv, *([] if {"--resume", "--go-on", "--until-done"} & set(argv) else ["--resume"])]
    return shlex.join(["rollmesh", verb, *words])


def settings_of(options: argparse.Namespace, defaults: dict[str, Any] | None = None) -> Config:
    """Load settings like `config_of`; with `--resume` the run's own settings replace `defaults`."""
    config = config_of(options, defaults)
    options.resume = options.resume or _resumes_by_itself(options, config)
    if not options.resume:
        return config
    path = config_path(config)
    if not path.is_file():
        raise ConfigError(
            f"{path.parent}: no run to resume; name it by run.folder and run.name, or start "
            "one without --resume"
        )
    was = load_config(path)
    # The folder may have been moved since.
    was = msgspec.structs.replace(was, run=current_place(was, config))
    config = config_of(options, msgspec.to_builtins(was))
    check_kept(was, config)
    if changed := changes(was, config):
        print(f"resuming {path.parent} with changed settings: {', '.join(changed)}", flush=True)
    return config


def _resumes_by_itself(options: argparse.Namespace, config: Config) -> bool:
    """Return whether `--go-on` or `--until-done` continues the run in the folder."""
    if getattr(options, "until_done", False):
        return config_path(config).is_file()
    return getattr(options, "go_on", False) and was_cut_off(config)


def current_place(was: Config, config: Config) -> Any:
    """Return the run's section with the name and folder of `config`."""
    return msgspec.structs.replace(was.run, name=config.run.name, folder=config.run.folder)


def check_kept(was: Config, config: Config) -> None:
    """Raise ConfigError if a setting that a run keeps has changed."""
    for name in FIXED:
        before, now = setting(was, name), setting(config, name)
        if before != now and not is_same_folder(before, now):
            raise ConfigError(
                f"{name} = {toml(now)}: the run began with {toml(before)}, which cannot change; "
                "restore it on the command line or in mesh.toml, or start a new run: without "
                "--resume, or, for --go-on, after moving the run's folder away"
            )


def is_same_folder(before: Any, now: Any) -> bool:
    """Return whether both are paths of one folder: a run on a cluster has absolute ones."""
    are_folders = all(isinstance(each, str) and os.path.isdir(each) for each in (before, now))
    return are_folders and os.path.samefile(before, now)


def changes(was: Config, config: Config) -> list[str]:
    """Return `section.key = now (was before)` for each changed setting."""
    before = dict(leaves(was))
    return [
        f"{name} = {toml(now)} (was {toml(before[name])})"
        for name, now in leaves(config)
        if now != before[name]
    ]


def leaves(config: Config) -> Iterator[tuple[str, Any]]:
    """Yield `section.key` and value of every setting."""
    for name, value in fields(config):
        if isinstance(value, Section):
            yield from ((f"{name}.{key}", each) for key, each in fields(value))
        else:
            yield name, value


def setting(config: Config, name: str) -> Any:
    """Return the value of `section.key`."""
    return reduce(getattr, name.split("."), config)
