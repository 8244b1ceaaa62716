"""The state of a mesh as plain values, read from a run folder or asked of a router.

A run or process that has ended is never shown as alive; see core/run_state.py.
"""

import contextlib
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import psutil

from rollmesh.cli.router_call import status_of
from rollmesh.core.run_state import ENDED, RunState, read_record
from rollmesh.core.tail import Tail
from rollmesh.dashboard.rows import ConfigRow, ProcessRow, RouterRow, StepRow, TelemetryRow
from rollmesh.dashboard.view import RunView
from rollmesh.launch.folder import Pid, read_addresses, read_pids, read_summary
from rollmesh.serve.client.evaluation_files import PLAN

EDGE_BYTES = 4 * 2**20
"""So much of a file's head and end is looked at; a telemetry line of 1,000 workers has 0.4 MB."""
SAME_PROCESS_S = 5.0
"""A process that began this much later than a recorded one has only its pid."""

Row = TypeVar("Row")


class RunStanding(msgspec.Struct, frozen=True):
    """The run as its folder tells it."""

    name: str
    phase: RunState
    cause: str
    """Why it failed or was killed."""
    resume: str
    """The command that resumes it, once it has ended before it was done; '' if unknown."""
    num_done: int
    """Train steps."""
    num_steps: int
    """0 in the mesh of an evaluation, which trains nothing."""
    reward: float | None
    """Mean over the rollouts of the last step."""
    reward_untrained: float | None
    success: float | None
    """Share of the rollouts of the last step; None where success is not known."""
    success_untrained: float | None
    policy_version: int | None
    max_age: int | None
    """Train steps since the oldest sample of the last step was sampled."""
    router_address: str
    """tcp://, which workers and clients dial; '' where none is there."""
    status_url: str
    """http://, the router's status address; '' where none is there."""
    summary: dict[str, Any]
    """summary.json, once the run has ended."""
    logs: str = ""
    """Folder of its processes' log files; '' where they log elsewhere."""


class Standing(msgspec.Struct, frozen=True):
    """All of it."""

    time_s: float | None
    """Unix time of the tables; None if there is none yet."""
    run: RunStanding | None
    """None where a router was asked."""
    router: RouterRow | None
    """Its workers, engines and queue; None if it never answered, or the run has ended."""
    processes: list[ProcessRow]
    """Those of the run that are alive."""
    quiet_s: float = 0.0
    """How old the tables are."""


def of_folder(folder: Path, unix_s: float) -> Standing:
    """How the run of this folder stands; however long it is, little of it is read."""
    view = _view_of(folder)
    told = view.last_telemetry
    status = view.status(unix_s)
    phase = status.state
    processes = _alive(phase, told, read_pids(folder))
    head, last = view.head(unix_s), view.learning()["last"] or {}
    step = last.get("step")
    is_over = phase in ENDED - {RunState.KILLED}
    is_eval = (folder.parent / PLAN).is_file()
    is_there = phase in (RunState.WAITING, RunState.RUNNING)
    ready = read_addresses(folder).get("router") if is_there else None
    run = RunStanding(
        name=folder.parent.name if is_eval else head["name"],
        phase=phase,
        cause=status.cause,
        resume=status.resume,
        num_done=0 if step is None else step + 1,
        num_steps=0 if is_eval else head["num_steps"],
        reward=last.get("reward"),
        reward_untrained=head["reward_untrained"],
        success=last.get("success"),
        success_untrained=head["success_untrained"],
        policy_version=last.get("policy_version"),
        max_age=last.get("max_age"),
        router_address=ready.address if ready else "",
        status_url=ready.http_address if ready else "",
        summary=read_summary(folder / "summary.json") if is_over else {},
        logs=str(logs) if (logs := folder / "logs").is_dir() else "",
    )
    router = told.router if told and not is_over else None
    if told is None:
        return Standing(None, run, router, processes)
    return Standing(told.time_s, run, router, processes, max(0.0, unix_s - told.time_s))


def of_router(address: str, unix_s: float, run: Path | None = None) -> Standing:
    """Return the router's report, asked at either address; AddressError, one line, without one."""
    return Standing(unix_s, None, status_of(address, run), [])


def _view_of(folder: Path) -> RunView:
    """The picture that the first and last lines of the run's files make."""
    view = RunView()
    view.config = next(_rows([_content(folder / "config.json")], ConfigRow), view.config)
    view.record = read_record(folder)
    metrics, telemetry = folder / "metrics.jsonl", folder / "telemetry.jsonl"
    first = (row for row in _rows(_head(metrics), StepRow) if row.reward_untrained is not None)
    last = (row for row in _rows(_end(metrics), StepRow) if row.step is not None and row.step >= 0)
    for step in (next(first, None), next(last, None)):
        if step:
            view.add_step(step)
    if now := next(_rows(_end(telemetry), TelemetryRow), None):
        view.add_telemetry(now)
    return view


def _head(path: Path) -> Iterable[bytes]:
    return (line.data for line in Tail(path, EDGE_BYTES).read())


def _end(path: Path) -> Iterable[bytes]:
    """The last lines, newest first."""
    return (line.data for line in reversed(Tail(path, EDGE_BYTES, EDGE_BYTES).read()))


def _rows(lines: Iterable[bytes], row_type: type[Row]) -> Iterator[Row]:
    """Those that fit."""
    for line in lines:
        with contextlib.suppress(msgspec.MsgspecError):
            yield msgspec.json.decode(line, type=row_type)


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _alive(phase: RunState, told: TelemetryRow | None, pids: list[Pid]) -> list[ProcessRow]:
    """The processes of the run that are alive; on this machine each is checked."""
    processes = told.processes if told else []
    here = socket.gethostname()
    ours = {row.pid: row for row in pids if row.host == here}
    if ours:
        alive = {pid for pid, row in ours.items() if _is_alive(row)}
        return [row for row in processes if row.pid in alive]
    return processes if phase is RunState.RUNNING else []


def _is_alive(row: Pid) -> bool:
    try:
        process = psutil.Process(row.pid)
        is_same = process.create_time() < row.started_s + SAME_PROCESS_S
        return is_same and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
