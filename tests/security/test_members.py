"""Another user of the machine is not part of a mesh, and a member may do what its role allows."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from rollmesh.core.ids import GroupId
from rollmesh.launch.folder import read_addresses
from rollmesh.wire.fleet import (
    AddEngine,
    BeginUpdate,
    DropEngine,
    EnginesListed,
    FleetAnswered,
    JoinEngine,
    ListEngines,
    ReadFleet,
)
from rollmesh.wire.frames import Packet
from rollmesh.wire.header import Message
from rollmesh.wire.keys import Keys, Role, add_member, read_key_file, remove_member
from rollmesh.wire.messages import (
    AddressesAnswered,
    AskAddresses,
    AskDrain,
    CancelGroup,
    DrainAnswered,
    RouterHello,
    WorkerBeat,
    WorkerHello,
    WorkerLeft,
)
from rollmesh.wire.sockets import Dialer, refusal, wait

CLI = (sys.executable, "-m", "rollmesh.cli.main")
STARTS_WITHIN_S = 150.0
SILENT_S = 1.5
STRANGER = """
import json, os, sys
from rollmesh.core.ids import GroupId
from rollmesh.wire.fleet import *
from rollmesh.wire.frames import Packet
from rollmesh.wire.keys import keys_of_run
from rollmesh.wire.keys import Role
from rollmesh.wire.messages import *
from rollmesh.wire.sockets import Dialer, wait
from pathlib import Path
import time
router, run = sys.argv[1:]
os.setgroups([]); os.setgid(65534); os.setuid(65534)
try:
    has_keys = keys_of_run(Path(run), Role.OPERATOR) is not None
except Exception:
    has_keys = False
received = set()
for message in (
    ReadFleet(1),
    JoinEngine(2, "http://127.0.0.1:9"),
    AddEngine(5, "http://127.0.0.1:9"),
    DropEngine(6, "http://127.0.0.1:9"),
    ListEngines(7),
    ClientLeft("c"),
    CancelGroup(GroupId("r", 0), "mine"),
    AskDrain(3, "worker-0", "mine"),
    WorkerHello("mallory", "guess", 10_000, os.getpid(), "here"),
    AskAddresses(4),
):
    dialer = Dialer(router, "stranger")
    dialer.send(Packet(message))
    end_s = time.monotonic() + 1.5
    while time.monotonic() < end_s:
        wait([dialer], None, 0.1)
        received |= {type(packet.message).__name__ for packet in dialer.receive()}
        if received and run == "none":
            break
    dialer.close()
print(json.dumps({"has_keys": has_keys, "received": sorted(received)}))
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user"),
]


def end(process: "subprocess.Popen[Any]") -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def strange(router: str, run: str) -> dict[str, Any]:
    """The router's answers to another user of this machine."""
    command = (sys.executable, "-c", STRANGER, router, run)
    done = subprocess.run(command, check=True, capture_output=True, timeout=120)
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


