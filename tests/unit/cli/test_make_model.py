"""`rollmesh make-model --keep`: what is there stays, and costs nothing."""

import subprocess
import sys
from pathlib import Path

KEEP = """
import sys
from rollmesh.cli.main import main
assert main(["make-model", "--keep", sys.argv[1]]) == 0
assert "torch" not in sys.modules
"""


def test_a_model_that_is_there_is_kept_without_torch(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("mine")
    argv = [sys.executable, "-c", KEEP, str(tmp_path)]
    kept = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert kept.returncode == 0, kept.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
