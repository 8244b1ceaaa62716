"""The trainer process: assembles the parts, runs the loop, writes the results at the end.

- However the run ends (done, stopped, failed), the records are closed, and summary.json and
  learning.png are written from what happened.
"""

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

from rollmesh.core.addresses import with_host
from rollmesh.core.clock import SystemClock
from rollmesh.core.config import Config
from rollmesh.core.errors import JournalError, RankError, UserError
from rollmesh.core.logs import get_logger, setup
from rollmesh.core.process import INTERRUPTED, OK, Ready, Stop, announce
from rollmesh.core.share import Share
from rollmesh.envs.loading import load_env
from rollmesh.serve.client.client import RolloutClient, address_here
from rollmesh.trainer.algorithms.registry import find_advantage, find_loss
from rollmesh.trainer.checkpoints.recovery import (
    ResumePoint,
    find_resume_point,
    open_client,
    report_resume,
    restored_staleness,
    restored_tally,
)
from rollmesh.trainer.checkpoints.recovery_plan import RecoveryPlan
from rollmesh.trainer.checkpoints.store import CheckpointStore
from rollmesh.trainer.controller.spec import Meeting
from rollmesh.trainer.gpu_lease import STOP_SHARE, GpuLease, gpu_lease_of
from rollmesh.trainer.joining import TorchrunJob, numeric
from rollmesh.trainer.loop import TrainablePolicy, TrainerDeps, TrainLoop
from rollmesh.trainer.models.folders import num_parameters_in
from rollmesh.trainer.pacing.pacer import Pacer
from rollmesh.trainer.pacing.requester import RequestSettings, endless_tasks
from rollmesh.trainer.policy import Policy
from rollmesh.trainer.publish import PublishShell
from rollmesh.trainer.ranks import resolve_device
from rollmesh.trainer.reports.learning_curve import draw_learning
from rollmesh.trainer.reports.records import RunRecords, Tally, restarts_of, write_summary
from rollmesh.trainer.staleness import Staleness
from rollmesh.trainer.weights.folder import BackgroundLoop, WeightVersions
from rollmesh.wire.keys import Role, read_keys

log = get_logger()

LARGE = 100_000_000
"""Parameters of a model that is more than a toy."""
HIGH_RATE = 1e-4
"""From this learning rate on, a pretrained model of that size forgets what it knew."""


def run(
    config: Config,
    router: str,
    ready_fd: int | None,
    share: Share | None = None,
    job: TorchrunJob | None = None,
) -> int:
    """Train until done, or until SIGTERM or SIGINT; `share` is the run's part in a shared fleet,
    `job` the torchrun that started this process and the other ranks.

    Return the exit code: OK when all steps are done, INTERRUPTED when a signal came before that.
    """
    folder = config.run_folder()
    setup("trainer", folder, on_console=ready_fd is None)
    config = with_device(config, job)
    check_settings(config)
    stop = stop_by_signal()
    env = load_env(config.env, config.env_settings)
    gpu_lease = gpu_lease_of(share, stop, config.trainer.withdraw_timeout_s)
    client, checkpoints, revival = begin(config, router, ready_fd)
    recovery = revival.recovery
    staleness = restored_staleness(config, revival)
    timeouts = close_timeouts(config)
    policy = build(config, staleness, gpu_lease, meeting_of(config, router, stop, job))
    if policy is None:
        leave_unbuilt(client, gpu_lease, timeouts.stop_wait_s)
        return INTERRUPTED
    if revival.saved:
        checkpoints.restore(revival.saved, policy)
    records = RunRecords(folder, SystemClock(), revival.covered, stop)
    tally = restored_tally(config, revival)
    report_resume(revival, records)
    tasks = endless_tasks(env, config.env, config.run.seed, recovery.num_tasks)
    pacer = Pacer(
        client, staleness, tasks, request_settings(config), (records, tally), policy.allocator
    )
    pacer.resume(recovery)
    background = BackgroundLoop("publisher")
    shell = open_publisher(config, router, client)
    weights = WeightVersions(folder / "weights", background, shell.is_loading, shell.fleet)
    weights.policy_version = recovery.policy_version - 1

    parts = TrainerDeps(
        client=client,
        pacer=pacer,
        policy=policy,
        weights=weights,
        bring=shell.publish,
        records=records,
        tally=tally,
        checkpoints=checkpoints,
        fence=lambda asked: background.post(lambda: shell.fence(asked)),
        gpu_lease=gpu_lease,
    )
    gc.freeze()  # torch alone is 400,000 objects, which no collection needs to visit
    loop = TrainLoop(config, parts, stop)
    is_done = train(loop, recovery, parts, (background, shell), timeouts)
    return OK if is_done else INTERRUPTED


