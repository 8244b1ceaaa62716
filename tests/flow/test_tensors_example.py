"""A batch goes from process to process as in the example and the page."""

import re
import subprocess
import sys
from pathlib import Path

from tests.house.source import ROOT


def test_a_batch_is_stored_fetched_and_freed_by_two_processes() -> None:
    argv = [sys.executable, "-m", "examples.tensors"]
    shown = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert shown.returncode == 0, shown.stderr
    assert shown.stderr == ""
    lines = shown.stdout.splitlines()
    stored = "{'num_tensors': 128, 'total_bytes': 396096}"
    assert lines[0].startswith(f"stored {stored}; ")
    assert lines[1:] == [
        "one tensor: torch.int32 [1063], ends in 1062",
        f"fetched {stored}; 132032 numbers",
        "dropped 2 copies, 126 are here",
        "freed 128 shards, copies and all",
        "left   {'num_tensors': 0, 'total_bytes': 0}",
    ]


def test_the_pages_snippet_runs_in_an_empty_folder(tmp_path: Path) -> None:
    page = (ROOT / "docs/explanation/tensors.md").read_text()
    (shown,) = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    ask = "print(tensors[0]['token_ids'].sum().item(), *plane.stats().storage.bytes_by_step)"
    argv = [sys.executable, "-c", f"{shown}\n{ask}"]
    ran = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert (ran.stderr, ran.stdout) == ("", "499500\n")
    assert [*tmp_path.iterdir()] == []
