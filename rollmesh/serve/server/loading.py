"""The worker's environment: loaded in time, or its failure told to the router.

    LOADING --built-----------------> the environment
       +----it raises, or exits-----> told --> EnvError: one line, exit code 2
       +----load_timeout_s is over--> told --> the same line, and the process ends at once
       +----the process crashes-----> the router, told that we load, sees us gone

Invariant: whoever waits for this environment hears why there is none, if the router can be reached
at all: the report is repeated until the router answers. Nothing but its end stops foreign code that
hangs on the main thread, where modules expect to be imported. Driven by process.py, before its loop
runs.
"""

import os
import socket
import sys
import threading
import time

from rollmesh.core.errors import EnvError
from rollmesh.core.printable import printable
from rollmesh.core.process import USAGE, pid_space
from rollmesh.envs.env import Env
from rollmesh.envs.loading import load_env
from rollmesh.serve.server.beats import STARTED_S, identity
from rollmesh.serve.server.stack import whereabouts
from rollmesh.serve.server.worker import WorkerSettings
from rollmesh.wire.frames import Packet
from rollmesh.wire.messages import EnvFailed, RouterHello, WorkerHello
from rollmesh.wire.sockets import Dialer, wait

REPORT_S = 5.0
"""How long a worker that cannot begin tries to tell its router."""
REPEAT_S = 0.2
ANNOUNCE_S = 0.3
"""How long a load waits for its router to know of it."""


def load_in_time(settings: WorkerSettings) -> Env:
    """The environment of the settings; EnvError, one line, if it cannot be had."""
    announce(settings)
    config = settings.config
    say = threading.Lock()  # who takes it first has the last word
    watch = threading.Timer(
        config.worker.load_timeout_s, _give_up, (settings, threading.get_ident(), say)
    )
    watch.daemon = True
    watch.start()
    try:
        env = load_env(config.env, config.env_settings)
    except EnvError as error:
        say.acquire()
        report(settings, str(error))
        raise
    finally:
        watch.cancel()
    say.acquire()
    return env


def announce(settings: WorkerSettings) -> None:
    """Tell the router that this process loads, and for how long at most, in case it crashes."""
    config = settings.config
    hello = WorkerHello(
        worker_id=settings.worker_id,
        env=config.env,
        max_rollouts=config.worker.max_rollouts,
        pid=os.getpid(),
        host=socket.gethostname(),
        started_s=STARTED_S,
        loads_for_s=config.worker.load_timeout_s,
        pid_space=pid_space(),
    )
    _tell(settings, hello, ANNOUNCE_S)


def report(settings: WorkerSettings, error: str) -> None:
    """Tell the router that this worker has no environment."""
    failed = EnvFailed(
        settings.worker_id, settings.config.env, printable(error), os.getpid(), STARTED_S
    )
    _tell(settings, failed, REPORT_S)


def _tell(settings: WorkerSettings, message: WorkerHello | EnvFailed, for_s: float) -> None:
    """Say it again and again until the router answers, or the time is over."""
    dialer = Dialer(settings.router, f"{identity(settings.worker_id)}.load", settings.keys)
    until_s = time.monotonic() + for_s
    is_heard = False
    while not is_heard and time.monotonic() < until_s:
        dialer.send(Packet(message))
        wait([dialer], None, REPEAT_S)
        is_heard = any(isinstance(each.message, RouterHello) for each in dialer.receive())
    dialer.close()


def _give_up(settings: WorkerSettings, main_thread: int, say: threading.Lock) -> None:
    if not say.acquire(blocking=False):
        return
    config = settings.config
    error = (
        f'env = "{config.env}" was not loaded within worker.load_timeout_s = '
        f"{config.worker.load_timeout_s:g}; it is in {whereabouts(main_thread)}"
    )
    report(settings, error)
    sys.stderr.write(f"rollmesh: {error}\n")
    sys.stderr.flush()
    os._exit(USAGE)