def check_settings(config: Config) -> None:
    """Raise ConfigError for settings that cannot work, and log a warning for doubtful ones."""
    find_loss(config.trainer.loss)
    find_advantage(config.trainer.advantage)
    for event, why, fix in warnings_of(config):
        log.warning(event, why=why, fix=fix)


def open_publisher(config: Config, router: str, client: RolloutClient) -> PublishShell:
    """Return the publisher of the weights."""
    keys = read_keys(role=Role.PUBLISHER)
    return PublishShell(router, config.publish, keys, client.client_id, config.engine)


class CloseTimeouts(msgspec.Struct, frozen=True):
    """Limits on the time that a trainer takes to leave, in seconds."""

    stop_wait_s: float
    """Wait of a stopped trainer for engines and for a publication in progress."""
    sleep_s: float
    """Wait of a finished trainer for its engines to sleep."""
    publisher_s: float
    """Time for the publisher to release the engines."""


def close_timeouts(config: Config) -> CloseTimeouts:
    """Return the limits of the settings."""
    return CloseTimeouts(
        stop_wait_s=min(STOP_SHARE * config.launch.stop_timeout_s, config.trainer.stop_wait_s),
        sleep_s=config.trainer.sleep_timeout_s,
        publisher_s=config.publish.close_timeout_s,
    )


def train(
    loop: TrainLoop,
    recovery: RecoveryPlan,
    parts: TrainerDeps,
    publisher: tuple[BackgroundLoop, PublishShell],
    timeouts: CloseTimeouts,
) -> bool:
    """Run the loop, then close every part, even if one is late or fails; return whether all steps
    are done."""
    is_done = False
    folder = parts.checkpoints.folder.parent
    with journal_errors_as_user_errors(), ExitStack() as leaving:
        leaving.callback(
            lambda: parts.gpu_lease.close(timeouts.sleep_s if is_done else timeouts.stop_wait_s)
        )
        leaving.callback(parts.policy.close)
        leaving.callback(parts.pacer.close)
        leaving.callback(write_results, folder, parts.tally, parts.pacer)
        leaving.callback(parts.records.close)
        # When the run is not done, its groups keep running for the next trainer.
        leaving.callback(lambda: parts.client.close(for_good=is_done))
        leaving.callback(parts.gpu_lease.release_all)
        leaving.callback(close_publisher, *publisher, timeouts)
        is_done = loop.run(recovery)
    return is_done


def begin(
    config: Config, router: str, ready_fd: int | None
) -> tuple[RolloutClient, CheckpointStore, ResumePoint]:
    """Open the address for results, then find the state to resume from.

    Raises UserError if another trainer has the journal, its disk is full, or no checkpoint is
    complete.
    """
    client, checkpoints = open_client(config, router), CheckpointStore(config.run_folder())
    with ExitStack() as undo:
        undo.callback(client.close)
        # Before a checkpoint is verified, which reads all of it and may take many minutes.
        announce(ready_fd, Ready("trainer", os.getpid(), client.address))
        revival = find_resume_point(client, checkpoints)
        # Results that finished meanwhile are acknowledged and safe before anything is loaded.
        with journal_errors_as_user_errors():
            client.start(revival.recovery.saved)
        undo.pop_all()
    return client, checkpoints, revival


@contextmanager
def journal_errors_as_user_errors() -> Iterator[None]:
    """Turn a JournalError into a UserError of one line."""
    try:
        yield
    except JournalError as error:
        raise UserError(f"{error}; {error.remedy}, then --resume") from None


def build(
    config: Config, staleness: Staleness, gpu_lease: GpuLease, meeting: Meeting
) -> TrainablePolicy | None:
    """Return the policy, once its GPUs are granted and its ranks are there; None if the run is
    stopped before."""
    if not gpu_lease.acquire():
        return None
    try:
        policy = policy_of(config, staleness, meeting)
    except RankError:
        if meeting.stop and meeting.stop.is_set():
            return None
        raise
    gpu_lease.attach(policy)
    return policy


def leave_unbuilt(client: RolloutClient, gpu_lease: GpuLease, patience_s: float) -> None:
    """Close a run that was stopped before its policy was built."""
    gpu_lease.release_all()
    client.close()
    gpu_lease.close(patience_s)


