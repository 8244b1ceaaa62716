"""The demo, killed five times with kill -9 and resumed, compared with an undisturbed demo.

    python -m benchmarks.recovery [--quick] [--json] [--check] [--plot PICTURE]

At fixed steps either the trainer is killed (launch restarts it), or launch and with it all
processes (`demo --resume`). `--plot` draws the picture of the page on recovery.

- Figures come from the files of the two runs; the curve shows the last execution of a repeated
  step.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import psutil

from benchmarks.lib.report import Goal, parser, report
from rollmesh.core.files import read_rows
from rollmesh.launch.folder import read_pids, read_summary
from rollmesh.trainer.reports.learning_curve import moving_mean
from rollmesh.trainer.reports.records import read_recoveries

matplotlib.use("Agg")  # there may be no display

import matplotlib.pyplot as plt

GOALS = [
    Goal("lost_rollouts", "<=", 0.0),
    Goal("steps_missing_or_twice", "<=", 0.0),
    Goal("success_behind", "<=", 0.1),
]
LOOK_S = 0.05
"""Interval at which the run's file is read."""
MEAN_STEPS = 10


class Kill(NamedTuple):
    """Number of finished steps after which the kill happens."""

    num_steps: int
    role: str
    """`trainer`, or `launch`, which takes all other processes with it."""


FULL = (Kill(17, "trainer"), Kill(33, "launch"), Kill(52, "trainer"), Kill(66, "launch"))
KILLS = {100: (*FULL, Kill(83, "trainer")), 25: (Kill(6, "trainer"), Kill(15, "launch"))}
"""Kills as shares of the run's length."""


class Demo:
    """A run of the demo in its own folder."""

    def __init__(self, folder: Path, num_steps: int) -> None:
        self.run = folder / "demo"
        self._words = [sys.executable, "-m", "rollmesh.cli.main", "demo", "--no-live"]
        self._words += ["--set", f"run.folder={folder}", "--set", f"trainer.num_steps={num_steps}"]
        # A dead trainer's engine waits for its lease; 30 s of that would dominate the picture.
        self._words += ["--set", "publish.lease_s=5", "--set", "trainer.checkpoint_steps=20"]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *more: str) -> None:
        """Start the demo, or resume it."""
        words = [*self._words, *more]
        self._process = subprocess.Popen(words, stdout=subprocess.DEVNULL, start_new_session=True)

    def wait(self) -> None:
        """Wait until it is done."""
        assert self._process
        if self._process.wait():
            raise SystemExit(f"the demo in {self.run} ended with code {self._process.returncode}")

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of its train steps."""
        return [row for row in read_rows(self.run / "metrics.jsonl") if row["step"] >= 0]

    def kill(self, kill: Kill) -> float:
        """Kill at the due step; return the seconds until a new step was done."""
        while len(self.rows()) < kill.num_steps:
            time.sleep(LOOK_S)
        pids = {row.role: row.pid for row in read_pids(self.run)}
        processes = [psutil.Process(pid) for pid in pids.values() if psutil.pid_exists(pid)]
        num_steps, began_s = len(self.rows()), time.monotonic()
        os.kill(pids[kill.role], signal.SIGKILL)
        if kill.role == "launch":
            assert self._process
            self._process.wait()
            psutil.wait_procs(processes, timeout=10.0)
            self.start("--resume")
        while len(self.rows()) <= num_steps:
            time.sleep(LOOK_S)
        return time.monotonic() - began_s


def figures_of(calm: Demo, killed: Demo, pauses_s: list[float]) -> dict[str, float]:
    """Return figures from the files of both runs."""
    steps = [row["step"] for row in killed.rows()]
    calm_end, end = (read_summary(demo.run / "summary.json") for demo in (calm, killed))
    return {
        "kills": len(pauses_s),
        "incarnations": end["num_lives"],
        "steps_redone": end["num_steps_redone"],
        "steps_missing_or_twice": len(set(steps) ^ set(range(len(calm.rows()))))
        + len(steps)
        - len(set(steps)),
        "lost_rollouts": abs(end["num_lost"]),
        "dropped_rollouts": end["num_dropped"],
        "open_groups_that_went_on": sum(row["num_open"] for row in read_recoveries(killed.run)),
        "success_untrained": end["success_untrained"],
        "success_last10": end["success_last10"],
        "success_last10_undisturbed": calm_end["success_last10"],
        "success_behind": calm_end["success_last10"] - end["success_last10"],
        "pause_s_mean": sum(pauses_s) / len(pauses_s),
        "pause_s_longest": max(pauses_s),
    }


def draw(calm: Demo, killed: Demo, kills: tuple[Kill, ...], path: Path) -> None:
    """Draw both curves and mark the kills."""
    figure, axes = plt.subplots(figsize=(9, 4.5), layout="constrained")
    looks = {"undisturbed": (calm, "#888888"), "killed and resumed": (killed, "#1f5fa8")}
    for label, (demo, color) in looks.items():
        rows = demo.rows()
        x, y = [row["step"] for row in rows], [row["success"] for row in rows]
        axes.plot(x, y, color=color, linewidth=0.8, alpha=0.4)
        axes.plot(x, moving_mean(y, MEAN_STEPS), color=color, linewidth=2, label=label)
    for at, kill in enumerate(kills):
        of_all = kill.role == "launch"
        label = ("kill -9 of all, then --resume" if of_all else "kill -9 of the trainer") * (at < 2)
        style = "-" if of_all else ":"
        axes.axvline(kill.num_steps, color="#c0392b", linestyle=style, label=label or None)
    axes.set_xlabel("train step")
    axes.set_ylabel(f"success rate, and its mean of {MEAN_STEPS}")
    axes.set_ylim(0, 1.02)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    """Run both, report, draw."""
    arguments = parser("recovery")
    arguments.add_argument("--plot", type=Path, metavar="FILE.png", help="draw both curves")
    options: argparse.Namespace = arguments.parse_args()
    num_steps = 25 if options.quick else 100
    kills = KILLS[num_steps]
    with tempfile.TemporaryDirectory() as place:
        calm, killed = (Demo(Path(place) / name, num_steps) for name in ("calm", "killed"))
        calm.start()
        calm.wait()
        killed.start()
        pauses_s = [killed.kill(kill) for kill in kills]
        killed.wait()
        figures = figures_of(calm, killed, pauses_s)
        if options.plot:
            draw(calm, killed, kills, options.plot)
    report(options, figures, GOALS)


if __name__ == "__main__":
    main()
