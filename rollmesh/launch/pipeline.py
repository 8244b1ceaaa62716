"""This run's pipeline in a shared fleet: check that the run may begin, claim the pipeline's name,
release it.

    free ------------------------------------claim--> ours --release--> free
    a dead run's, on this machine --end its processes, claim--> ours

- A check changes nothing at the scheduler; a scheduler that is not up, or has not admitted the
  pipeline yet, is waited for.
- No process of the earlier run is left when the name changes hands, so its GPUs are free.
- The processes of a dead run are found by the record that its launch wrote (core/share.py), never
  by what a peer reports: a forged claim ends nothing.
- A run that is alive, or that cannot be checked from here, keeps the name.
"""

import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from rollmesh.core.config import LaunchConfig
from rollmesh.core.errors import AddressError, ConfigError, UserError
from rollmesh.core.ids import new_id
from rollmesh.core.logs import get_logger
from rollmesh.core.process import start_ticks
from rollmesh.core.share import TRAIN_CLUSTER, RunClaimRecord, Share, place, read_claim, write_claim
from rollmesh.launch.devices import GrantedGpus
from rollmesh.wire.frames import Buffer, Packet
from rollmesh.wire.keys import Role, check_dial, read_scheduler_keys
from rollmesh.wire.scheduling import (
    ClaimPipeline,
    PipelineSpec,
    ReadScheduler,
    RunClaim,
    SchedulerAnswered,
)
from rollmesh.wire.sockets import Dialer, wait

RESEND_S = 1.0
NOT_ADMITTED = "registered"
STILL_RUNNING = (
    "another run has that name and is running; end it first, or register this one under another "
    "name"
)

SchedulerRequest = ReadScheduler | ClaimPipeline


class PipelineStatus(msgspec.Struct):
    """The part of a pipeline's view that launch needs."""

    phase: str
    spec: PipelineSpec
    is_driven: bool = False
    run: RunClaim | None = None


class NodeStatus(msgspec.Struct, frozen=True):
    """The part of a node's view that launch needs."""

    name: str
    gpus: tuple[int, ...]


class _View(msgspec.Struct):
    pipelines: tuple[PipelineStatus, ...] = ()
    nodes: tuple[NodeStatus, ...] = ()


def check_share(
    share: Share,
    num_engines: int,
    settings: LaunchConfig,
    report: Callable[[str], object] = str,
) -> None:
    """Raise UserError if this run cannot begin on the fleet.

    That is the case if the scheduler does not answer or does not admit the pipeline within
    `scheduler_wait_s` (`report` gets one line about the wait), if it counts other engines than the
    run has, or if another process drives the pipeline.
    """
    name = f"--pipeline {share.pipeline_id}"
    wait_for_admission(share, settings, report)
    end_s = time.monotonic() + settings.driver_gone_s
    while (pipeline := read_pipeline(share, settings)).is_driven and pipeline.run is None:
        if time.monotonic() >= end_s:  # a driver that has just died still counts for a moment
            raise ConfigError(f"{name}: {STILL_RUNNING}")
        time.sleep(RESEND_S)
    num_workers = len(pipeline.spec.generation) // pipeline.spec.tp
    if num_workers != num_engines:
        raise ConfigError(
            f"engine.num_embedded, engine.urls: {num_engines} engines where the scheduler has "
            f"{num_workers} generation workers for {share.pipeline_id}; make them as many"
        )


def wait_for_admission(
    share: Share, settings: LaunchConfig, report: Callable[[str], object]
) -> None:
    """Return once the pipeline is admitted; raise UserError if it is not in time."""
    check_dial(share.scheduler, read_scheduler_keys(role=Role.CLIENT))
    end_s, has_said = time.monotonic() + settings.scheduler_wait_s, False
    while True:
        try:
            return _check_admitted(share, settings)
        except UserError as error:
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                raise
            if not has_said:
                has_said = True
                report(f"{error}; waiting up to {left_s:.0f} s")
        time.sleep(RESEND_S)


