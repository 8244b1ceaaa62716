"""Processes that the environment of a manually started worker leaves running end with that
worker.
"""

import signal
from pathlib import Path

import psutil
import pytest

from rollmesh.testing.model_folder import write_model_folder
from tests.flow.worker_mesh import running

ENDS_WITHIN_S = 60.0
FORKER = """
import multiprocessing, pathlib, signal, subprocess, sys
from rollmesh.envs.echo import EchoEnv

DAEMON = "import os, signal; os.fork() and os._exit(0); os.setsid(); os.fork() and os._exit(0); "
DAEMON += "print(os.getpid(), flush=True); signal.pause()"

class Forker(EchoEnv):
    def __init__(self):
        super().__init__()
        with subprocess.Popen([sys.executable, "-c", DAEMON], stdout=subprocess.PIPE) as child:
            daemon = int(child.stdout.readline())
        fork = multiprocessing.get_context("fork").Process(target=signal.pause)
        fork.start()
        pathlib.Path("pids").write_text(f"{daemon} {fork.pid}")
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_neither_a_daemon_nor_a_fork_outlives_its_worker(
    tmp_path: Path, number: signal.Signals
) -> None:
    (tmp_path / "forker.py").write_text(FORKER)
    write_model_folder(tmp_path / "model")
    args = ["worker", "--router", "tcp://127.0.0.1:9", "--env", "forker:Forker"]
    with running(tmp_path, *args, "--model-dir", "model") as worker:
        left = [psutil.Process(int(pid)) for pid in (tmp_path / "pids").read_text().split()]
        assert [each.is_running() for each in left] == [True, True]
        worker.popen.send_signal(number)
        worker.popen.wait(ENDS_WITHIN_S)
    gone, alive = psutil.wait_procs(left, timeout=ENDS_WITHIN_S)
    assert (len(gone), alive) == (2, [])
