"""The state of a mesh as plain values, read from a run folder or from a router.

- A run or process that has ended is never reported as alive; see core/run_state.py.
- A router is asked at either of its addresses: tcp://host:port, to which workers and clients
  connect, or http://host:port, which serves its status.
- A folder is a run folder only if its config.json holds our settings: a model's folder has a file
  of the same name.
"""

import contextlib
import socket
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import httpx
import msgspec
import psutil

from rollmesh.core.addresses import facing
from rollmesh.core.errors import AddressError, UserError
from rollmesh.core.files import FileTail
from rollmesh.core.ids import new_id
from rollmesh.core.run_state import ENDED, EVAL_MESH, RunState, read_record
from rollmesh.core.secret_files import ADMIN_TOKEN_VARIABLE, admin_token
from rollmesh.dashboard.rows import (
    ConfigRow,
    ProcessRow,
    RouterRow,
    RunSection,
    StepRow,
    TelemetryRow,
)
from rollmesh.dashboard.view import RunView
from rollmesh.launch.folder import Pid, read_addresses, read_pids, read_summary
from rollmesh.serve.client.evaluation_files import PLAN
from rollmesh.wire.fleet import (
    AddEngine,
    DropEngine,
    EnginesListed,
    FleetAnswered,
    ListEngines,
)
from rollmesh.wire.frames import Packet
from rollmesh.wire.keys import Role, find_keys
from rollmesh.wire.messages import AddressesAnswered, AskAddresses, AskDrain, DrainAnswered
from rollmesh.wire.sockets import Dialer, check_admitted, wait

SETTINGS = "config.json"


class _Settings(msgspec.Struct, frozen=True):
    """The part of the settings that identifies a run folder."""

    run: RunSection


def newest(runs: Path) -> Path:
    """Return the newest run folder; UserError if there is none."""
    return all_runs(runs)[0]


def all_runs(runs: Path) -> list[Path]:
    """Return the run folders in `runs`, the newest first; UserError if there is none."""
    folders = (path.parent for path in runs.glob(f"*/{SETTINGS}"))
    begun = {each: (each / SETTINGS).stat().st_mtime for each in folders if _is_run(each)}
    if not begun:
        raise UserError(f"{runs}: contains no runs; name a run folder")
    return sorted(begun, key=lambda folder: begun[folder], reverse=True)


def run_folder(named: Path | None) -> Path:
    """Return the named run folder, or an evaluation's mesh folder; UserError if it is not one."""
    folder = named or newest(Path("runs"))
    if (folder / PLAN).is_file():
        folder = folder / EVAL_MESH
        if not folder.exists():
            raise UserError(f"{folder.parent}: runs on an existing mesh; name that by --router")
    if not _is_run(folder):
        raise UserError(f"{folder}: not a run folder; runs are in runs/NAME")
    return folder


def page_folder(named: Path) -> Path:
    """Return the folder whose dashboard is meant: an evaluation's own, else that of
    `run_folder`.
    """
    return named if (named / PLAN).is_file() else run_folder(named)


def _is_run(folder: Path) -> bool:
    try:
        msgspec.json.decode((folder / SETTINGS).read_bytes(), type=_Settings)
    except (OSError, msgspec.MsgspecError):
        return False
    return True


ANSWER_S = 3.0
REPEAT_S = 0.5

Answer = TypeVar("Answer", AddressesAnswered, DrainAnswered, EnginesListed, FleetAnswered)


def check_router(address: str) -> None:
    """Raise AddressError if it is neither a router address nor a status address."""
    if not address.startswith(("tcp://", "http://", "https://")):
        raise AddressError(
            f"--router {address}: not an address of a router, tcp://HOST:PORT or "
            "http://HOST:PORT; `rollmesh status` prints both"
        )


def status_of(address: str, run: Path | None = None) -> RouterRow:
    """Return the status of the router at either address; AddressError if it does not answer."""
    check_router(address)
    if address.startswith("tcp://"):
        answer = send_request(address, AskAddresses(1), AddressesAnswered, run)
        return _get(facing(answer.status_url, address), asked=address)
    return _get(address.rstrip("/"), asked=address)


def router_address(address: str) -> str:
    """Return the tcp:// address of the router at either address."""
    check_router(address)
    if address.startswith("tcp://"):
        return address
    if found := status_of(address).address:
        return facing(found, address)
    raise AddressError(f"--router {address}: does not report its tcp:// address; name that one")


class OperatorConnection:
    """A connection to a router with the operator's key; it survives a restart of the router."""

    def __init__(self, router: str, run: Path | None = None) -> None:
        """`run` is the run folder whose keys are used; see find_keys. AddressError if they are
        refused."""
        keys = find_keys(router, Role.OPERATOR, run)
        check_admitted(router, keys)
        self._router = router
        self._dialer = Dialer(router, new_id("verb"), keys)

    def ask(
        self,
        message: AskAddresses | AskDrain | AddEngine | DropEngine | ListEngines,
        kind: type[Answer],
    ) -> Answer:
        """Return the router's answer, of type `kind`; AddressError if there is none in time.

        The request is repeated until then; one that the router repeats changes nothing.
        """
        end_s = time.monotonic() + ANSWER_S
        while time.monotonic() < end_s:
            self._dialer.send(Packet(message))
            wait([self._dialer], None, REPEAT_S)
            for packet in self._dialer.receive():
                answer = packet.message
                if isinstance(answer, kind) and answer.ask_id == message.ask_id:
                    return answer
        raise AddressError(
            f"{self._router}: no answer from a router within {ANSWER_S:g} s; "
            "check its address and our keys"
        )

    def close(self) -> None:
        self._dialer.close()


