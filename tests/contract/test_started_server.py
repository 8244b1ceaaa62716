"""The process that starts an SGLang server and watches it, with a real SGLang."""

import json
import signal
from pathlib import Path

import httpx
import psutil
import pytest

from tests.contract.conftest import NOT_INSTALLED
from tests.contract.engines import WAIT_S
from tests.contract.processes import SGLANG_INSTALLED, announced
from tests.house.source import ROOT

PYTHON = ROOT / "tests" / "contract" / "sglang" / "python"
ON_A_CPU = [
    *("--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native"),
    *("--sampling-backend", "pytorch", "--max-total-tokens", "32768"),
    *("--mem-fraction-static", "0.2", "--sleep-on-idle"),
]
"""A token limit and the last option keep it from taking the machine's memory and a core."""
KEY = "key-of-the-engines-0123456789"


@pytest.mark.sglang
@pytest.mark.slow
def test_sglang_is_started_watched_and_ended(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not SGLANG_INSTALLED.exists():
        pytest.skip(NOT_INSTALLED)
    monkeypatch.setenv("ROLLMESH_ENGINE_KEY", KEY)
    settings = {"python": PYTHON, "gpus_each": 0, "args": json.dumps(ON_A_CPU)}
    argv = ["-m", "rollmesh.cli.main", "engine", "sglang", "--model-dir", str(model_folder)]
    argv += ["--weight-version", "7", "--set", "engine.launch=sglang"]
    for key, value in settings.items():
        argv += ["--set", f"engine.{key}={value}"]
    with announced(argv) as watcher:
        assert httpx.get(f"{watcher.address}/model_info", timeout=WAIT_S).status_code == 401
        headers = {"Authorization": f"Bearer {KEY}"}
        info = httpx.get(f"{watcher.address}/model_info", headers=headers, timeout=WAIT_S).json()
        assert (info["weight_version"], info["model_path"]) == ("7", str(model_folder))
        servers = [
            each
            for each in psutil.Process(watcher.pid).children()
            if "sglang.launch_server" in each.cmdline()
        ]
        [server] = servers
        tree = [server, *server.children(recursive=True)]
        assert len(tree) > 2, "a scheduler and a detokenizer"
        assert not any(KEY in word for each in tree for word in each.cmdline())
        server.send_signal(signal.SIGKILL)
        assert watcher.child.wait(WAIT_S) == 1
        _, alive = psutil.wait_procs(tree, timeout=WAIT_S)
        assert alive == []