class Run:
    """`rollmesh demo` with its default options."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "runs" / "demo"
        settings = ("trainer.num_steps=100000", "trainer.eval_rollouts=0", "worker.num_workers=1")
        args = [arg for each in settings for arg in ("--set", each)]
        self.process = subprocess.Popen(
            (*CLI, "demo", "--no-live", *args),
            cwd=folder,
            env={name: text for name, text in os.environ.items() if name != "ROLLMESH_KEYS"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        end_s = time.monotonic() + STARTS_WITHIN_S
        while not {"router", "worker-0"} <= read_addresses(self.folder).keys():
            assert self.process.poll() is None
            assert time.monotonic() < end_s
            threading.Event().wait(0.1)
        self.router = read_addresses(self.folder)["router"].address

    def keys(self, name: str) -> Keys:
        return read_key_file(self.folder / "keys" / f"{name}.json")

    def answers(self, keys: Keys, *messages: Message, until: type | None = None) -> list[Message]:
        """Answers of the router to these messages."""
        answers: list[Message] = []
        with closing(Dialer(self.router, "member", keys)) as dialer:
            for message in messages:
                dialer.send(Packet(message))  # type: ignore[arg-type]
            end_s = time.monotonic() + (60.0 if until else SILENT_S)
            while time.monotonic() < end_s:
                wait([dialer], None, 0.1)
                answers += [packet.message for packet in dialer.receive()]
                if until and any(isinstance(each, until) for each in answers):
                    break
        return answers


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    run = Run(tmp_path_factory.mktemp("members"))
    yield run
    end(run.process)


@pytest.mark.slow
def test_another_user_of_the_machine_is_not_part_of_a_run(run: Run) -> None:
    assert strange(run.router, str(run.folder)) == {"has_keys": False, "received": []}


def test_the_same_attack_is_answered_without_keys() -> None:
    """A control: it shows that the keys cause the silence in the test above."""
    reading, writing = os.pipe()
    router = subprocess.Popen(
        (*CLI, "router", "--set", "router.http_bind=127.0.0.1:0", "--ready-fd", str(writing)),
        pass_fds=[writing],
        env={name: text for name, text in os.environ.items() if name != "ROLLMESH_KEYS"},
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        cwd="/",
    )
    os.close(writing)
    try:
        with os.fdopen(reading, "rb") as pipe:
            address = json.loads(pipe.readline())["address"]
        assert "FleetAnswered" in strange(address, "none")["received"]
    finally:
        end(router)


def test_the_operators_key_suffices_for_every_verb(run: Run) -> None:
    keys = run.keys("operator")
    assert run.answers(keys, AskAddresses(1), until=AddressesAnswered)
    assert run.answers(keys, ReadFleet(1), until=FleetAnswered)
    assert run.answers(keys, ListEngines(1), until=EnginesListed)


@pytest.mark.slow
@pytest.mark.parametrize(
    "message",
    [
        AskDrain(1, "worker-0", "mine"),
        JoinEngine(1, "http://127.0.0.1:9"),
        AddEngine(1, "http://127.0.0.1:9"),
        DropEngine(1, "http://127.0.0.1:9"),
        ListEngines(1),
        BeginUpdate(1, "http://127.0.0.1:9", 7, 60.0),
        ReadFleet(1),
        CancelGroup(GroupId("r", 0), "mine"),
        AskAddresses(1),
    ],
)
def test_a_workers_key_cannot_drain_publish_read_or_cancel(run: Run, message: Message) -> None:
    assert run.answers(run.keys("worker"), message) == []


def test_a_workers_key_cannot_speak_as_another_worker(run: Run) -> None:
    forged = (
        WorkerHello("worker-0", "guess", 10_000, os.getpid(), "here", started_s=2e9),
        WorkerBeat("worker-0", 0, True, 0, 0.0, 0, 0, 0, 0),
        WorkerLeft("worker-0", "mine", started_s=2e9),
    )
    assert run.answers(run.keys("worker"), *forged) == []
    own = WorkerHello("gpu-7", "guess", 1, os.getpid(), "here", loads_for_s=1.0)
    assert run.answers(run.keys("worker"), own, until=RouterHello)


def test_a_workers_file_does_not_hold_the_hubs_secret(run: Run) -> None:
    hub = run.keys("hub")
    for path in (run.folder / "keys").glob("worker*.json"):
        assert hub.secret not in path.read_text()
        assert read_key_file(path).hub_public == hub.public


def test_a_removed_key_is_refused(run: Run) -> None:
    folder = run.folder / "keys"
    add_member(folder, Role.OPERATOR, "late")
    keys = run.keys("late")
    assert run.answers(keys, AskAddresses(1), until=AddressesAnswered)
    remove_member(folder, "late")
    assert "refuses our key" in refusal(run.router, keys)
    assert run.answers(keys, AskAddresses(1)) == []


def test_the_verbs_find_the_keys_of_a_run(run: Run, tmp_path: Path) -> None:
    """The keys are found by the run folder's default path, or by --run; otherwise a one-line
    error.
    """
    home = run.folder.parent.parent
    argv = (*CLI, "status", "--json", "--router", run.router)
    for more, cwd in (((), home), (("--run", str(run.folder)), tmp_path)):
        done = subprocess.run((*argv, *more), cwd=cwd, capture_output=True, timeout=120)
        assert done.returncode == 0, done.stderr
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, timeout=120)
    assert done.returncode == 2
    [line] = done.stderr.decode().splitlines()
    assert run.router in line
    assert "--run" in line
    drained = (*CLI, "drain", "worker-9", str(run.folder))
    done = subprocess.run(drained, cwd=tmp_path, capture_output=True, timeout=120)
    assert b"no worker 'worker-9'; there are: worker-0" in done.stderr


def test_drain_answers_are_only_for_operators(run: Run) -> None:
    answers = run.answers(run.keys("operator"), AskDrain(5, "worker-9", ""), until=DrainAnswered)
    assert answers
    assert run.answers(run.keys("client"), AskDrain(5, "worker-9", "")) == []