def send_request(
    router: str, message: AskAddresses | AskDrain, kind: type[Answer], run: Path | None = None
) -> Answer:
    """Return the router's answer to one request; see OperatorConnection."""
    with contextlib.closing(OperatorConnection(router, run)) as connection:
        return connection.ask(message, kind)


def _get(url: str, asked: str) -> RouterRow:
    where = f"--router {asked}" if url == asked.rstrip("/") else f"--router {asked} ({url})"
    token = admin_token()
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        reply = httpx.get(f"{url}/status", headers=headers, timeout=ANSWER_S)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise AddressError(f"{where}: does not answer: {error}") from None
    if reply.status_code == httpx.codes.UNAUTHORIZED:
        raise AddressError(f"{where}: needs a token; set {ADMIN_TOKEN_VARIABLE}")
    try:
        router = msgspec.json.decode(reply.content, type=RouterRow)
    except msgspec.MsgspecError:
        router = None
    if reply.status_code != httpx.codes.OK or router is None:
        raise AddressError(f"{where}: is not a router (status {reply.status_code})")
    return router


EDGE_BYTES = 4 * 2**20
"""Size of a file's head and tail that is read; a telemetry line of 1,000 workers has 0.4 MB."""
SAME_PROCESS_S = 5.0
"""A process that started this much later than the recorded one only reuses its pid."""

Row = TypeVar("Row")


class RunReport(msgspec.Struct, frozen=True):
    """The state of a run, by its folder."""

    name: str
    phase: RunState
    cause: str
    """Why it failed or was killed."""
    resume: str
    """The command that resumes it, if it ended before it was done; '' if unknown."""
    num_done: int
    """Completed train steps."""
    num_steps: int
    """0 for the mesh of an evaluation."""
    reward: float | None
    """Mean over the rollouts of the last step."""
    reward_untrained: float | None
    success: float | None
    """Share of the rollouts of the last step; None if success is not known."""
    success_untrained: float | None
    policy_version: int | None
    max_age: int | None
    """Train steps since the oldest sample of the last step was sampled."""
    router_address: str
    """tcp:// address for workers and clients; '' without a router."""
    status_url: str
    """http:// address of the router's status; '' without a router."""
    summary: dict[str, Any]
    """summary.json, once the run has ended."""
    logs: str = ""
    """Folder of its processes' log files; '' if there is none."""


class MeshReport(msgspec.Struct, frozen=True):
    """The state of a mesh."""

    time_s: float | None
    """Unix time of the tables; None if there are none yet."""
    run: RunReport | None
    """None if a router was asked."""
    router: RouterRow | None
    """Workers, engines and queue; None if the router never answered, or the run has ended."""
    processes: list[ProcessRow]
    """The run's processes that are alive."""
    quiet_s: float = 0.0
    """Age of the tables."""


def report_of_folder(folder: Path, unix_s: float) -> MeshReport:
    """Return the state of a folder's run, reading only the ends of its files."""
    view = _view_of(folder)
    telemetry_row = view.last_telemetry
    status = view.status(unix_s)
    phase = status.state
    processes = _alive(phase, telemetry_row, read_pids(folder))
    head, last = view.head(unix_s), view.learning()["last"] or {}
    step = last.get("step")
    is_over = phase in ENDED - {RunState.KILLED}
    is_eval = (folder.parent / PLAN).is_file()
    is_there = phase in (RunState.WAITING, RunState.RUNNING)
    ready = read_addresses(folder).get("router") if is_there else None
    run = RunReport(
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
    router = telemetry_row.router if telemetry_row and not is_over else None
    if telemetry_row is None:
        return MeshReport(None, run, router, processes)
    return MeshReport(
        telemetry_row.time_s, run, router, processes, max(0.0, unix_s - telemetry_row.time_s)
    )


def report_of_router(address: str, unix_s: float, run: Path | None = None) -> MeshReport:
    """Return the state that the router at either address reports; AddressError if it does not
    answer.
    """
    return MeshReport(unix_s, None, status_of(address, run), [])


def _view_of(folder: Path) -> RunView:
    """Fold the first and last lines of the run's files."""
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
    return (line.data for line in FileTail(path, EDGE_BYTES).read())


def _end(path: Path) -> Iterable[bytes]:
    """Yield the last lines, newest first."""
    return (line.data for line in reversed(FileTail(path, EDGE_BYTES, EDGE_BYTES).read()))


def _rows(lines: Iterable[bytes], row_type: type[Row]) -> Iterator[Row]:
    """Yield the lines that parse as rows."""
    for line in lines:
        with contextlib.suppress(msgspec.MsgspecError):
            yield msgspec.json.decode(line, type=row_type)


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _alive(
    phase: RunState, telemetry_row: TelemetryRow | None, pids: list[Pid]
) -> list[ProcessRow]:
    """Return the processes of the run that are alive; those on this machine are checked."""
    processes = telemetry_row.processes if telemetry_row else []
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
