"""A fleet on an address that other hosts can reach: members with the keys connect, others do
not.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import msgspec
import psutil
import pytest

from rollmesh.core.errors import AddressError
from rollmesh.core.ids import new_id
from rollmesh.scheduler.admission.transport import ask_admission, ask_scheduler
from rollmesh.scheduler.service.explain import FleetExplanation
from rollmesh.serve.coordinator.hooks import PipelineHooks
from rollmesh.wire.keys import KEYS_VARIABLE, new_keys
from rollmesh.wire.scheduling import AdmitPipeline, GpuPriority, ReadScheduler
from tests.ports import free_ports

ENDS_WITHIN_S = 100.0
REFUSED_S = 3.0
CLI = (sys.executable, "-m", "rollmesh.cli.main")
FLEET = """
bind = "tcp://{host}:{0}"
http_bind = "127.0.0.1:{1}"
journal = "{folder}/scheduler"

[[nodes]]
name = "here"
gpus = 4

[pipelines.math]
clusters.actor_train = [0, 1]
generation = [0, 1, 2, 3]
"""


def own_address() -> str:
    """An address of this machine; not loopback if it has another."""
    addresses = [each for card in psutil.net_if_addrs().values() for each in card]
    found = [each.address for each in addresses if each.family is socket.AF_INET]
    return next((each for each in found if not each.startswith("127.")), "127.0.0.1")


class KeyedFleet:
    """`rollmesh scheduler up` with a key file."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.host = folder, own_address()
        self._ports = free_ports(2)
        self.address = f"tcp://{self.host}:{self._ports[0]}"
        self.admission = folder / "scheduler" / "admission.sock"
        self.keys = folder / "keys"
        new_keys(self.keys)
        self._stack = ExitStack()
        self._up: subprocess.Popen[bytes] | None = None

    def up(self) -> None:
        file = self.folder / "scheduler.toml"
        file.write_text(FLEET.format(*self._ports, host=self.host, folder=self.folder))
        self._up = self.start(*CLI, "scheduler", "up", str(file))
        assert self._up.stdout
        assert (
            b"math: " in self._up.stdout.readline()
        )  # it is registered, by admission and the service

    def down(self) -> None:
        assert self._up
        self._up.terminate()
        assert self._up.wait(ENDS_WITHIN_S) == 0

    def start(self, *command: str) -> subprocess.Popen[bytes]:
        process = self._stack.enter_context(
            subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
        )
        self._stack.callback(_end, process)
        return process

    def seen(self, patience_s: float = ENDS_WITHIN_S) -> FleetExplanation:
        answer = ask_scheduler(self.address, ReadScheduler(new_id("read")), patience_s=patience_s)
        return msgspec.json.decode(answer.body, type=FleetExplanation)

    def close(self) -> None:
        self._stack.close()


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KeyedFleet]:
    fleet = KeyedFleet(tmp_path)
    monkeypatch.setenv(KEYS_VARIABLE, str(fleet.keys))
    fleet.up()
    yield fleet
    fleet.close()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_members_with_the_keys_are_admitted(fleet: KeyedFleet) -> None:
    """Service, admission, agent, coordinator and hooks all accept the keys."""
    args = ("--scheduler", fleet.address, "--name", "b", "--gpus", "2")
    fleet.start(*CLI, "scheduler", "agent", *args)
    command = (sys.executable, "-m", "rollmesh.testing.pipeline", "--pipeline", "math")
    token = str(fleet.folder / "scheduler" / "tokens" / "math")
    run = fleet.start(
        *command, "--scheduler", fleet.address, "--pipeline-token", token, "--steps", "2"
    )
    assert run.stdout
    assert len(run.stdout.readlines()) == 3  # two steps, and the end
    assert run.wait(ENDS_WITHIN_S) == 0
    assert ask_admission(fleet.admission, AdmitPipeline(new_id("k"), "math")).ok
    while {node.name for node in fleet.seen().nodes} != {"here", "b"}:
        threading.Event().wait(0.2)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_other_keys_or_none_are_reported_as_an_error(
    fleet: KeyedFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = fleet.seen()
    other = fleet.folder / "other"
    new_keys(other)
    monkeypatch.setenv(KEYS_VARIABLE, str(other))
    with pytest.raises(AddressError, match=f"{fleet.address}: no answer .* our keys are right"):
        ask_scheduler(fleet.address, AdmitPipeline("k", "unknown"), patience_s=REFUSED_S)
    with closing(PipelineHooks(fleet.address, "math")) as hooks:
        assert not hooks.request_gpus("actor_train", GpuPriority.ACTOR_TRAINING).wait(
            timeout_s=REFUSED_S
        )
    monkeypatch.delenv(KEYS_VARIABLE)
    if fleet.host != "127.0.0.1":
        with pytest.raises(AddressError, match=f"need keys; set {KEYS_VARIABLE}"):
            fleet.seen()
        with pytest.raises(AddressError, match=f"need keys; set {KEYS_VARIABLE}"):
            PipelineHooks(fleet.address, "math")
    monkeypatch.setenv(KEYS_VARIABLE, str(fleet.keys))
    assert fleet.seen().pipelines[0].waits == before.pipelines[0].waits == ()


@pytest.mark.timeout(300)
def test_replaced_keys_apply_after_a_restart(
    fleet: KeyedFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, old = fleet.seen(), fleet.folder / "old"
    fleet.down()
    fleet.keys.rename(old)
    new_keys(fleet.keys)
    fleet.up()
    after = fleet.seen()
    assert after.scheduler != before.scheduler
    assert (after.nodes, after.num_free) == (before.nodes, before.num_free)
    monkeypatch.setenv(KEYS_VARIABLE, str(old))
    with pytest.raises(AddressError, match=r"no answer .* our keys are right"):
        fleet.seen(REFUSED_S)
