"""A train step on sequences packed one after the other, against the same step on padded rows.

    python -m benchmarks.packing [--quick] [--json] [--check]

Cases: `demo`, games played at random, of which siblings repeat many; `tail`, 16 lengths of 64 to
2,048 tokens, as many of each order of magnitude; `equal`, where there is nothing to pad. The floor
(_packing_padded.py) is the trainer before it packed. Invariant: both sides have one thread, the
same model, samples, loss and optimiser, and take turns; a time is CPU, the median of all rounds;
their gradients agree, or the run ends. Driven by `make bench`.
"""

import math
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from benchmarks._packing_padded import PaddedPolicy
from benchmarks.lib.report import Goal, parser, report
from rollmesh.core.config import TrainerConfig
from rollmesh.core.ids import GroupId, RolloutId
from rollmesh.envs.guess import GuessEnv
from rollmesh.runtime.families import choose_family
from rollmesh.runtime.prompts import Prompts
from rollmesh.runtime.tokenizer import load_tokenizer
from rollmesh.serve.client.samples import Sample
from rollmesh.trainer.algorithms.batches import pack
from rollmesh.trainer.models.tiny import (
    GameTokens,
    TinyShape,
    random_games,
    texts_of,
    write_tiny_model,
)
from rollmesh.trainer.policy import Policy

GROUPS, SIBLINGS = 16, 16
"""The demo's."""
NUM_SEQUENCES = 16
SHORTEST, LONGEST, EQUAL = 64, 2048, 512
SAMPLED_SHARE = 0.25
"""Of a made-up sequence."""
SETTINGS = TrainerConfig(
    learning_rate=1e-3, max_logprob_gap=math.inf, max_token_gap=math.inf, loss_weight="rollout"
)
ALIKE = 1e-3
"""Between the two sides' gradient norms, as a share."""

GOALS = [
    Goal(f"{case}.{figure}", "<=", bound)
    for case in ("demo", "tail", "equal")
    for figure, bound in (("tokens_over_distinct", 1.0), ("time_per_token_over_padded", 1.05))
]
"""Nothing is padded, and for that no token costs more: several short calls are not one long."""


def demo_batch(folder: Path) -> list[Sample]:
    """Games played at random, each group with one secret's worth of chance."""
    env = GuessEnv()
    tokenizer = load_tokenizer(folder)
    tokens = GameTokens(
        env, tokenizer, Prompts(choose_family(folder, "auto", tokenizer), tokenizer)
    )
    chance = np.random.default_rng(0)
    games = random_games(env, random.Random(0))
    samples = []
    for number in range(GROUPS * SIBLINGS):
        token_ids, is_sampled = tokens.tokens(next(games))
        samples.append(new_sample(chance, number, token_ids, is_sampled))
    return samples


def made_up(lengths: Sequence[int], vocab_size: int) -> list[Sample]:
    """Sequences of noise, in groups of four, whose ends are sampled."""
    chance = np.random.default_rng(0)
    samples = []
    for number, length in enumerate(lengths):
        token_ids = chance.integers(0, vocab_size, length).tolist()
        num_sampled = int(length * SAMPLED_SHARE)
        is_sampled = [False] * (length - num_sampled) + [True] * num_sampled
        samples.append(new_sample(chance, number, token_ids, is_sampled, siblings=4))
    return samples


def new_sample(
    chance: np.random.Generator,
    number: int,
    token_ids: Sequence[int],
    is_sampled: Sequence[bool],
    siblings: int = SIBLINGS,
) -> Sample:
    """The numberth of a batch, with a reward by chance."""
    loss_mask = np.array(is_sampled, np.bool_)
    return Sample(
        rollout_id=RolloutId(GroupId("bench", number // siblings), number % siblings),
        branch="main",
        token_ids=np.array(token_ids, np.int32),
        logprobs=np.where(loss_mask, np.float32(-2.0), np.float32(0.0)),
        loss_mask=loss_mask,
        policy_versions=np.where(loss_mask, 0, -1).astype(np.int32),
        reward=float(chance.random()),
        weight=1.0,
        temperature=1.0,
    )


def tail_lengths() -> list[int]:
    """Log-uniform."""
    bounds = math.log(SHORTEST), math.log(LONGEST)
    drawn = np.random.default_rng(0).uniform(*bounds, NUM_SEQUENCES)
    return [round(each) for each in np.exp(drawn)]


class Side:
    """One of the two, and how long its steps took."""

    def __init__(self, step: Callable[[int], float]) -> None:
        self._step = step
        self.times_s: list[float] = []

    def run(self, number: int) -> float:
        """A step; the gradient's norm."""
        start_s = time.thread_time()
        norm = self._step(number)
        self.times_s.append(time.thread_time() - start_s)
        return norm

    def median_s(self) -> float:
        """Of all steps but the first."""
        return statistics.median(self.times_s[1:])


def compare(folder: Path, samples: list[Sample], num_rounds: int) -> dict[str, float]:
    """Both sides in turns."""
    policy, padded = Policy(str(folder), SETTINGS), PaddedPolicy(folder, SETTINGS)
    ours = Side(lambda step: policy.step(samples, step).grad_norm)
    floor = Side(lambda step: padded.step(samples, step))
    for number in range(num_rounds + 1):
        turn = (ours, floor) if number % 2 else (floor, ours)
        norms = [side.run(number) for side in turn]
        assert abs(norms[0] - norms[1]) <= ALIKE * max(1.0, norms[0]), f"step {number}: {norms}"
    ones = np.ones(len(samples), np.float32)
    forwards = list(pack(samples, ones, ones, SETTINGS.microbatch_tokens, "cpu"))
    distinct = {each.token_ids.tobytes(): len(each.token_ids) - 1 for each in samples}
    num_distinct = sum(distinct.values())
    ours_s, floor_s = ours.median_s(), floor.median_s()
    return {
        "tokens_of_samples": float(sum(len(each.token_ids) - 1 for each in samples)),
        "tokens_distinct": float(num_distinct),
        "tokens_over_distinct": sum(len(each.token_ids_T) for each in forwards) / num_distinct,
        "tokens_padded_over_distinct": padded.num_tokens / num_distinct,
        "packed_step_ms": ours_s * 1e3,
        "padded_step_ms": floor_s * 1e3,
        "time_over_padded": ours_s / floor_s,
        "time_per_token_over_padded": ours_s / num_distinct / (floor_s / padded.num_tokens),
    }


def main() -> None:
    """Measure and report."""
    options = parser("packing").parse_args()
    num_rounds = 5 if options.quick else 25
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "model"
        shape = TinyShape(max_positions=LONGEST)
        vocab_size = write_tiny_model(folder, texts_of(GuessEnv()), shape, seed=0).vocab_size
        batches = {
            "demo": demo_batch(folder),
            "tail": made_up(tail_lengths(), vocab_size),
            "equal": made_up([EQUAL] * NUM_SEQUENCES, vocab_size),
        }
        for case, samples in batches.items():
            told = compare(folder, samples, num_rounds)
            figures |= {f"{case}.{figure}": value for figure, value in told.items()}
    report(options, figures, GOALS)


if __name__ == "__main__":
    main()
