"""A router ends on SIGTERM without waiting for engines that hang."""

import socket
import time
from pathlib import Path

from tests.flow.worker_mesh import PATIENCE_S, running


def test_a_router_ends_while_a_probe_has_no_answer(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as engine:
        words = ["router", "--set", f"run.folder={tmp_path}"]
        words += ["--set", f"engine.probe_timeout_s={PATIENCE_S}"]
        words += ["--engine", f"http://127.0.0.1:{engine.getsockname()[1]}"]
        with running(tmp_path, *words) as router:
            connection, _ = engine.accept()
            assert connection.recv(1), "a probe has begun"
            begun_s = time.monotonic()
            router.popen.terminate()
            router.popen.wait(PATIENCE_S)
            assert time.monotonic() - begun_s < PATIENCE_S / 2
            connection.close()
