"""The verbs that run one process of a mesh: engine, router, worker and train.

- A room is imported only by its own verb, so that torch stays out of every other process.
- A process that launch holds at a gate imports first and then waits.
- A mistake on the command line is reported in one line before the environment is loaded.
"""

import argparse
import os
import socket
import threading
from contextlib import closing
from pathlib import Path

from rollmesh.cli.options import (
    add_listen,
    add_model_dir,
    add_process_options,
    add_run,
    add_share,
    config_of,
    model_defaults,
    parser,
    quoted,
    set_model,
    share_of,
)
from rollmesh.core.addresses import split_address, why_no_engine_url
from rollmesh.core.clock import SystemClock
from rollmesh.core.config import Config, load_config
from rollmesh.core.descriptors import PEERS, PER_ROLLOUT, allow_descriptors
from rollmesh.core.errors import AddressError, ConfigError, ModelError
from rollmesh.core.ids import new_id
from rollmesh.core.model_folders import why_no_folder
from rollmesh.core.orphans import mark_self, start_orphan_reaper
from rollmesh.core.process import (
    OK,
    Ready,
    Stop,
    announce,
    die_with_parent,
    is_launched,
    wait_for_go,
)
from rollmesh.core.run_state import RunState
from rollmesh.core.secret_files import begin_without_secrets, protect_memory, read_root_files

# ruff: noqa: PLC0415 - each room is imported by its own verb only

BIND_AGAIN_S = 0.2


def engine(argv: list[str]) -> int:
    """Run the embedded torch engine, which parses its own arguments, or an SGLang server; or change
    the engines of a living mesh."""
    if argv[:1] == ["sglang"]:
        return _sglang(argv[1:])
    if argv and not argv[0].startswith("-"):
        from rollmesh.cli import engines

        return engines.main(argv)
    from rollmesh.engine.embedded.server import main

    allow_descriptors(PEERS, "an engine")
    return main(with_newest(pass_gate(argv)))


def _sglang(argv: list[str]) -> int:
    """Start an SGLang server with the settings of `engine`, and watch it until it ends."""
    from rollmesh.engine.sglang_server import ServerOrder, run_server

    if not is_launched():
        start_orphan_reaper(mark_self("engine"))
    arguments = parser("engine sglang", "Start an SGLang server, and watch it until it ends.")
    add_process_options(arguments)
    add_model_dir(arguments)
    add_listen(arguments)
    arguments.add_argument("--host", default="127.0.0.1")
    arguments.add_argument("--port", type=int, default=0, help="0 picks a free port")
    arguments.add_argument("--weight-version", default="0")
    arguments.add_argument(
        "--role", default="engine", help="this process's name in logs and reports"
    )
    arguments.add_argument(
        "--asleep", action="store_true", help="release its GPUs until a coordinator wakes it"
    )
    options = arguments.parse_args(with_newest(pass_gate(argv)))
    set_model(options)
    config = config_of(options)
    if why := why_no_folder(config.model.path):
        raise ModelError(f"--model-dir {config.model.path}: {why}")
    order = ServerOrder(
        config=config,
        model=Path(config.model.path),
        weight_version=options.weight_version,
        bind=f"{options.host}:{options.port}",
        listen_fd=options.listen_fd,
        ready_fd=options.ready_fd,
        role=options.role,
        is_asleep=options.asleep,
        logs_to_folder=is_launched(),
    )
    return run_server(order)


def router(argv: list[str]) -> int:
    """Run the router."""
    from rollmesh.serve.router.process import Engines, run

    options = _router_arguments().parse_args(argv)
    for url in options.engines:
        if why := why_no_engine_url(url):
            raise AddressError(f"--engine {url}: {why}")
    if options.bind:
        options.overrides.append(f"router.bind={options.bind}")
    allow_descriptors(PEERS, "a router")
    engines = Engines(
        tuple(options.engines),
        options.fixed_weights,
        options.least_version,
        options.asleep,
        options.engine_changes,
    )
    protect_memory()
    config = config_of(options)
    host, _, port = config.router.bind.rpartition(":")
    if options.known_as and port == "0":
        options.overrides.append(f"router.bind={host}:{split_address(options.known_as)[1]}")
        config = config_of(options)
    run(config, engines, options.listen_fd, options.ready_fd)
    return 0


