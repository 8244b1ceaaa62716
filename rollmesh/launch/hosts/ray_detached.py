"""Runs that outlive the shell which started them: `rollmesh up --on ray --detach`.

- A detached actor, named after the run, keeps `rollmesh up --on ray --go-on` running. If its node
  dies, Ray starts it again on another one, where the run resumes from its folder.
- The actor ends with its run, or by `--down`.
"""

import os
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from rollmesh.core.child_process import (
    ManagedProcess,
    describe_exit,
    launched_environment,
    open_output,
)
from rollmesh.core.config import Config
from rollmesh.core.errors import ConfigError, UserError
from rollmesh.core.process import FAILED
from rollmesh.launch.child import last_line
from rollmesh.launch.hosts.ray import NAMESPACE, first_line
from rollmesh.launch.plan import ROLLMESH

PREFIX = "rollmesh-run-"
START_S = 10.0
"""Most mistakes of the user end the run within this time."""
STOP_S = 10.0
"""Time to stop, besides launch.stop_timeout_s."""


class RunActor:
    """Actor that keeps the launch of one run."""

    def __init__(self, words: list[str], folder: str, output: str) -> None:
        """`rollmesh up` with `words` runs in `folder`, and appends its output to a file."""
        self._output = Path(output)
        with open_output(self._output) as file:
            self._launch = ManagedProcess(
                [*ROLLMESH, "up", *words],
                folder=Path(folder) if os.path.isdir(folder) else None,
                environment=launched_environment(),
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        self._handle: Any = ray.get_runtime_context().current_actor
        self._is_seen = threading.Event()
        threading.Thread(target=self._follow, daemon=True).start()

    def failure(self) -> str:
        """Return the last line of a launch that ended at once; '' if it runs."""
        is_running = not self._launch.wait_for(START_S)
        self._is_seen.set()
        return "" if is_running else last_line(self._output) or describe_exit(self._launch.wait())

    def stop(self, timeout_s: float) -> bool:
        """Stop the run in order; return whether it ended in time."""
        os.kill(self._launch.pid, signal.SIGTERM)
        return self._launch.wait_for(timeout_s)

    def _follow(self) -> None:
        if self._launch.wait() < 0:  # killed: Ray starts this actor again, and the run resumes
            os._exit(FAILED)
        self._is_seen.wait(2 * START_S)
        ray.kill(self._handle)


def start_detached(config: Config, words: list[str]) -> Path:
    """Start a run that outlives this process; return the file of its output.

    `words` are the arguments of `rollmesh up`. Raise UserError if a run of that name exists, or if
    it ends at once.
    """
    name = config.run.name
    output = (Path(config.run.folder) / f"{name}.launch.out").absolute()
    actor = ray.remote(RunActor).options(
        name=PREFIX + name, namespace=NAMESPACE, lifetime="detached", num_cpus=0, max_restarts=-1
    )
    try:
        handle = actor.remote(words, os.getcwd(), str(output))
    except ValueError:
        raise ConfigError(
            f"run.name = {name}: a run of this name is on the cluster; end it by --down"
        ) from None
    try:
        failure: str = ray.get(handle.failure.remote())
    except RayError as error:
        failure = first_line(error)
    if failure:
        raise UserError(failure.removeprefix("rollmesh: "))
    return output


def stop_detached(config: Config) -> None:
    """Stop the run of that name in order; raise UserError if there is none."""
    name = config.run.name
    try:
        handle = ray.get_actor(PREFIX + name, namespace=NAMESPACE)
    except ValueError:
        raise UserError(f"run.name = {name}: no run of this name is on the cluster") from None
    timeout_s = config.launch.stop_timeout_s + STOP_S
    try:
        ray.get(handle.stop.remote(timeout_s), timeout=timeout_s + STOP_S)
    except RayError:  # the actor ends with its run
        return
    ray.kill(handle)
