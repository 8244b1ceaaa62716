"""`rollmesh worker`: an env worker, for the mesh of this machine or of any other.

Invariants: what is wrong with the command line is told in one line, before the environment is
loaded; without a settings file it needs a router, an environment and the model's folder, and gets a
name that no other worker has; what its environment starts does not outlive it, launched or not.
Driven by launch, and by people who add workers to a mesh.
"""

# ruff: noqa: PLC0415 - the room is imported by its own verb only

import argparse
import os
import socket

from rollmesh.cli.options import (
    add_listen,
    add_model_dir,
    add_room,
    add_run,
    config_of,
    lay_model_over,
    model_defaults,
    parser,
    quoted,
)
from rollmesh.cli.rooms import pass_gate
from rollmesh.core.config import Config
from rollmesh.core.descriptors import PER_ROLLOUT, allow_descriptors
from rollmesh.core.errors import ConfigError, ModelError
from rollmesh.core.handed import begin_without_secrets, protect_memory, read_root_files
from rollmesh.core.ids import new_id
from rollmesh.core.model_folder import why_no_folder
from rollmesh.core.process import is_launched
from rollmesh.core.warden import guard, mark_self
from rollmesh.envs.spawning import (
    SPAWNER_VARIABLE,
    account_of,
    acting_as,
    process_spawner,
    split,
)
from rollmesh.wire.key_search import find_keys
from rollmesh.wire.keys import Role
from rollmesh.wire.sockets import check_admitted


def main(argv: list[str]) -> int:
    """Work until stopped, drained or worn out; the exit code says which."""
    mark = "" if is_launched() else mark_self("worker")
    _leave_root(argv)
    begin_without_secrets()
    process_spawner()
    protect_memory()
    if mark:
        guard(mark)
    from rollmesh.serve.server.process import run

    options = _arguments().parse_args(pass_gate(argv))
    lay_model_over(options)
    if options.env is not None:
        options.overrides.append(f"env={quoted(options.env)}")
    config = config_of(options, model_defaults(options))
    _check(options, config)
    num_rollouts = config.worker.max_rollouts
    allow_descriptors(PER_ROLLOUT * num_rollouts, f"worker.max_rollouts = {num_rollouts}")
    worker_id = options.worker_id or new_worker_id()
    keys = find_keys(options.router, Role.WORKER, options.run)
    check_admitted(options.router, keys)
    return run(config, options.router, worker_id, options.listen_fd, options.ready_fd, keys)


def _leave_root(argv: list[str]) -> None:
    """With --user, become this user and leave the right to change users to a spawner.

    Settings are read as the user, and of the secrets only root's files are read before.
    """
    options, _ = _arguments().parse_known_args(argv)
    if options.user is None or SPAWNER_VARIABLE in os.environ:
        return
    account = account_of(options.user)
    with acting_as(account):
        worker = config_of(options, model_defaults(options)).worker
    split(account, worker.isolation_first_uid, worker.isolation_num_uids, read_root_files)


def new_worker_id() -> str:
    """`HOST-PID-RANDOM`: says where to look, and is nobody else's after a restart."""
    return f"{socket.gethostname()}-{os.getpid()}-{new_id('', 2)}"


def _arguments() -> argparse.ArgumentParser:
    arguments = parser("worker", "Run an env worker: environments, agents, their endpoints.")
    arguments.add_argument("--router", required=True, help="tcp:// address of the router")
    arguments.add_argument(
        "--env", help="instead of the setting env: a built-in name or package.module:Class"
    )
    add_model_dir(arguments)
    arguments.add_argument("--worker-id", help="its name in the mesh (HOST-PID-RANDOM)")
    add_run(arguments)
    arguments.add_argument(
        "--user",
        help="started as root: become this user (name or uid) and start agents' programs as users "
        "of their own, by a process that keeps CAP_SETUID and CAP_SETGID",
    )
    add_room(arguments)
    add_listen(arguments)
    return arguments


def _check(options: argparse.Namespace, config: Config) -> None:
    """UserError if the worker cannot work with these."""
    names_env = options.env is not None or any(o.startswith("env=") for o in options.overrides)
    if options.config is None and not names_env:
        raise ConfigError("--env ENV: name the environment, or a settings file by --config")
    if not config.model.path:
        raise ModelError("--model-dir DIR is needed: calls are rendered by the model's own files")
    if why := why_no_folder(config.model.path):
        raise ModelError(f"model.path = {config.model.path}: {why}")
