"""A supervisor over real processes: it starts them in order, watches them, and leaves none
behind.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
import pytest

from rollmesh.core.run_state import RunState, read_record
from rollmesh.launch.folder import Pid
from rollmesh.launch.plan import ChildPlan, OnDeath

HERE = Path(__file__).parent
END_WITHIN_S = 60.0


class Mesh:
    """A run whose children behave as a test specifies."""

    def __init__(self, folder: Path, host: str) -> None:
        """`host` is `local` or `runner`: children are started here, or as on another node."""
        self.host = host
        self.folder = folder / "run"
        self.side_file = folder / "side"
        self._plans: list[ChildPlan] = []
        self._plans_path = folder / "plans.json"
        self._settings_path = folder / "settings.json"
        self._fifo_path = folder / "fifo"
        os.mkfifo(self._fifo_path)
        self._fifo = os.fdopen(os.open(self._fifo_path, os.O_RDWR), "r")
        self.process: subprocess.Popen[bytes] | None = None

    def add(self, role: str, behaviour: str, on_death: OnDeath, *needs: str, **more: Any) -> None:
        args = [sys.executable, str(HERE / "launch_child.py"), str(self._fifo_path)]
        args += [role, behaviour, str(self.side_file)]
        self.add_plan(
            ChildPlan(role=role, argv=tuple(args), on_death=on_death, needs=needs, **more)
        )

    def add_plan(self, plan: ChildPlan) -> None:
        self._plans.append(plan)

    def start(
        self, *wait_for: str, stop_timeout_s: float = 10 * END_WITHIN_S, **more: float
    ) -> None:
        """Start it with `more` of the settings, and wait until these children have reported."""
        launch = {"stop_timeout_s": stop_timeout_s, "ready_timeout_s": 10 * END_WITHIN_S, **more}
        run = {"name": self.folder.name, "folder": str(self.folder.parent)}
        self._plans_path.write_bytes(msgspec.json.encode(self._plans))
        self._settings_path.write_bytes(msgspec.json.encode({"run": run, "launch": launch}))
        args = [sys.executable, str(HERE / "launch_program.py")]
        args += [str(self.folder), str(self._plans_path), str(self._settings_path), self.host]
        self.process = subprocess.Popen(args, stdout=subprocess.PIPE, start_new_session=True)
        waiting = set(wait_for)
        while waiting:
            waiting.discard(self.next_line())

    def next_line(self) -> str:
        """The next line that a child wrote: its role, when it has reported."""
        return self._fifo.readline().strip()

    def pids(self) -> dict[str, int]:
        """The newest process of each role."""
        rows = msgspec.json.decode((self.folder / "pids.json").read_bytes(), type=list[Pid])
        return {row.role: row.pid for row in rows}

    def signal(self, number: int) -> None:
        assert self.process
        self.process.send_signal(number)

    def result(self) -> dict[str, Any]:
        """The result of the run; every process that it started has ended by then."""
        assert self.process
        out, _ = self.process.communicate(timeout=END_WITHIN_S)
        assert [pid for pid in self.pids().values() if psutil.pid_exists(pid)] == []
        result: dict[str, Any] = msgspec.json.decode(out)
        return result

    def close(self) -> None:
        self._fifo.close()
        if self.process:
            with self.process:  # closes its pipe and waits
                self.process.kill()


@pytest.fixture(params=["local", "runner"])
def mesh(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Mesh]:
    mesh = Mesh(tmp_path, request.param)
    yield mesh
    mesh.close()


def test_a_run_ends_in_success_when_its_goal_is_reached(mesh: Mesh) -> None:
    mesh.add("model", "done", OnDeath.NEXT)
    mesh.add("router", "serves", OnDeath.END, "model")
    mesh.add("trainer", "done", OnDeath.FINISH, "router")
    mesh.start()
    assert [mesh.next_line() for _ in range(3)] == ["model", "router", "trainer"]
    assert mesh.result() == {"end": {"code": 0, "reason": "done"}, "notes": []}
    assert list(mesh.pids()) == ["launch", "model", "router", "trainer"]


def test_a_gated_child_waits_until_its_gate_opens(mesh: Mesh) -> None:
    mesh.add("trainer", "done", OnDeath.FINISH, gate=("model",))
    mesh.add("model", "done", OnDeath.NEXT)
    mesh.start()
    assert [mesh.next_line() for _ in range(2)] == ["model", "trainer"]
    assert mesh.result()["end"]["code"] == 0
    assert list(mesh.pids()) == ["launch", "trainer", "model"]


def test_a_waiting_child_can_be_stopped(mesh: Mesh) -> None:
    mesh.add("model", "serves", OnDeath.NEXT)
    mesh.add("trainer", "saves", OnDeath.FINISH, gate=("model",))
    mesh.start("model")
    mesh.signal(signal.SIGINT)
    assert mesh.result()["end"] == {"code": 130, "reason": "stopped"}


def test_a_users_mistake_in_a_child_ends_the_run_with_its_line(mesh: Mesh) -> None:
    mesh.add("router", "serves", OnDeath.END)
    mesh.add("worker", "mistaken", OnDeath.RESTART, "router")
    mesh.start()
    assert mesh.result()["end"] == {"code": 2, "reason": "the key is wrong; correct it"}


def test_a_fault_in_a_child_ends_the_run_with_its_last_line(mesh: Mesh) -> None:
    mesh.add("router", "fails", OnDeath.END)
    mesh.start()
    reason = "router exited with code 1: ValueError: it broke"
    assert mesh.result()["end"] == {"code": 1, "reason": reason}
    assert (mesh.folder / "logs" / "router.out").read_text().endswith("it broke\n")
    record = read_record(mesh.folder)
    assert record
    assert (record.state, record.cause) == (RunState.FAILED, reason)


def test_a_program_that_cannot_be_started_ends_the_run_with_its_reason(mesh: Mesh) -> None:
    mesh.add("router", "serves", OnDeath.END)
    mesh.add_plan(ChildPlan(role="engine", argv=("/no/such/program",), on_death=OnDeath.END))
    mesh.start()
    reason = mesh.result()["end"]["reason"]
    assert reason.startswith("engine exited with code 1: it could not be started: [Errno 2]")


def test_a_run_whose_folder_is_removed_ends_in_order(mesh: Mesh) -> None:
    mesh.add("router", "serves", OnDeath.END)
    mesh.start("router")
    # Renamed, not removed file by file: a file that is being opened would keep its folder.
    mesh.folder.rename(mesh.folder.with_name("removed"))
    mesh.signal(signal.SIGINT)
    assert mesh.process
    out, _ = mesh.process.communicate(timeout=END_WITHIN_S)
    assert msgspec.json.decode(out)["end"] == {"code": 130, "reason": "stopped"}


def test_a_killed_worker_is_restarted(mesh: Mesh) -> None:
    mesh.add("worker", "serves", OnDeath.RESTART)
    mesh.start("worker")
    first = mesh.pids()["worker"]
    os.kill(first, signal.SIGKILL)
    assert mesh.next_line() == "worker"
    assert mesh.pids()["worker"] != first
    mesh.signal(signal.SIGTERM)
    result = mesh.result()
    assert result["notes"] == ["worker was killed by signal 9; restart in 0.5 s"]
    assert result["end"]["code"] == 130


@pytest.mark.slow
def test_a_suspended_process_is_restarted_and_a_busy_one_is_not(mesh: Mesh) -> None:
    mesh.add("trainer", "busy", OnDeath.FINISH)
    mesh.add("router", "serves", OnDeath.RESTART)
    mesh.start("trainer", "router", hang_timeout_s=15.0)
    first = mesh.pids()
    os.kill(first["router"], signal.SIGSTOP)
    assert mesh.next_line() == "router"  # nothing else ends it
    assert mesh.pids()["router"] != first["router"]
    assert mesh.pids()["trainer"] == first["trainer"]
    mesh.signal(signal.SIGTERM)
    shown, killed = mesh.result()["notes"]
    assert shown.startswith("router has not responded for ")
    assert killed == "router was killed: no heartbeat for 15 s; restart in 0.5 s"


def test_lack_of_memory_is_reported_as_the_cause(mesh: Mesh) -> None:
    mesh.add("worker", "exceeds_memory", OnDeath.RESTART)
    mesh.start("worker")
    assert mesh.next_line() == "worker"
    mesh.signal(signal.SIGTERM)
    note = mesh.result()["notes"][0]
    assert note == "worker ran out of memory: MemoryError; restart in 0.5 s"


def test_a_restarted_process_gets_the_address_of_its_predecessor(mesh: Mesh) -> None:
    more = {"bind": "127.0.0.1:0", "again": ("--bind", "{router}")}
    mesh.add("router", "serves", OnDeath.RESTART, **more)
    mesh.start("router")
    address = listening_address(mesh.pids()["router"])
    os.kill(mesh.pids()["router"], signal.SIGKILL)
    assert [mesh.next_line(), mesh.next_line()] == [address, "router"]
    assert listening_address(mesh.pids()["router"]) == address
    mesh.signal(signal.SIGTERM)
    mesh.result()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_stopped_run_lets_the_trainer_save_and_leaves_no_process(
    mesh: Mesh, number: signal.Signals
) -> None:
    mesh.add("router", "serves", OnDeath.END)
    mesh.add("trainer", "saves", OnDeath.FINISH, "router")
    mesh.start("router", "trainer")
    mesh.signal(number)
    assert mesh.result()["end"] == {"code": 130, "reason": "stopped"}
    assert mesh.side_file.read_text() == "saved"


def test_a_child_that_ignores_the_stop_signal_is_killed_in_time(mesh: Mesh) -> None:
    mesh.add("router", "ignores_stop", OnDeath.END)
    mesh.add("trainer", "ignores_stop", OnDeath.FINISH)
    mesh.start("router", "trainer", stop_timeout_s=1.0)
    mesh.signal(signal.SIGINT)
    assert mesh.result()["end"]["code"] == 130


def test_a_second_ctrl_c_kills_at_once(mesh: Mesh) -> None:
    mesh.add("trainer", "ignores_stop", OnDeath.FINISH)
    mesh.start("trainer")
    mesh.signal(signal.SIGINT)
    assert mesh.next_line() == "trainer got SIGTERM"
    mesh.signal(signal.SIGINT)
    # Long enough for `result`, and too short for a child to end by its own timeout.
    assert mesh.result()["end"] == {"code": 130, "reason": "stopped"}


def test_grandchildren_that_left_their_session_are_ended_too(mesh: Mesh) -> None:
    mesh.add("worker", "parent", OnDeath.RESTART)
    mesh.start("worker")
    grandchild = int(mesh.side_file.read_text())
    assert psutil.pid_exists(grandchild)
    mesh.signal(signal.SIGINT)
    mesh.result()
    assert not psutil.pid_exists(grandchild)


def test_a_daemon_does_not_outlive_the_worker_that_started_it(mesh: Mesh) -> None:
    mesh.add("worker", "starts_daemon", OnDeath.RESTART)
    mesh.start("worker")
    daemon = psutil.Process(int(mesh.side_file.read_text()))
    os.kill(mesh.pids()["worker"], signal.SIGKILL)
    assert mesh.next_line() == "worker"  # its successor starts when nothing is left of it
    assert has_ended(daemon)
    mesh.signal(signal.SIGTERM)
    mesh.result()


def test_a_daemon_does_not_outlive_a_launch_that_is_killed(mesh: Mesh) -> None:
    mesh.add("worker", "starts_daemon", OnDeath.RESTART)
    mesh.start("worker")
    pids = [mesh.pids()["worker"], int(mesh.side_file.read_text())]
    processes = [psutil.Process(pid) for pid in pids]
    mesh.signal(signal.SIGKILL)
    gone, left = psutil.wait_procs(processes, timeout=END_WITHIN_S)
    assert (set(gone), left) == (set(processes), [])


def test_children_die_with_a_launch_that_is_killed(mesh: Mesh) -> None:
    mesh.add("router", "ignores_stop", OnDeath.END)
    mesh.start("router")
    router = psutil.Process(mesh.pids()["router"])
    mesh.signal(signal.SIGKILL)
    gone, left = psutil.wait_procs([router], timeout=END_WITHIN_S)
    assert (gone, left) == ([router], [])


def test_a_child_serves_on_the_socket_that_launch_opened(mesh: Mesh) -> None:
    mesh.add("router", "serves", OnDeath.END, bind="127.0.0.1:0")
    mesh.start("router")
    address = listening_address(mesh.pids()["router"])
    assert httpx.get(f"{address}/status").json()["num_done"] == 3
    mesh.signal(signal.SIGTERM)
    mesh.result()


@pytest.mark.parametrize("mesh", ["local"], indirect=True)
def test_telemetry_has_every_process_and_the_routers_figures(mesh: Mesh) -> None:
    mesh.add("router", "serves", OnDeath.END, bind="127.0.0.1:0")
    mesh.start("router")
    row = first_row_with_router(mesh.folder / "telemetry.jsonl")
    assert row["router"] == {"workers": [], "num_done": 3}
    assert [each["role"] for each in row["processes"]] == ["launch", "router"]
    assert all(each["rss_bytes"] > 10**6 for each in row["processes"])
    mesh.signal(signal.SIGTERM)
    mesh.result()


def has_ended(process: psutil.Process) -> bool:
    """Whether the process has ended, even if no parent has reaped it yet."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def listening_address(pid: int) -> str:
    """The address on which the process listens."""
    [listening] = [c for c in psutil.Process(pid).net_connections() if c.status == "LISTEN"]
    return f"http://{listening.laddr.ip}:{listening.laddr.port}"


def first_row_with_router(path: Path) -> dict[str, Any]:
    """The first telemetry line in which the router answered."""
    command = ["tail", "-n", "+1", "-F", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as tail:
        assert tail.stdout
        for line in tail.stdout:
            row: dict[str, Any] = msgspec.json.decode(line)
            if row["router"]:
                tail.terminate()
                return row
    raise AssertionError("telemetry ended")
