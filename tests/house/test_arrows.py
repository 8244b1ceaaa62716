"""Imports between packages follow their order, and every contract in pyproject.toml can break."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

from tests.house.source import ROOT

# One breach of each contract, in a package of the same shape.
BREACHES = {
    "core/a.py": "import zmq\nimport rollmesh.wire\nimport rollmesh.testing.a\n",
    "core/__init__.py": "",
    "wire/__init__.py": "",
    "testing/a.py": "",
    "engine/a.py": "def late():\n    import torch.nn\n    import numpy.linalg\n",
    "trainer/a.py": "import ray\n",
    "scheduler/planning/a.py": "import rollmesh.scheduler.service.a\n",
    "scheduler/service/a.py": "import rollmesh.scheduler.admission.a\n",
    "scheduler/admission/a.py": "",
    "launch/a.py": "import rollmesh.trainer.a\n",
    "runtime/a.py": "from rich import live\nimport structlog\n",
    "serve/router/a.py": "import rollmesh.serve.interception.a\n",
    "serve/server/a.py": "import rollmesh.serve.client.a\n",
    "serve/client/a.py": "import numpy\n",
    "serve/interception/a.py": "",
}


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as c; c()"]
    options = ["--config", str(ROOT / "pyproject.toml"), "--no-cache", "--no-logo"]
    environment = {**os.environ, "PYTHONPATH": str(folder), "COLUMNS": "200"}
    return subprocess.run(
        [*command, *options], cwd=folder, env=environment, capture_output=True, text=True
    )


def test_rooms_import_downwards_only() -> None:
    answer = lint(ROOT)
    assert answer.returncode == 0, answer.stdout + answer.stderr


def test_every_contract_can_break(tmp_path: Path) -> None:
    for path, text in BREACHES.items():
        file = tmp_path / "rollmesh" / path
        for folder in [file.parent, *file.parent.parents]:
            if folder.is_relative_to(tmp_path / "rollmesh"):
                folder.mkdir(parents=True, exist_ok=True)
                (folder / "__init__.py").touch()
        file.write_text(text)
    answer = lint(tmp_path)
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    contracts = settings["tool"]["importlinter"]["contracts"]
    assert f"0 kept, {len(contracts)} broken" in answer.stdout, answer.stdout + answer.stderr
    allowed = "rollmesh.serve.client.a -> numpy"
    assert allowed not in answer.stdout
