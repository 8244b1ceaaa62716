"""Admission process: registers pipelines where they fit, admits, kills and removes them.

- It keeps no state: each question is answered from what the scheduler reports at that moment, so
  that kill -9 loses at most one question, which its caller repeats with the same key.
- A pipeline is registered only on existing GPUs; registered again, it keeps its place.
- Processes are killed only after the scheduler has agreed, and only those of the run that has the
  pipeline's name there: its launch, by pid and start time, and the processes with the mark in the
  record of that launch. Only the record's owner and root may have a run killed. Its GPUs are free
  only when all of them have ended.
"""

import os
import select
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from rollmesh.core.errors import (
    DECODE_ERRORS,
    AddressError,
    ConfigError,
    RollmeshError,
    UserError,
    WireError,
)
from rollmesh.core.ids import new_id
from rollmesh.core.logs import Occasional, get_logger, setup
from rollmesh.core.process import Ready, Stop, announce
from rollmesh.core.secret_files import hash_token, read_or_make_secret
from rollmesh.core.share import TOKENS, StoredClaim, is_same_machine, read_claim, uid_of
from rollmesh.core.share import place as this_machine
from rollmesh.scheduler.admission.fleet_file import NAME_RULE, PipelineTable, is_valid_name
from rollmesh.scheduler.admission.transport import (
    AdmissionAnswer,
    AdmissionConnection,
    AdmissionSocket,
    SchedulerQuestion,
    ask_scheduler,
)
from rollmesh.scheduler.planning.placement import Placement, PlacementRequest, check, place
from rollmesh.scheduler.planning.state import FleetState, GpuNode, NodePhase, PipelinePhase
from rollmesh.wire.frames import Buffer, Packet
from rollmesh.wire.scheduling import (
    AdmissionMessage,
    CheckKill,
    KillPipeline,
    PipelineSpec,
    ReadScheduler,
    RegisterPipeline,
    RunClaim,
    SchedulerAnswered,
    UnregisterPipeline,
    signed,
)
from rollmesh.wire.sockets import WakeSignal

OPERATOR_TOKEN = "admission.token"
AskScheduler = Callable[[SchedulerQuestion, float], AdmissionAnswer]
"""Ask the scheduler, waiting this many seconds; AddressError if it does not answer."""
SCHEDULER_PATIENCE_S = 5.0
LEAVE_S = 1.0
"""Seconds to wait for a pipeline to leave; its engines must sleep first, for which admission does
not wait."""
LEAVING = b'"leaving"'
"""Answer body for a pipeline that has not left yet."""
DEAD = b'"dead"'
"""Body of a KillPipeline that kills no process: the user knows that all have ended."""
_Body = TypeVar("_Body")


class NodeSnapshot(msgspec.Struct, frozen=True):
    """State of a node, as placement reads it."""

    name: str
    gpus: tuple[int, ...]
    labels: tuple[str, ...]
    phase: NodePhase


class PipelineSnapshot(msgspec.Struct, frozen=True):
    """State of a pipeline, as placement reads it."""

    spec: PipelineSpec
    phase: PipelinePhase
    run: RunClaim | None = None


class FleetSnapshot(msgspec.Struct, frozen=True):
    """Part of the scheduler's answer to ReadScheduler that admission uses."""

    nodes: tuple[NodeSnapshot, ...]
    pipelines: tuple[PipelineSnapshot, ...]

    def state(self) -> FleetState:
        """A planner state with the placements only."""
        state = FleetState()
        for node in self.nodes:
            state.add_node(
                GpuNode(name=node.name, gpus=node.gpus, labels=node.labels, phase=node.phase)
            )
        for pipeline in self.pipelines:
            state.add_pipeline(pipeline.spec)
        return state


class Registered(msgspec.Struct, frozen=True):
    """Body of the answer to a registration."""

    spec: PipelineSpec
    """With its GPUs."""
    token_file: str
    """File with its token, which its runs need; readable by admission's user."""


class TokenFiles:
    """Token files in the journal's folder, 0600 in folders 0700."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.absolute()

    def operator_token(self) -> str:
        """Token shared by admission and the scheduler's service; created if missing."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return read_or_make_secret(self._folder / OPERATOR_TOKEN)

    def token_file(self, pipeline_id: str) -> Path:
        """Path of a pipeline's token file, in an existing folder."""
        folder = self._folder / TOKENS
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return folder / pipeline_id


