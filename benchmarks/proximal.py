"""Cost and error of proximal log-probs that replace a forward.

    python -m benchmarks.proximal [--quick] [--json] [--check]

Cost: the step of a stale batch of the demo, by each trainer.proximal; CPU, the median of rounds in
which the rules take turns. Error: one policy takes optimiser steps, four of which are a train step.
The log-probs by the weights at the start of a step (p) are compared with those interpolated between
a recording of some train steps ago and the current ones, with the recording, and with the current
ones. An error is the mean of |used - p| over tokens, of the minibatches after the first. Rewards
are random.
"""

import random
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import Tensor

from benchmarks.lib.report import Goal, parser, report
from benchmarks.packing import demo_batch
from rollmesh.core.config import ProximalRule, TrainerConfig
from rollmesh.envs.guess import GuessEnv
from rollmesh.serve.client.samples import Sample
from rollmesh.trainer.algorithms.loss import ProximalInputs, proximal_logprobs, token_logprobs
from rollmesh.trainer.algorithms.packing import enable_packing, pack, packed_logits
from rollmesh.trainer.models.folders import load_model
from rollmesh.trainer.models.tiny import TinyShape, texts_of, write_tiny_model
from rollmesh.trainer.policy import Policy

RULES: tuple[ProximalRule, ...] = ("recompute", "loglinear", "recorded")
MINIBATCHES = 4
AGES = (1, 2, 3)
"""Train steps."""
STEP = 5
"""The step whose errors are measured."""
SETTINGS = TrainerConfig(
    learning_rate=1e-3, max_logprob_gap=1e9, max_token_gap=1e9, num_minibatches=MINIBATCHES
)

GOALS = [
    Goal("step.loglinear_over_recompute", "<=", 0.85),
    *(Goal(f"age{age}.interpolated_over_recorded", "<=", 1.0) for age in AGES),
]
"""Interpolation saves one of four passes, and its error is smaller than that of the recording."""


def times(folder: Path, samples: list[Sample], num_rounds: int) -> dict[str, float]:
    """Measure the step with each rule, in milliseconds."""
    settings = {rule: msgspec.structs.replace(SETTINGS, proximal=rule) for rule in RULES}
    policies = {rule: Policy(str(folder), settings[rule]) for rule in RULES}
    times_s: dict[str, list[float]] = {rule: [] for rule in RULES}
    for number in range(num_rounds + 1):
        for rule in random.Random(number).sample(RULES, len(RULES)):
            start_s = time.thread_time()
            policies[rule].step(samples, number + 2, step_of_version={0: number})
            times_s[rule].append(time.thread_time() - start_s)
    medians = {rule: statistics.median(each[1:]) for rule, each in times_s.items()}
    figures = {f"step.{rule}_ms": median * 1e3 for rule, median in medians.items()}
    return figures | {"step.loglinear_over_recompute": medians["loglinear"] / medians["recompute"]}


@torch.no_grad()
def logprobs(folder: Path, samples: list[Sample]) -> Tensor:
    """Log-probs [N] of all trained tokens."""
    model = load_model(folder)
    assert enable_packing(model)
    ones = np.ones(len(samples), np.float32)
    parts = []
    for batch in pack(samples, ones, ones, SETTINGS.microbatch_tokens, "cpu"):
        logits_KV = packed_logits(model, batch.token_ids_T, batch.starts, batch.kept_K)
        logprobs_K, _ = token_logprobs(logits_KV, batch.targets_K, batch.temperatures_K)
        parts.append(logprobs_K[batch.kept_index_N])
    return torch.cat(parts)


def moments(folder: Path, samples: list[Sample]) -> dict[int, Tensor]:
    """Return log-probs by the number of optimiser steps done."""
    policy = Policy(str(folder), msgspec.structs.replace(SETTINGS, num_minibatches=1))
    chance = random.Random(0)
    last = (STEP + 1) * MINIBATCHES
    by_moment = {}
    for done in range(last):
        path = folder.with_name(f"after-{done}")
        policy.save(path)
        by_moment[done] = logprobs(path, samples)
        share = [
            msgspec.structs.replace(each, reward=chance.random())
            for at, each in enumerate(samples)
            if at // 16 % MINIBATCHES == done % MINIBATCHES
        ]
        policy.step(share, done)
    return by_moment


def errors(by_moment: Mapping[int, Tensor]) -> dict[str, float]:
    """Return the errors of each replacement, over the minibatches after the first."""
    began = STEP * MINIBATCHES
    figures: dict[str, float] = {}
    for age in AGES:
        recorded_N = by_moment[began - age * MINIBATCHES]
        ages_N = torch.full(recorded_N.shape, age * MINIBATCHES)
        used: dict[str, list[Tensor]] = {"interpolated": [], "recorded": [], "now": []}
        for done in range(1, MINIBATCHES):
            inputs = ProximalInputs(by_moment[began + done], None, recorded_N, ages_N, done)
            used["interpolated"].append(proximal_logprobs("loglinear", inputs))
            used["recorded"].append(recorded_N)
            used["now"].append(inputs.current_N)
        off = {
            name: float((torch.stack(each) - by_moment[began]).abs().mean())
            for name, each in used.items()
        }
        figures |= {f"age{age}.{name}_error": error for name, error in off.items()}
        figures[f"age{age}.interpolated_over_recorded"] = off["interpolated"] / off["recorded"]
    return figures


def main() -> None:
    """Measure and report."""
    options = parser("proximal").parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "model"
        write_tiny_model(folder, texts_of(GuessEnv()), TinyShape(), seed=0)
        samples = demo_batch(folder)
        figures = times(folder, samples, 5 if options.quick else 25)
        figures |= errors(moments(folder, samples))
    report(options, figures, GOALS)


if __name__ == "__main__":
    main()
