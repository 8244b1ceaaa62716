"""A batch goes from process to process as the example shows it."""

import subprocess
import sys

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