def _router_arguments() -> argparse.ArgumentParser:
    from rollmesh.core.types import UNVERSIONED

    arguments = parser(
        "router", "Run a router, which schedules rollouts on workers and tracks engines."
    )
    add_process_options(arguments)
    add_listen(arguments)
    arguments.add_argument(
        "--engine",
        dest="engines",
        action="append",
        default=[],
        help="URL of an engine; may be repeated",
    )
    arguments.add_argument("--bind", metavar="ADDRESS", help="override router.bind")
    arguments.add_argument(
        "--known-as",
        default="",
        metavar="ADDRESS",
        help="where router.bind has port 0: listen on the port of this address (for launch, which "
        "restarts a router)",
    )
    arguments.add_argument(
        "--fixed-weights",
        action="store_true",
        help="no trainer publishes: engines serve the weights they have, whatever their version",
    )
    arguments.add_argument(
        "--asleep",
        action="store_true",
        help="engines are on shared GPUs: none serves until a coordinator wakes it",
    )
    arguments.add_argument(
        "--least-version",
        type=int,
        default=UNVERSIONED,
        help="engines with older weights wait for the publisher",
    )
    arguments.add_argument(
        "--engine-changes",
        type=Path,
        metavar="FILE",
        help="keep in this file what `rollmesh engine add` and `remove` change, so that a "
        "restarted router has the same engines (`rollmesh up`: engines.json of the run's folder)",
    )
    return arguments


def train(argv: list[str]) -> int:
    """Run the trainer; without launch, it also writes the run's folder and telemetry."""
    from rollmesh.cli.runs import (
        add_go_on,
        add_resume,
        add_until_done,
        resume_command,
        settings_of,
    )
    from rollmesh.launch.folder import RunFolder, why_done
    from rollmesh.launch.telemetry import TelemetryThread
    from rollmesh.trainer.joining import TorchrunJob, run_rank
    from rollmesh.trainer.process import run

    arguments = parser("train", "Train on the rollouts of a mesh.")
    add_process_options(arguments)
    add_listen(arguments)
    arguments.add_argument("--router", required=True, help="tcp:// address of the router")
    arguments.add_argument(
        "--status",
        default="",
        metavar="URL",
        help="http:// address of the router, for telemetry (without launch)",
    )
    add_share(arguments)
    add_resume(arguments)
    add_go_on(arguments)
    add_until_done(arguments)
    options = arguments.parse_args(pass_gate(argv))
    if options.listen_fd is not None:
        with socket.socket(fileno=os.dup(options.listen_fd)) as reserved:
            host, port = reserved.getsockname()[:2]
        options.overrides.append(f"trainer.rank_bind=tcp://{host}:{port}")
    job = None if is_launched() else TorchrunJob.find()
    share, config = share_of(options), settings_of(options)
    if job:
        die_with_parent()
        joint = job.applied(config)
        if job.rank:
            return run_rank(joint, job.rank, job.address(), job.local_rank, job.num_sharing)
    if options.ready_fd is not None:
        return run(config, options.router, options.ready_fd, share)
    if options.until_done and why_done(config):
        return wait_done(config)
    command = resume_command("train", argv)
    folder = RunFolder(config, resume=options.resume, resume_command=command)
    try:
        with TelemetryThread(options.status, "trainer", folder, SystemClock(), config.launch):
            code = run(joint if job else config, options.router, None, share, job)
    except BaseException as error:
        folder.end(RunState.FAILED, str(error) or type(error).__name__)
        raise
    folder.end(RunState.DONE if code == OK else RunState.STOPPED)
    return wait_done(config) if options.until_done and code == OK else code


def wait_done(config: Config) -> int:
    """Wait for SIGTERM or SIGINT after the run's last step, and answer health checks until then."""
    from rollmesh.launch.folder import why_done
    from rollmesh.wire.keys import Role, read_keys
    from rollmesh.wire.sockets import Hub

    stopping = threading.Event()
    Stop(stopping.set)
    print(f"{why_done(config)}; waiting for SIGTERM (--until-done)", flush=True)
    bind, keys = config.trainer.bind, read_keys(role=Role.PUBLISHER)
    while bind and not stopping.is_set():
        try:
            with closing(Hub(bind, keys)):
                stopping.wait()
        except AddressError:  # zmq releases the port of the run's own sink with a delay
            stopping.wait(BIND_AGAIN_S)
    stopping.wait()
    return OK


def rank(argv: list[str]) -> int:
    """Run one rank of a trainer on another host."""
    from rollmesh.trainer.joining import run_rank

    arguments = parser("rank", "Run one rank of a trainer that has ranks on several hosts.")
    add_process_options(arguments)
    arguments.add_argument("--rank", type=int, required=True, help="its number, from 1")
    arguments.add_argument(
        "--controller",
        required=True,
        metavar="ADDRESS",
        help="tcp:// address at which the trainer waits for ranks (its trainer.rank_bind)",
    )
    arguments.add_argument(
        "--local-rank",
        type=int,
        default=0,
        help="its number among the ranks of this host, and of its GPU (default: 0)",
    )
    options = arguments.parse_args(pass_gate(argv))
    announce(options.ready_fd, Ready(f"rank-{options.rank}", os.getpid(), ""))
    return run_rank(config_of(options), options.rank, options.controller, options.local_rank)


