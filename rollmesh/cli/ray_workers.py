"""`rollmesh worker --on ray --count N`: set the number of a mesh's workers on a Ray cluster.

- More workers are added, and the verb returns once each runs or has failed. Those without a node
  stay requested, so that an autoscaler adds nodes; Ctrl-C stops the waiting only.
- Surplus workers are drained: they finish their rollouts.
"""

import argparse
import os
import sys
import time
from pathlib import Path

from rollmesh.cli.mesh_state import send_request
from rollmesh.cli.options import config_of, model_defaults
from rollmesh.core.errors import AddressError, ConfigError, UserError
from rollmesh.core.ids import new_id
from rollmesh.core.process import OK
from rollmesh.core.secret_files import ENGINE_KEY_FILE_VARIABLE, KEYS_VARIABLE, engine_key
from rollmesh.launch.hosts.base import ChildOrder
from rollmesh.launch.hosts.ray import connect_to_cluster, missing_resources
from rollmesh.launch.hosts.ray_workers import ActorState, WorkerPool
from rollmesh.launch.hosts.runner import StartOrder
from rollmesh.launch.keys import ENGINE_KEY, engine_key_of
from rollmesh.launch.plan import ROLLMESH
from rollmesh.wire.keys import Role, encode_keys, find_keys
from rollmesh.wire.messages import AskDrain, DrainAnswered

LOOK_S = 1.0
KEY_FILE = "worker.json"


def scale_workers(options: argparse.Namespace, argv: list[str]) -> int:
    """Set the number of workers of the mesh at `options.router` to `options.count`."""
    if options.count is None or options.count < 0:
        raise ConfigError("--on ray: --count N is missing; 0 drains all workers")
    config = config_of(options, model_defaults(options))
    connect_to_cluster(config.ray.address)
    pool = WorkerPool(options.router)
    names = without_failed(pool)
    num_new = options.count - len(names)
    if num_new > 0:
        added = [*pool.free_names(num_new)]
        for name in added:
            pool.add(start_order(options, argv, name), config.ray.worker_cpus, config.launch)
        follow_start(pool, added, config.ray.worker_cpus)
    elif num_new < 0:
        drain_workers(pool, names[options.count :], options.router, options.run)
    else:
        print(f"{options.count} workers run already")
    return OK


def without_failed(pool: WorkerPool) -> list[str]:
    """Remove the workers that have failed, and return the others."""
    states = pool.states(pool.workers())
    failed = {name: line for name, (state, line) in states.items() if state is ActorState.FAILED}
    for name in failed:
        pool.remove(name)
    if failed:
        line = next(iter(failed.values())).removeprefix("rollmesh: ")
        print(f"{len(failed)} workers had failed and were removed: {line}", flush=True)
    return [name for name in states if name not in failed]


def start_order(options: argparse.Namespace, argv: list[str], name: str) -> StartOrder:
    """Return how a worker is started on its node: by the words of `argv`, with its keys."""
    words = without(argv, "--on", "--count", "--run", "--worker-id", "--config")
    contents, variables = {}, {}
    if options.config:
        words += ["--config", str(options.config)]
        contents[str(options.config)] = options.config.read_bytes()
    keys = find_keys(options.router, Role.WORKER, options.run)
    if keys:
        contents[KEY_FILE], variables[KEYS_VARIABLE] = encode_keys(keys), KEY_FILE
    if key := engine_key() or engine_key_of(keys):
        contents[ENGINE_KEY] = key.encode()
        variables[ENGINE_KEY_FILE_VARIABLE] = ENGINE_KEY
    order = ChildOrder(
        role=name,
        argv=(*ROLLMESH, "worker", *words, "--worker-id", name),
        mark=new_id("worker"),
        variables=variables,
        files=tuple(contents),
        folder=os.getcwd(),
        is_worker=True,
    )
    return StartOrder(order, contents, sys.executable, logs="", log_token="")


def without(argv: list[str], *options: str) -> list[str]:
    """Return `argv` without these options and their values."""
    kept, words = [], iter(argv)
    for word in words:
        if word in options:
            next(words, None)
        elif word.partition("=")[0] not in options:
            kept.append(word)
    return kept


def follow_start(pool: WorkerPool, names: list[str], num_cpus: float) -> None:
    """Print how many workers run, whenever that changes, until none is starting or pending.

    Raise UserError with the last line of a worker that failed.
    """
    shown = ""
    while True:
        states = pool.states(names)
        failed = [line for state, line in states.values() if state is ActorState.FAILED]
        if failed:
            raise UserError(f"{len(failed)} workers failed: {failed[0].removeprefix('rollmesh: ')}")
        kinds = [state for state, _ in states.values()]
        num_running, num_pending = (
            kinds.count(ActorState.RUNNING),
            kinds.count(ActorState.PENDING),
        )
        line = f"{num_running} of {len(names)} new workers run"
        if num_pending:
            line += f"; {missing_resources('CPU', num_pending * num_cpus)}"
        if line != shown:
            print(line, flush=True)
            shown = line
        if num_running == len(names):
            return
        time.sleep(LOOK_S)


def drain_workers(pool: WorkerPool, names: list[str], router: str, run: Path | None) -> None:
    """Drain these workers through the router, and remove their actors once they have ended."""
    left = []
    for number, name in enumerate(names):
        asked = AskDrain(number, name, "asked for by `rollmesh worker --count`")
        try:
            is_known = send_request(router, asked, DrainAnswered, run).ok
        except AddressError:  # the mesh has ended
            is_known = False
        if is_known:
            left.append(name)
        else:
            pool.remove(name)
    while left:
        print(f"draining: {len(left)} of {len(names)} workers finish their rollouts", flush=True)
        num_before = len(left)
        while len(left) == num_before:
            states = pool.states(left)
            for name in [n for n, (state, _) in states.items() if state is ActorState.DRAINED]:
                pool.remove(name)
                left.remove(name)
            time.sleep(LOOK_S)
    print(f"{len(names)} workers were drained")
