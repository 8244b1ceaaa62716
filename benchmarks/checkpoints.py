"""Cost of a checkpoint to the train steps: a copy on their thread, and a write in the background.

    python -m benchmarks.checkpoints [--quick] [--json] [--check] [--only demo,large]

- Cases: `demo`, the demo's model and batch; `large`, a model of 100 MB with short steps (a batch of
  512 tokens). A checkpoint is three times the weights, since it includes AdamW's averages.
- One thread computes. The step and the copy before it are measured in thread CPU time, the
  background write in wall time. Figures are medians over rounds that alternate with and without a
  checkpoint.
"""

import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

from benchmarks.lib.report import Goal, parser, report
from benchmarks.packing import SETTINGS, demo_batch, made_up
from rollmesh.envs.guess import GuessEnv
from rollmesh.serve.client.samples import Sample
from rollmesh.trainer.checkpoints.recovery_plan import LoopState
from rollmesh.trainer.checkpoints.store import CheckpointStore
from rollmesh.trainer.models.tiny import TinyShape, texts_of, write_tiny_model
from rollmesh.trainer.policy import Policy

LARGE = TinyShape(
    width=640, num_layers=5, num_heads=10, num_kv_heads=10, head_dim=64, mlp_width=1792
)
LENGTHS = [128] * 4
MB = 1e6
WAIT_S = 120.0
CASES = ("demo", "large")
GOALS = [
    Goal("demo.copy_over_step", "<=", 0.1),
    Goal("large.copy_over_step", "<=", 0.1),
    Goal("large.memory_over_saved", "<=", 1.1),
]
"""A checkpoint adds at most a tenth to its step and one copy to the host's memory. In `demo`, most
memory growth has other causes.
"""


class Times(NamedTuple):
    """Times of one step, in seconds."""

    copy_s: float
    """CPU time of the copy before the step."""
    step_cpu_s: float
    step_s: float
    """Wall time of the background write."""


class Round:
    """A policy that trains, and its checkpoints."""

    def __init__(self, model: Path, samples: Sequence[Sample], run: Path) -> None:
        self._policy = Policy(str(model), SETTINGS)
        self._samples = samples
        self._checkpoints = CheckpointStore(run)
        self._step = 0
        self.rates: list[float] = []
        """Bytes per second of each checkpoint from its copy until it is durable, without concurrent
        steps.
        """
        self.num_bytes = 0

    def step(self, *, is_saved: bool) -> Times:
        """Run one step; if `is_saved`, write a checkpoint beside it."""
        began_s, start_s = time.thread_time(), time.monotonic()
        if is_saved:
            assert self._checkpoints.begin(LoopState(num_steps=self._step), self._policy)
        copied_s, stepping_s = time.thread_time(), time.monotonic()
        self._policy.step(self._samples, self._step)
        ended_s, end_s = time.thread_time(), time.monotonic()
        self._step += 1
        if is_saved:
            self._settle(start_s)
        return Times(copied_s - began_s, ended_s - copied_s, end_s - stepping_s)

    def write(self) -> float:
        """Write a checkpoint without a concurrent step; return the CPU seconds of its copy."""
        start_s, began_s = time.monotonic(), time.thread_time()
        assert self._checkpoints.begin(LoopState(num_steps=self._step), self._policy)
        copy_s = time.thread_time() - began_s
        self._settle(start_s)
        self.rates.append(self.num_bytes / (time.monotonic() - start_s))
        return copy_s

    def _settle(self, start_s: float) -> None:
        saved = self._checkpoints.settled(WAIT_S)
        assert saved, f"no checkpoint after {time.monotonic() - start_s:.0f} s"
        self.num_bytes = saved.num_bytes


def measure(model: Path, samples: Sequence[Sample], run: Path, num_rounds: int) -> dict[str, float]:
    """Measure one case."""
    memory = psutil.Process().memory_info
    both = Round(model, samples, run)
    for _ in range(2):
        both.step(is_saved=False)  # allocates the state of policy and optimizer
    before_bytes = memory().rss
    first_copy_s = both.write()
    grown_bytes = memory().rss - before_bytes
    alone: list[Times] = []
    beside: list[Times] = []
    for number in range(num_rounds):
        for is_saved in (True, False) if number % 2 else (False, True):
            (beside if is_saved else alone).append(both.step(is_saved=is_saved))
    for _ in range(num_rounds):
        both.write()
    step_s = statistics.median(each.step_cpu_s for each in alone)
    copy_s = statistics.median(each.copy_s for each in beside)
    return {
        "saved_mb": both.num_bytes / MB,
        "step_ms": step_s * 1e3,
        "first_copy_ms": first_copy_s * 1e3,
        "copy_ms": copy_s * 1e3,
        "copy_over_step": copy_s / step_s,
        "step_beside_a_write_over_alone": statistics.median(each.step_s for each in beside)
        / statistics.median(each.step_s for each in alone),
        "write_mb_per_s": statistics.median(both.rates) / MB,
        "memory_over_saved": grown_bytes / both.num_bytes,
    }


def main() -> None:
    """Measure and report."""
    options = parser("savepoints", CASES).parse_args()
    num_rounds = 3 if options.quick else 9
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for case in options.only or CASES:
            model = folder / f"{case}-model"
            shape = LARGE if case == "large" else TinyShape()
            vocab = write_tiny_model(model, texts_of(GuessEnv()), shape, seed=0).vocab_size
            samples = made_up(LENGTHS, vocab) if case == "large" else demo_batch(model)
            measured = measure(model, samples, folder / case, num_rounds)
            figures |= {f"{case}.{figure}": value for figure, value in measured.items()}
    report(options, figures, [goal for goal in GOALS if goal.figure in figures])


if __name__ == "__main__":
    main()