def with_newest(argv: list[str]) -> list[str]:
    """Replace `--newest-of RUN/weights` by the newest weights in that folder, if there are any.

    For launch, which restarts an engine: the newest weights are known only then.
    """
    from rollmesh.launch.plan import newest_published, weights_options

    arguments = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    arguments.add_argument("--newest-of", type=Path)
    options, rest = arguments.parse_known_args(argv)
    newest = newest_published(options.newest_of) if options.newest_of else None
    return [*rest, *weights_options(str(newest.weights), newest.policy_version)] if newest else rest


def pass_gate(argv: list[str]) -> list[str]:
    """Wait until launch opens the gate, if there is one; return `argv` without `--go-fd`.

    Call it after imports: they take seconds, while the model is made.
    """
    arguments = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    arguments.add_argument("--go-fd", type=int)
    options, rest = arguments.parse_known_args(argv)
    wait_for_go(options.go_fd)
    return rest


# ruff: noqa: PLC0415 - the room is imported by its own verb only


def worker(argv: list[str]) -> int:
    """Run an env worker until it is stopped, drained or worn out; the exit code says which.

    - Without a settings file it needs a router, an environment and the model's folder, and gets a
      unique name.
    - Programs that its environment starts do not outlive it, launched or not.
    """
    options, _ = _worker_arguments().parse_known_args(argv)
    if options.cluster:
        from rollmesh.cli.ray_workers import scale_workers

        return scale_workers(options, argv)
    from rollmesh.envs.spawning import process_spawner
    from rollmesh.wire.keys import Role, find_keys
    from rollmesh.wire.sockets import check_admitted

    mark = "" if is_launched() else mark_self("worker")
    _leave_root(argv)
    begin_without_secrets()
    process_spawner()
    protect_memory()
    if mark:
        start_orphan_reaper(mark)
    from rollmesh.serve.server.process import run

    options = _worker_arguments().parse_args(pass_gate(argv))
    set_model(options)
    if options.env is not None:
        options.overrides.append(f"env={quoted(options.env)}")
    config = config_of(options, model_defaults(options))
    _check_worker(options, config)
    num_rollouts = config.worker.max_rollouts
    allow_descriptors(PER_ROLLOUT * num_rollouts, f"worker.max_rollouts = {num_rollouts}")
    worker_id = options.worker_id or new_worker_id()
    keys = find_keys(options.router, Role.WORKER, options.run)
    check_admitted(options.router, keys)
    return run(config, options.router, worker_id, options.listen_fd, options.ready_fd, keys)


def _leave_root(argv: list[str]) -> None:
    """With --user, become this user and leave the right to change users to a spawner.

    Settings are read as that user; of the secrets, only files of root are read before.
    """
    from rollmesh.envs.spawning import (
        SPAWNER_VARIABLE,
        account_of,
        acting_as,
        start_spawner_and_drop_rights,
    )

    options, _ = _worker_arguments().parse_known_args(argv)
    if options.user is None or SPAWNER_VARIABLE in os.environ:
        return
    account = account_of(options.user)
    with acting_as(account):
        worker = load_config(options.config, options.overrides, model_defaults(options)).worker
    start_spawner_and_drop_rights(
        account, worker.isolation_first_uid, worker.isolation_num_uids, read_root_files
    )


def new_worker_id() -> str:
    """Return `HOST-PID-RANDOM`, which names the machine and stays unique after a restart."""
    return f"{socket.gethostname()}-{os.getpid()}-{new_id('', 2)}"


def _worker_arguments() -> argparse.ArgumentParser:
    arguments = parser("worker", "Run a worker: environments, agents and their endpoints.")
    arguments.add_argument("--router", required=True, help="tcp:// address of the router")
    arguments.add_argument(
        "--env", help="environment, overriding the setting: a built-in name or package.module:Class"
    )
    add_model_dir(arguments)
    arguments.add_argument(
        "--on", dest="cluster", choices=("ray",), help="run --count workers on a cluster's nodes"
    )
    arguments.add_argument(
        "--count", type=int, metavar="N", help="with --on: the number of workers; 0 drains all"
    )
    arguments.add_argument("--worker-id", help="name in the mesh (default: HOST-PID-RANDOM)")
    add_run(arguments)
    arguments.add_argument(
        "--user",
        help="when started as root: become this user (name or uid) and run agents' programs as "
        "separate users, started by a process that keeps CAP_SETUID and CAP_SETGID",
    )
    add_process_options(arguments)
    add_listen(arguments)
    return arguments


def _check_worker(options: argparse.Namespace, config: Config) -> None:
    """Raise UserError if the worker cannot work with these."""
    names_env = options.env is not None or any(o.startswith("env=") for o in options.overrides)
    if options.config is None and not names_env:
        raise ConfigError(
            "--env ENV is missing: name the environment, or a settings file by --config"
        )
    if not config.model.path:
        raise ModelError("--model-dir DIR is missing: prompts are rendered with the model's files")
    if why := why_no_folder(config.model.path):
        raise ModelError(f"model.path = {config.model.path}: {why}")
