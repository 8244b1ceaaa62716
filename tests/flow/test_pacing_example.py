"""examples/pacing.py shows the bounds of each pacing mode."""

import re
import subprocess
import sys


def test_both_pacing_modes_train_and_one_keeps_the_staleness_bound() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "examples.pacing"], capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 0, run.stderr
    known, ours = re.findall(r"(\d+) rollouts in 40 steps, at most (\d+) steps old", run.stdout)
    assert int(known[0]) == 160
    assert int(known[1]) > 10, "a count is bounded, and no age"
    assert int(ours[0]) >= 160
    assert int(ours[1]) == 2