def _check_admitted(share: Share, settings: LaunchConfig) -> None:
    if read_pipeline(share, settings).phase == NOT_ADMITTED:
        fix = f"`rollmesh scheduler admit {share.pipeline_id}`"
        raise ConfigError(
            f"--pipeline {share.pipeline_id}: registered but not admitted; run {fix} first"
        )


def read_pipeline(share: Share, settings: LaunchConfig) -> PipelineStatus:
    """Return the pipeline's status at the scheduler."""
    [pipeline] = _read_view(share, settings).pipelines
    return pipeline


def read_grant(share: Share, settings: LaunchConfig) -> GrantedGpus:
    """Return the GPUs that the scheduler may grant to the pipeline's engines and trainer."""
    view = _read_view(share, settings)
    [pipeline] = view.pipelines
    return granted_gpus(pipeline.spec, view.nodes)


def granted_gpus(spec: PipelineSpec, nodes: Sequence[NodeStatus]) -> GrantedGpus:
    """Return a pipeline's GPUs by their place in their node."""
    places = {gpu: (node.name, at) for node in nodes for at, gpu in enumerate(node.gpus)}
    trained = spec.clusters.get(TRAIN_CLUSTER, ())
    gpus = [gpu for gpu in (*spec.generation, *trained) if gpu in places]
    names = sorted({places[gpu][0] for gpu in gpus})
    workers = range(0, len(spec.generation), spec.tp)
    of_engines = [spec.generation[at : at + spec.tp] for at in workers]
    return GrantedGpus(
        tuple(_places(each, places) for each in of_engines),
        _places(trained, places),
        tuple(names),
    )


def _places(gpus: Sequence[int], places: Mapping[int, tuple[str, int]]) -> tuple[int, ...]:
    """Return the place of each GPU; a node that has not joined yet has none, so all are its."""
    return tuple(places[gpu][1] if gpu in places else gpu for gpu in gpus)


def _read_view(share: Share, settings: LaunchConfig) -> _View:
    timeout_s = settings.scheduler_timeout_s
    reply = send_request(share, ReadScheduler(new_id("read-"), share.pipeline_id), timeout_s)
    if not reply:
        raise AddressError(
            f"--scheduler {share.scheduler}: no answer within {timeout_s:g} s; "
            "`rollmesh scheduler up` starts one"
        )
    answer, body = reply
    if not answer.ok:
        raise ConfigError(f"--pipeline {share.pipeline_id}: {answer.error}")
    return msgspec.json.decode(body, type=_View)


def send_request(
    share: Share, question: SchedulerRequest, patience_s: float
) -> tuple[SchedulerAnswered, Buffer] | None:
    """Send a request, again each RESEND_S, until it is answered; None without an answer in time."""
    check_dial(share.scheduler, keys := read_scheduler_keys(role=Role.CLIENT))
    dialer = Dialer(share.scheduler, new_id("launch-"), keys)
    try:
        return _answer(dialer, question, time.monotonic() + patience_s)
    finally:
        dialer.close()


def _answer(
    dialer: Dialer, question: SchedulerRequest, end_s: float
) -> tuple[SchedulerAnswered, Buffer] | None:
    while (left_s := end_s - time.monotonic()) > 0:
        dialer.send(Packet(question))
        wait([dialer], None, min(left_s, RESEND_S))
        for packet in dialer.receive():
            message = packet.message
            if isinstance(message, SchedulerAnswered) and message.key == question.key:
                return message, packet.body
    return None


log = get_logger()

RUN_ID_BYTES = 8


