"""A train step on packed sequences against the same step on padded rows.

    python -m benchmarks.packing [--quick] [--json] [--check]

Cases: `demo`, random games, many of which are equal among siblings; `tail`, 16 lengths of 64 to
2,048 tokens, log-uniform; `equal`, without anything to pad. The padded side is the trainer before
packing: rows by length, padding on the right, equal samples once, logits at needed positions.

- Both sides have one thread, the same model, samples, loss and optimiser, and take turns. A time is
  CPU, the median of all rounds. If their gradients differ, the run ends.

Shapes: B rows, T tokens, K kept positions, N trained tokens, V vocabulary.
"""

import math
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.lib.report import Goal, parser, report
from rollmesh.core.config import TrainerConfig
from rollmesh.core.ids import GroupId, RolloutId
from rollmesh.envs.guess import GuessEnv
from rollmesh.runtime.tokens.families import choose_family
from rollmesh.runtime.tokens.prompts import Prompts
from rollmesh.runtime.tokens.tokenizer import load_tokenizer
from rollmesh.serve.client.samples import Sample
from rollmesh.trainer.algorithms.advantages import sample_advantages
from rollmesh.trainer.algorithms.loss import TokenTerms, ppo_loss, token_logprobs
from rollmesh.trainer.algorithms.optimizer import ModelOptimizer
from rollmesh.trainer.algorithms.packing import pack
from rollmesh.trainer.algorithms.registry import find_advantage
from rollmesh.trainer.models.folders import load_model
from rollmesh.trainer.models.tiny import (
    GameTokens,
    TinyShape,
    random_games,
    texts_of,
    write_tiny_model,
)
from rollmesh.trainer.policy import Policy


class PaddedPolicy:
    """A policy that trains on padded rows: one minibatch, each rollout with the same weight."""

    def __init__(self, folder: Path, settings: TrainerConfig) -> None:
        self._settings = settings
        self._model = load_model(folder)
        self._descent = ModelOptimizer(self._model, settings)
        self.num_tokens = 0
        """Tokens of the last step's forwards, including padding."""

    def step(self, samples: Sequence[Sample], step: int) -> float:
        """Train once; return the gradient's norm."""
        self._descent.warm_up(step)
        self.num_tokens = 0
        for batch in self._batches(samples):
            self.num_tokens += batch["token_ids_BT"].numel()
            logits_BKV = self._model(
                input_ids=batch["token_ids_BT"], use_cache=False, logits_to_keep=batch["kept_K"]
            ).logits
            logprobs_N, entropies_N = token_logprobs(
                logits_BKV[batch["rows_N"], batch["columns_N"]],
                batch["targets_N"],
                torch.ones(len(batch["targets_N"])),
            )
            terms = TokenTerms(
                logprobs_N=logprobs_N,
                entropies_N=entropies_N.detach(),
                proximal_N=logprobs_N.detach(),
                recorded_N=batch["recorded_N"],
                advantages_N=batch["advantages_N"],
                weights_N=batch["weights_N"],
                samples_N=batch["rows_N"],
            )
            torch.autograd.backward(ppo_loss(terms, self._settings).value)
        return self._descent.step(loss=0.0) or math.nan

    def _batches(self, samples: Sequence[Sample]) -> Iterator[dict[str, Tensor]]:
        advantages = sample_advantages(samples, find_advantage(self._settings.advantage))
        equals: dict[bytes, list[int]] = {}
        for at, sample in enumerate(samples):
            equals.setdefault(sample.token_ids.tobytes(), []).append(at)
        rows = sorted(equals.values(), key=lambda members: len(samples[members[0]].token_ids))
        part: list[list[int]] = []
        for row in rows:
            length = len(samples[row[0]].token_ids)
            if part and (len(part) + 1) * length > self._settings.microbatch_tokens:
                yield padded(samples, part, advantages)
                part = []
            part.append(row)
        yield padded(samples, part, advantages)


def padded(
    samples: Sequence[Sample], rows: list[list[int]], advantages: np.ndarray[Any, Any]
) -> dict[str, Tensor]:
    """Return the tensors of one forward; the last token of a sample is a target only."""
    token_ids_BT = np.zeros((len(rows), max(len(samples[r[0]].token_ids) for r in rows)), np.int64)
    for row, members in enumerate(rows):
        token_ids = samples[members[0]].token_ids
        token_ids_BT[row, : len(token_ids)] = token_ids
    order = [at for members in rows for at in members]
    chosen = [samples[at] for at in order]
    counts = [int(sample.loss_mask.sum()) for sample in chosen]
    shares = [1 / (num * len(samples)) for num in counts]
    positions_N = np.concatenate([np.flatnonzero(each.loss_mask) for each in chosen]) - 1
    kept_K, columns_N = np.unique(positions_N, return_inverse=True)
    row_of_each = np.repeat(np.arange(len(rows)), [len(members) for members in rows])
    arrays = {
        "token_ids_BT": token_ids_BT[:, :-1],
        "kept_K": kept_K,
        "rows_N": np.repeat(row_of_each, counts),
        "columns_N": columns_N,
        "targets_N": np.concatenate([s.token_ids[s.loss_mask] for s in chosen]).astype(np.int64),
        "recorded_N": np.concatenate([s.logprobs[s.loss_mask] for s in chosen]),
        "advantages_N": np.repeat(advantages[order], counts),
        "weights_N": np.repeat(np.array(shares, np.float32), counts),
    }
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


GROUPS, SIBLINGS = 16, 16
"""Batch size of the demo."""
NUM_SEQUENCES = 16
SHORTEST, LONGEST, EQUAL = 64, 2048, 512
SAMPLED_SHARE = 0.25
"""Share of sampled tokens in a random sequence."""
SETTINGS = TrainerConfig(
    learning_rate=1e-3, max_logprob_gap=math.inf, max_token_gap=math.inf, loss_weight="rollout"
)
ALIKE = 1e-3
"""Allowed relative difference of the gradient norms of the two sides."""

GOALS = [
    Goal(f"{case}.{figure}", "<=", bound)
    for case in ("demo", "tail", "equal")
    for figure, bound in (("tokens_over_distinct", 1.0), ("time_per_token_over_padded", 1.05))
]
"""Packing computes no padding, and its many short attention calls cost no more per token."""


def demo_batch(folder: Path) -> list[Sample]:
    """Return random games, in groups."""
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
    """Return random sequences in groups of four whose last tokens are sampled."""
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
    """Return sample `number` of a batch, with a random reward."""
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
    """Return log-uniform lengths."""
    bounds = math.log(SHORTEST), math.log(LONGEST)
    drawn = np.random.default_rng(0).uniform(*bounds, NUM_SEQUENCES)
    return [round(each) for each in np.exp(drawn)]


class Side:
    """One of the two sides, and the times of its steps."""

    def __init__(self, step: Callable[[int], float]) -> None:
        self._step = step
        self.times_s: list[float] = []

    def run(self, number: int) -> float:
        """Run a step; return the gradient's norm."""
        start_s = time.thread_time()
        norm = self._step(number)
        self.times_s.append(time.thread_time() - start_s)
        return norm

    def median_s(self) -> float:
        """Median over all steps but the first."""
        return statistics.median(self.times_s[1:])


def compare(folder: Path, samples: list[Sample], num_rounds: int) -> dict[str, float]:
    """Measure both sides, alternating."""
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
            measured = compare(folder, samples, num_rounds)
            figures |= {f"{case}.{figure}": value for figure, value in measured.items()}
    report(options, figures, GOALS)


if __name__ == "__main__":
    main()