class AdmissionServer:
    def __init__(self, ask: AskScheduler, secrets: TokenFiles) -> None:
        self._ask_unsigned = ask
        self._secrets = secrets

    def _ask(self, question: SchedulerQuestion, patience_s: float) -> AdmissionAnswer:
        return self._ask_unsigned(signed(question, self._secrets.operator_token()), patience_s)

    def on(self, message: AdmissionMessage, body: Buffer, uid: int) -> AdmissionAnswer:
        """Answer a message of a caller with this user id; UserError for the caller's mistake."""
        match message:
            case RegisterPipeline():
                return self._register(message, body)
            case KillPipeline():
                return self._kill(message, body, uid)
            case UnregisterPipeline():
                return self._unregister(message)
            case _:
                return self._ask(message, SCHEDULER_PATIENCE_S)

    def _register(self, message: RegisterPipeline, body: Buffer) -> AdmissionAnswer:
        """Register the spec, or the table in the body; the answer's body is a Registered."""
        state = self._seen().state()
        spec = message.spec
        if not is_valid_name(spec.pipeline_id):
            raise ConfigError(f"pipeline {spec.pipeline_id!r}: {NAME_RULE}")
        before = state.pipelines.pop(spec.pipeline_id, None)
        if body:
            table = _decoded(body, PipelineTable)
            spec = place_pipeline(spec.pipeline_id, table, state, before.spec if before else None)
        check(spec, state)
        file = self._secrets.token_file(spec.pipeline_id)
        token_hash = hash_token(read_or_make_secret(file))
        answer = self._ask(
            RegisterPipeline(message.key, spec, token_hash=token_hash), SCHEDULER_PATIENCE_S
        )
        return msgspec.structs.replace(
            answer, body=msgspec.json.encode(Registered(spec, str(file)))
        )

    def _kill(self, message: KillPipeline, body: Buffer, uid: int) -> AdmissionAnswer:
        """Kill the processes of its run, then free its GPUs; the answer's body is the number of
        processes."""
        name, is_dead = message.pipeline_id, bytes(body) == DEAD
        seen = self._seen(name)
        run = next((each.run for each in seen.pipelines if each.spec.pipeline_id == name), None)
        if run is None and not is_dead:
            raise ConfigError(
                f"no run has the name {name}, so there is no process to kill; end what uses its "
                "GPUs by hand, then pass --dead"
            )
        run_id = run.run_id if run else ""
        allowed = self._ask(CheckKill(new_id("check"), name, run_id), SCHEDULER_PATIENCE_S)
        if not allowed.ok:
            return allowed
        num = kill_run(run, name, uid) if run and not is_dead else 0
        answer = self._ask(KillPipeline(message.key, name, run_id), SCHEDULER_PATIENCE_S)
        return msgspec.structs.replace(answer, body=msgspec.json.encode(num))

    def _unregister(self, message: UnregisterPipeline) -> AdmissionAnswer:
        """Let it leave; if that takes longer, the scheduler completes it."""
        try:
            return self._ask(message, LEAVE_S)
        except AddressError:
            name = message.pipeline_id
            phases = {each.spec.pipeline_id: each.phase for each in self._seen().pipelines}
            if phases.get(name) is PipelinePhase.LEAVING:
                return AdmissionAnswer(ok=True, body=LEAVING)
            raise

    def _seen(self, pipeline_id: str = "") -> FleetSnapshot:
        answer = self._ask(ReadScheduler(new_id("read"), pipeline_id), SCHEDULER_PATIENCE_S)
        if not answer.ok:
            raise UserError(answer.error)
        return _decoded(answer.body, FleetSnapshot)


def place_pipeline(
    pipeline_id: str, table: PipelineTable, others: FleetState, before: PipelineSpec | None = None
) -> PipelineSpec:
    """Spec of a table with GPU numbers; a registered pipeline that still fits the table keeps its
    GPUs.

    One-line UserError if it does not fit.
    """
    if before and _is_met(table, before):
        return _spec_of(pipeline_id, table, Placement(before.clusters, before.generation))
    wish = PlacementRequest(
        pipeline_id=pipeline_id,
        clusters=table.clusters,
        generation=table.generation or table.workers,
        tp=table.tp,
        labels=table.labels,
    )
    return _spec_of(pipeline_id, table, place(wish, others))


def _is_met(table: PipelineTable, spec: PipelineSpec) -> bool:
    """Whether its current GPUs are what the table requests."""
    generation = table.generation or table.workers * table.tp
    has_all = table.clusters.keys() == spec.clusters.keys() and table.tp == spec.tp
    return has_all and all(
        len(gpus) == wanted if isinstance(wanted, int) else gpus == wanted
        for wanted, gpus in (
            (generation, spec.generation),
            *((table.clusters[name], gpus) for name, gpus in spec.clusters.items()),
        )
    )


def _spec_of(pipeline_id: str, table: PipelineTable, places: Placement) -> PipelineSpec:
    return PipelineSpec(
        pipeline_id=pipeline_id,
        clusters=places.clusters,
        generation=places.generation,
        tp=table.tp,
        weight=table.weight,
        max_gpus=table.max_gpus,
        min_gpus=table.min_gpus,
        is_preemptible=table.preemptible,
        rollouts_per_worker=table.rollouts_per_worker,
    )


def _decoded(body: Buffer, kind: type[_Body]) -> _Body:
    try:
        return msgspec.json.decode(body, type=kind)
    except DECODE_ERRORS as error:
        raise ConfigError(f"malformed admission request: {error}") from None


