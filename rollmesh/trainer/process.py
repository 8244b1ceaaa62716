"""The trainer process: puts the parts together, runs the loop, writes what there is at the end.

Invariant: however the run ends (done, stopped, failed) the records are closed and summary.json and
learning.png are written from what happened. Driven by `rollmesh train`.
"""

import gc
import os
import signal
import threading
from pathlib import Path

from rollmesh.core.clock import SystemClock
from rollmesh.core.config import Config
from rollmesh.core.logs import get_logger, setup
from rollmesh.core.process import Ready, announce
from rollmesh.envs.loading import load_env
from rollmesh.serve.client.client import RolloutClient
from rollmesh.trainer.device import device_of
from rollmesh.trainer.fencing import FenceAsked
from rollmesh.trainer.loop import Parts, Trainee, TrainLoop
from rollmesh.trainer.pacer import Asking, Pacer
from rollmesh.trainer.picture import draw_learning
from rollmesh.trainer.policy import Policy
from rollmesh.trainer.publish import PublishShell
from rollmesh.trainer.records import RunRecords, Tally, write_summary
from rollmesh.trainer.staleness import StalenessManager, StalenessSettings
from rollmesh.trainer.tasks import endless_tasks
from rollmesh.trainer.weights import BackgroundLoop, Weights
from rollmesh.wire.keys import read_keys

log = get_logger()

CLOSE_S = 2.0
"""How long the publisher may take to let go of the engines."""


def run(config: Config, router: str, ready_fd: int | None) -> None:
    """Train until done or told to stop by SIGTERM or SIGINT."""
    folder = config.run_folder()
    setup("trainer", folder, on_console=ready_fd is None)
    stop = stop_by_signal()
    env = load_env(config.env, config.env_settings)
    policy = policy_of(config)
    client = RolloutClient(router, config.journal, folder, read_keys(), bind=config.trainer.bind)
    client.start()
    announce(ready_fd, Ready("trainer", os.getpid(), client.address))
    records, tally = RunRecords(folder, SystemClock()), Tally()
    tasks = endless_tasks(env, config.env, config.run.seed)
    books = (records, tally)
    pacer = Pacer(client, staleness_of(config), tasks, asking_of(config), books, policy.room)
    background = BackgroundLoop("publisher")
    shell = PublishShell(router, config.publish, read_keys())
    weights = Weights(folder / "weights", config.publish.keep_versions, background)

    def fence(asked: FenceAsked) -> None:
        background.post(lambda: shell.fence(asked))

    parts = Parts(client, pacer, policy, weights, shell.publish, records, tally, fence)
    gc.freeze()  # torch alone is 400,000 objects, which no collection need look at
    try:
        TrainLoop(config, parts, stop).run()
    finally:
        tally.num_open = pacer.num_open()
        background.call(shell.close(), CLOSE_S)
        background.close()
        client.close()
        records.close()
        write_books(folder, tally)
        pacer.close()
        policy.close()


def policy_of(config: Config) -> Trainee:
    """The policy that the settings ask for, on its own or on several ranks; ConfigError where its
    device is not there."""
    device_of(config.trainer.device)
    if config.trainer.num_ranks == 1:
        return Policy(config.model.path, config.trainer)
    # Here, since one rank does without the controller and its 37 modules (some 65 ms).
    from rollmesh.trainer.ranked import RankedPolicy  # noqa: PLC0415 - only where it is wanted

    return RankedPolicy(config.model.path, config.trainer, config.run_folder(), read_keys())


def stop_by_signal() -> threading.Event:
    """Set by the first SIGTERM or SIGINT; the second ends the process at once."""
    stop = threading.Event()

    def on_signal(*_: object) -> None:
        if stop.is_set():
            os._exit(1)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    return stop


def write_books(folder: Path, tally: Tally) -> None:
    """The trainer's part of what a run leaves."""
    write_summary(folder, tally.summary())
    draw_learning(folder)


def staleness_of(config: Config) -> StalenessManager:
    """The pacing that the settings ask for."""
    trainer = config.trainer
    return StalenessManager(
        StalenessSettings(
            batch=trainer.groups_per_step,
            max_staleness=trainer.max_staleness,
            max_running=trainer.max_running_groups,
        )
    )


def asking_of(config: Config) -> Asking:
    """What all asks of the run share; training forces the sampling that the loss assumes."""
    return Asking(
        env=config.env,
        num_samples=config.trainer.samples_per_group,
        sampling=config.sampling.policy(),
        seed=config.run.seed,
        branches=config.trainer.train_branches,
    )
