"""Admission ends the processes of a claimed run for their own user, and nothing else."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import msgspec
import pytest

from rollmesh.core.errors import UserError
from rollmesh.core.process import Ready
from rollmesh.core.share import FLEET_FILE
from rollmesh.scheduler.admission.transport import ask_admission, ask_scheduler
from rollmesh.scheduler.planning.state import PipelinePhase
from rollmesh.scheduler.service.explain import FleetExplanation
from rollmesh.serve.coordinator.hooks import PipelineHooks
from rollmesh.wire.scheduling import GpuPriority, KillPipeline, ReadScheduler
from tests.ports import free_ports
from tests.security.strangers import STRANGER, as_root, run_as_stranger

ENDS_WITHIN_S = 60.0
FLEET = """
bind = "tcp://127.0.0.1:{}"
http_bind = "127.0.0.1:{}"
journal = "{}"

[[nodes]]
name = "here"
gpus = 1

[pipelines.math]
generation = [0]
"""
IMPORTS = """
import json
from pathlib import Path
from rollmesh.core.errors import AddressError
from rollmesh.scheduler.admission.transport import ask_admission
from rollmesh.wire.scheduling import KillPipeline
"""
KILL_ANY = """
body = [{"pid": int(sys.argv[2]), "started_s": 9e15, "host": os.uname().nodename}]
question = KillPipeline("k", "nope")
try:
    print(ask_admission(Path(sys.argv[1]), question, json.dumps(body).encode(), 1.0))
except AddressError as error:
    print(error)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that every user may enter, unlike pytest's own."""
    for each in (tmp_path, *tmp_path.parents[:3]):  # pytest-xdist adds one
        if each != Path(tempfile.gettempdir()):
            each.chmod(0o755)
    return tmp_path


@pytest.fixture
def path(folder: Path) -> Iterator[Path]:
    """The socket of an admission process, which has no scheduler."""
    with admission_process(folder) as (_, path):
        yield path


@contextmanager
def admission_process(folder: Path) -> Iterator[tuple["subprocess.Popen[bytes]", Path]]:
    """An admission process without a scheduler, and its socket."""
    file = folder / "scheduler.toml"
    file.write_text(f'bind = "tcp://127.0.0.1:1"\njournal = "{folder}/journal"\n')
    reading, writing = os.pipe()
    command = [sys.executable, "-m", "rollmesh.cli.main", "scheduler", "admission", str(file)]
    argv = [*command, "--ready-fd", str(writing)]
    with subprocess.Popen(argv, pass_fds=[writing]) as admission:
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            yield admission, Path(msgspec.json.decode(pipe.readline(), type=Ready).address)
        admission.terminate()


@pytest.fixture
def victim() -> Iterator["subprocess.Popen[bytes]"]:
    """A process of the service's user."""
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


@as_root
@pytest.mark.parametrize("is_open", [False, True], ids=["as made", "in an open folder"])
def test_a_stranger_cannot_end_a_process_of_the_services_user(
    is_open: bool, path: Path, victim: "subprocess.Popen[bytes]"
) -> None:
    """The socket cannot be reached, and no pid is taken from a request."""
    if is_open:
        path.parent.chmod(0o755)
    output = run_as_stranger(IMPORTS, KILL_ANY, str(path), str(victim.pid))
    assert "permission denied" in output
    assert victim.poll() is None


@as_root
def test_a_stranger_that_reaches_the_socket_is_still_another_user(
    path: Path, victim: "subprocess.Popen[bytes]"
) -> None:
    path.parent.chmod(0o755)
    path.chmod(0o666)
    output = run_as_stranger(IMPORTS, KILL_ANY, str(path), str(victim.pid))
    assert f"user {STRANGER} may not use admission" in output
    assert victim.poll() is None


@pytest.mark.slow
def test_the_services_own_user_cannot_end_a_process_by_its_pid_either(
    path: Path, victim: "subprocess.Popen[bytes]"
) -> None:
    body = [{"pid": victim.pid, "started_s": 9e15, "host": os.uname().nodename}]
    question = KillPipeline("k", "nope")
    answer = ask_admission(path, question, msgspec.json.encode(body), ENDS_WITHIN_S)
    assert not answer.ok
    assert victim.poll() is None


CLI = (sys.executable, "-m", "rollmesh.cli.main")
CHANGE = """
import sys
for question in (
    KillPipeline("k", "math"),
    UnregisterPipeline("u", "math"),
    ClaimPipeline("c", "math", RunClaim("r", "h", 7)),
):
    try:
        print(ask_scheduler(sys.argv[1], question, patience_s=2.0))
    except AddressError as error:
        print(error)
"""
MESSAGES = """
from rollmesh.core.errors import AddressError
from rollmesh.scheduler.admission.transport import ask_scheduler
from rollmesh.wire.scheduling import *
"""

READ = """
try:
    print(ask_scheduler(sys.argv[1], ReadScheduler("r"), patience_s=2.0))
except AddressError as error:
    print(error)
"""


@contextmanager
def scheduler_up(folder: Path, *args: str) -> Iterator[str]:
    """The address of a scheduler that `rollmesh scheduler up` has started."""
    ports = free_ports(2)
    file = folder / FLEET_FILE
    file.write_text(FLEET.format(*ports, folder / "journal"))
    command = [*CLI, "scheduler", "up", *args, str(file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as up:
        try:
            assert up.stdout is not None
            assert b"math: " in up.stdout.readline()
            yield f"tcp://127.0.0.1:{ports[0]}"
        finally:
            up.terminate()


@as_root
def test_a_stranger_changes_no_pipeline_whose_token_it_lacks(folder: Path) -> None:
    with scheduler_up(folder, "--no-keys") as address:
        output = run_as_stranger(MESSAGES, CHANGE, address)
        answer = ask_scheduler(address, ReadScheduler("r", "math"), patience_s=ENDS_WITHIN_S)
    [pipeline] = msgspec.json.decode(answer.body, type=FleetExplanation).pipelines
    assert len(output.splitlines()) == 3
    assert "ok=True" not in output
    assert (pipeline.phase, pipeline.run) == (PipelinePhase.ADMITTED, None)


@as_root
def test_a_scheduler_with_keys_of_its_own_answers_its_members_only(folder: Path) -> None:
    with scheduler_up(folder) as address:
        stranger = run_as_stranger(MESSAGES, READ, address)
        status = [*CLI, "scheduler", "status", "--fleet", str(folder / FLEET_FILE)]
        shown = subprocess.run(status, capture_output=True, text=True, timeout=100, check=False)
        token = folder / "journal" / "tokens" / "math"
        with closing(PipelineHooks(address, "math", token_file=str(token))) as hooks:
            ticket = hooks.request_gpus("critic", GpuPriority.CRITIC_TRAINING)
            with pytest.raises(UserError, match="critic"):  # refused, which is an answer
                ticket.wait(timeout_s=ENDS_WITHIN_S)
    assert "ok=True" not in stranger
    assert "math" in shown.stdout, shown.stderr