GONE_MS = 10_000


def kill_run(run: RunClaim, pipeline_id: str, caller_uid: int) -> int:
    """Kill the launch of `run` and all processes that carry its mark with SIGKILL; return how many
    there were.

    UserError if the run is on another machine, its record cannot be trusted, `caller_uid` may not
    kill it, or a process does not end.
    """
    if not is_same_machine(run.place, this_machine()):
        raise UserError(
            f"pid {run.pid} is on {run.host}, and the admission process on "
            f"{socket.gethostname()}, or in another container; end it there, then pass --dead"
        )
    try:
        record = read_claim(run.record, run.run_id, pipeline_id)
    except ConfigError as error:
        raise ConfigError(
            f"the run of {pipeline_id} (pid {run.pid}): {error}; end it by hand, then pass --dead"
        ) from None
    _check_caller(record, caller_uid)
    num = _end_launch(record) + record.end_marked()
    if record.end_marked():
        raise UserError(
            f"processes of {pipeline_id} do not end; its GPUs stay its own until they have"
        )
    return num


def _check_caller(record: StoredClaim, caller_uid: int) -> None:
    """UserError if the caller may not kill the run, or this process is its launch."""
    pid = record.claimed.pid
    if caller_uid not in (0, record.uid):
        raise UserError(
            f"pid {pid} is of user {record.uid}: user {caller_uid} may not end it; ask that user, "
            "or root"
        )
    if not is_same_machine(record.claimed.place, this_machine()) or pid == os.getpid():
        raise UserError(f"the record of pid {pid} is not of a run of this machine")


def _end_launch(record: StoredClaim) -> int:
    """Kill the launch with SIGKILL if it still runs; return how many that are."""
    pid = record.claimed.pid
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:  # it has ended
        return 0
    try:
        is_owners = record.uid in (0, uid_of(pid))
        if not record.is_alive or not is_owners:  # the pid is another process's by now
            return 0
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        ended = select.poll()
        ended.register(descriptor, select.POLLIN)
        if not ended.poll(GONE_MS):
            raise UserError(f"pid {pid} does not end; its GPUs stay its own until it has")
    except ProcessLookupError:
        return 0
    finally:
        os.close(descriptor)
    return 1


log = get_logger()
_strangers = Occasional()

IDLE_S = 1.0


def run_admission(path: Path, scheduler: str, journal: Path, ready_fd: int | None) -> None:
    """Answer at the unix socket `path` for that scheduler until SIGTERM or SIGINT.

    Tokens are in the folder of the scheduler's `journal`. AddressError if another process listens
    at `path`.
    """
    try:
        listener = AdmissionSocket(path)
    except AddressError as error:
        raise AddressError(f"admission = {error}") from None
    setup("admission", None)
    bell = WakeSignal()
    stop = Stop(bell.ring)

    def ask(question: SchedulerQuestion, patience_s: float) -> AdmissionAnswer:
        return ask_scheduler(scheduler, question, patience_s=patience_s)

    server = AdmissionServer(ask, TokenFiles(journal))
    announce(ready_fd, Ready("admission", os.getpid(), str(listener.path)))
    log.info("admission.started", address=str(listener.path), scheduler=scheduler)
    while not stop.is_asked:
        select.select([listener.fileno(), bell.fileno()], [], [], IDLE_S)
        bell.hush()
        serve_waiting(listener, server)
    listener.close()
    log.info("admission.stopped")


def serve_waiting(listener: AdmissionSocket, server: AdmissionServer) -> None:
    """Answer the callers that wait."""
    for caller in listener.callers():
        _serve(caller, server)


def _serve(caller: AdmissionConnection, server: AdmissionServer) -> None:
    try:
        packet = caller.question()
    except WireError as error:
        log.debug("question.malformed", why=str(error))
        return
    question = packet.message
    if not isinstance(question, AdmissionMessage):
        return
    if caller.uid in (0, os.geteuid()):
        answer = _tried(server, question, packet.body, caller.uid)
    else:
        answer = AdmissionAnswer(
            ok=False,
            error=f"user {caller.uid} may not use admission; only its own user and root may",
        )
    kind = type(question).__name__
    is_member = caller.uid in (0, os.geteuid())
    if is_member or (number := _strangers.number(caller.uid)):
        more = {} if is_member else {"number": number}
        log.info("question.answered", kind=kind, uid=caller.uid, error=answer.error, **more)
    reply = SchedulerAnswered(question.key, answer.ok, answer.error)
    caller.answer(Packet(reply, body=answer.body))


def _tried(
    server: AdmissionServer, question: AdmissionMessage, body: Buffer, uid: int
) -> AdmissionAnswer:
    try:
        return server.on(question, body, uid)
    except RollmeshError as error:
        return AdmissionAnswer(ok=False, error=str(error))
    except Exception as error:  # door: one question must not end the process
        log.exception("question.failed", kind=type(question).__name__)
        return AdmissionAnswer(ok=False, error=f"admission failed: {error!r}")