def new_claim(share: Share, mark: str, runs: Path, *, owns_engines: bool) -> RunClaim:
    """Write the record of this process's run, whose processes carry `mark`; return its claim."""
    pid, run_id = os.getpid(), new_id("run-", RUN_ID_BYTES)
    here, ticks, record = place(), start_ticks(pid), ""
    if here and ticks:  # elsewhere (not Linux) the record could not be used
        claimed = RunClaimRecord(
            run_id=run_id,
            pipeline_id=share.pipeline_id,
            mark=mark,
            pid=pid,
            started_ticks=ticks,
            place=here,
        )
        record = str(write_claim(runs, claimed))
    return RunClaim(run_id, socket.gethostname(), pid, here, ticks, owns_engines, record)


def claim_name(share: Share, run: RunClaim, settings: LaunchConfig) -> None:
    """Claim the name; UserError if another run has it, or the scheduler does not answer."""
    try:
        earlier = read_pipeline(share, settings).run
        if earlier:
            end_dead_run(earlier, share)
        after = earlier.run_id if earlier else ""
        claim = ClaimPipeline(new_id("claim-"), share.pipeline_id, run, after, share.token)
        reply = send_request(share, claim, settings.scheduler_timeout_s)
        if reply is None:
            raise AddressError(f"--scheduler {share.scheduler}: the scheduler no longer answers")
        answer, _ = reply
        if not answer.ok:
            raise ConfigError(f"--pipeline {share.pipeline_id}: {answer.error}")
    except BaseException:
        _remove(run)
        raise
    if earlier:
        _remove(earlier)


def release_name(share: Share, run: RunClaim, settings: LaunchConfig) -> str:
    """Report that all processes of `run` have ended, so that its name and GPUs are free.

    Return what to do if the scheduler did not answer, or ''.
    """
    ended = ClaimPipeline(new_id("dead-"), share.pipeline_id, None, run.run_id, share.token)
    reply = send_request(share, ended, settings.release_timeout_s)
    if reply and reply[0].ok:
        _remove(run)
        return ""
    why = reply[0].error if reply else "no answer"
    return (
        f"{share.scheduler} did not confirm that {share.pipeline_id} has ended ({why}); its GPUs "
        "are freed by its next run from here, or by "
        f"`rollmesh scheduler kill {share.pipeline_id} --dead`"
    )


def end_dead_run(earlier: RunClaim, share: Share) -> None:
    """End the processes of a run whose launch is dead; ConfigError if it still runs, or if that
    cannot be checked from here.
    """
    name, where = f"--pipeline {share.pipeline_id}", f"pid {earlier.pid} on {earlier.host}"
    free = f"`rollmesh scheduler kill {share.pipeline_id} --dead` frees its name"
    if not earlier.place or earlier.place != place():
        raise ConfigError(
            f"{name}: its last run ({where}) has not reported its end, and cannot be checked "
            f"from here; once none of its processes is left, {free}"
        )
    if start_ticks(earlier.pid) == earlier.started_ticks:
        raise ConfigError(f"{name} ({where}): {STILL_RUNNING}")
    try:
        record = read_claim(earlier.record, earlier.run_id, share.pipeline_id)
    except ConfigError as error:
        raise ConfigError(
            f"{name}: its last run ({where}) did not end cleanly, and {error}; once none of its "
            f"processes is left, {free}"
        ) from None
    if record.uid != os.getuid():
        raise ConfigError(
            f"{name}: its last run ({where}) did not end cleanly, and its record "
            f"{earlier.record!r} belongs to another user; once none of its processes is left, "
            f"{free}"
        )
    if record.is_alive or record.claimed.place != place():
        raise ConfigError(f"{name} (pid {record.claimed.pid}): {STILL_RUNNING}")
    if num_left := record.end_marked():
        log.warning("leftovers.killed", run=earlier.run_id, num_processes=num_left)
    if record.end_marked():
        what = "processes of its last run cannot be killed"
        raise ConfigError(f"{name}: {what}; once they have ended, {free}")


def _remove(run: RunClaim) -> None:
    """Remove the record of a run that has ended."""
    if run.record:
        Path(run.record).unlink(missing_ok=True)