def meeting_of(
    config: Config, router: str, stop: threading.Event, job: TorchrunJob | None
) -> Meeting:
    """Return where ranks join that are started elsewhere; loopback if there are none."""
    trainer = config.trainer
    if trainer.local_ranks == trainer.num_ranks:
        return Meeting(stop=stop)
    host = job.host(router) if job else address_here(router)
    bind = numeric(trainer.rank_bind) if trainer.rank_bind else with_host("tcp://:0", host)
    return Meeting(bind, job.publish if job else Meeting().publish, stop)


def policy_of(config: Config, staleness: Staleness, meeting: Meeting) -> TrainablePolicy:
    """Make the policy, in this process or on several ranks; `staleness` paces what it trains."""
    if config.trainer.num_ranks == 1:
        return Policy(config.model.path, config.trainer)
    # Imported here: one rank needs no controller, whose import takes some 65 ms.
    from rollmesh.trainer.ranked import RankedPolicy  # noqa: PLC0415 - only where it is wanted

    folder, keys = config.run_folder(), read_keys(role=Role.PUBLISHER)
    return RankedPolicy(config.model.path, config.trainer, folder, keys, staleness, meeting)


def with_device(config: Config, job: TorchrunJob | None = None) -> Config:
    """Return the settings with `auto` replaced by a device; raise ConfigError if it is missing."""
    trainer = config.trainer
    num_here = job.num_sharing if job else trainer.local_ranks
    device = str(resolve_device(trainer.device, num_here))
    return msgspec.structs.replace(config, trainer=msgspec.structs.replace(trainer, device=device))


class SettingsWarning(NamedTuple):
    """A warning about settings that do not fit the model: an event, the reason, the remedy."""

    event: str
    why: str
    fix: str


def warnings_of(config: Config) -> list[SettingsWarning]:
    """Return the warnings about a device or a learning rate that does not fit the model."""
    num_parameters = num_parameters_in(Path(config.model.path))
    return settings_warnings(config, torch.device(config.trainer.device), num_parameters)


def settings_warnings(
    config: Config, device: torch.device, num_parameters: int
) -> list[SettingsWarning]:
    """Return the warnings for a model of `num_parameters` that trains on `device`."""
    if num_parameters < LARGE:
        return []
    trainer, size = config.trainer, f"{num_parameters / 1e6:,.0f} M parameters"
    found = []
    if trainer.learning_rate >= HIGH_RATE and not trainer.lora_rank:
        why = f"trainer.learning_rate = {trainer.learning_rate:g} for {size}, all of which train"
        fix = "1e-6 to 1e-5 is usual; or set trainer.lora_rank"
        found.append(SettingsWarning("trainer.high_rate", why, fix))
    if device.type == "cpu":
        why = f'a model of {size} trains on the CPU (trainer.device = "{trainer.device}")'
        fix = "install a torch with CUDA, or expect minutes per step"
        found.append(SettingsWarning("trainer.on_cpu", why, fix))
    if not config.engine.urls:
        why = f"the embedded engine samples a model of {size} on the CPU"
        fix = "name SGLang servers in engine.urls"
        found.append(SettingsWarning("engine.on_cpu", why, fix))
    return found


def stop_by_signal() -> threading.Event:
    """Return an event that the first SIGTERM or SIGINT sets; the second ends the process."""
    stop = threading.Event()
    Stop(stop.set)
    return stop


def write_results(folder: Path, tally: Tally, pacer: Pacer) -> None:
    """Write the trainer's results; a disk error is logged, and hides no earlier error."""
    tally.num_open = pacer.num_open()
    try:
        write_summary(folder, tally.summary() | restarts_of(folder))
        draw_learning(folder)
    except OSError as error:
        log.warning("results.not_written", folder=str(folder), error=error.strerror)


def close_publisher(
    background: BackgroundLoop, shell: PublishShell, timeouts: CloseTimeouts
) -> None:
    """Release the engines, after a publication in progress if it ends in time; what takes
    longer ends with the process."""
    wait_s = timeouts.stop_wait_s + timeouts.publisher_s
    try:
        background.call(shell.close(timeouts.stop_wait_s), wait_s)
    except TimeoutError:
        log.warning("publisher.late", waited_s=wait_s, fix="none: its leases lapse")
    else:
        background.close()


def request_settings(config: Config) -> RequestSettings:
    """Settings of all requests; training forces the sampling that the loss assumes."""
    return RequestSettings(
        env=config.env,
        num_samples=config.trainer.samples_per_group,
        sampling=config.sampling.policy(),
        seed=config.run.seed,
        branches=config.trainer.train_branches,
    )
