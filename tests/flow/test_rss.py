"""The soak that users run (benchmarks/rss_soak.py), for 16 rollouts: nothing is left at rest.

Real processes, screenshots of 0.5 MB, agents that vanish and crash. The assertions do not depend on
the speed of the machine: resident memory, and bytes that processes report as held, at the end.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.lib.process_watch import OpenResources
from benchmarks.lib.soak_run import ArmResult, left_over, slope

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "rss_soak.py"
NUM_ROLLOUTS = 16
SEED = 17
"""An agent of the first groups crashes."""


def soaked(folder: Path, *args: str) -> dict[str, float]:
    """The figures of one run."""
    argv = [sys.executable, str(SCRIPT), "--json", "--seed", str(SEED), "--out", str(folder)]
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([*argv, *args], capture_output=True, text=True, env=environ, check=False)
    assert done.returncode == 0, done.stderr
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])["figures"]
    return figures


def test_a_browsing_soak_leaves_nothing_at_rest(tmp_path: Path) -> None:
    figures = soaked(tmp_path, "--rollouts", str(NUM_ROLLOUTS), "--keep", "3")
    report = (tmp_path / "soak.md").read_text()
    assert figures["on.rollouts"] == NUM_ROLLOUTS
    assert figures["on.vanished"] > 0
    assert figures["on.crashed"] > 0
    assert figures["on.broken"] == figures["on.beats_missed"] == 0
    assert figures["on.gauges"] > 0
    assert figures["on.gauges_left"] == 0, report
    assert figures["on.files_left"] <= 0
    assert figures["on.threads_left"] <= 0
    assert figures["on.resting_vs_idle"] <= 1.4, report
    assert figures["on.peak_factor"] <= 2.5, report
    assert (tmp_path / "curves.png").stat().st_size > 10_000


def test_a_soak_without_a_plotting_library_fails_before_it_begins(tmp_path: Path) -> None:
    args = [str(SCRIPT), "--out", str(tmp_path / "out")]
    without = f"""
import runpy, sys
sys.modules["matplotlib"] = None
sys.argv = {args!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""
    argv = [sys.executable, "-c", without]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 2
    assert done.stderr.endswith("--out draws with matplotlib: pip install '.[train]'\n")


def test_held_bytes_are_leftovers_except_for_counts_and_caches() -> None:
    cold = {'rollmesh_entries{table="blobs"}': 0.0, 'rollmesh_entries{table="engines"}': 1.0}
    after = {
        'rollmesh_entries{table="blobs"}': 2.0,
        'rollmesh_entries{table="engines"}': 1.0,
        'rollmesh_held_bytes{what="graph"}': 7.0,
        'rollmesh_cache_entries{cache="sinks"}': 1.0,
        "rollmesh_calls_total": 45.0,
    }
    result = ArmResult(
        name="on",
        judged=["worker"],
        ports={},
        series={},
        peaks={},
        idle={},
        resting={},
        cold={"worker": OpenResources(1, 1, cold)},
        after={"worker": OpenResources(1, 1, after)},
    )
    assert left_over(result) == {
        'worker rollmesh_entries{table="blobs"}': 2.0,
        'worker rollmesh_held_bytes{what="graph"}': 7.0,
    }


def test_a_slope_has_the_textbook_error_bound() -> None:
    # Example of Snedecor and Cochran with five points: 0.6, with an error of 0.2828 at 3 degrees of
    # freedom.
    found = slope([1, 2, 3, 4, 5], [2, 4, 5, 4, 5])
    assert found.at == pytest.approx(0.6)
    assert found.high - found.at == pytest.approx(3.182 * 0.28284, rel=1e-3)
    assert found.at - found.low == pytest.approx(found.high - found.at)
