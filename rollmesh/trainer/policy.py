"""The policy in training: recompute log-probs of exact tokens, step the weights, write them out.

    one train step:  advantages -> minibatches of whole groups -> per minibatch: forwards of many
                     sequences in one row, loss, backward; clip the gradient; AdamW

Invariants: log-probs are recomputed by the definition under which they were recorded (softmax of
logits / temperature over the whole vocabulary); samples of the very weights held now that disagree
with the recording by more than `max_logprob_gap` do not train, and say so; the weights change in
`step` alone. Driven by the train loop, on its thread.
Shapes: B rows, T tokens, K kept positions, N trained tokens, V vocabulary.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rollmesh.core.config import TrainerConfig
from rollmesh.serve.client.samples import Sample
from rollmesh.trainer.advantages import sample_advantages
from rollmesh.trainer.attention import PROBE_STRIDE, packed_logits, packs
from rollmesh.trainer.batches import TokenBatch, nothing, pack
from rollmesh.trainer.checkpoint import load_model, save_model
from rollmesh.trainer.descent import Descent
from rollmesh.trainer.exactness import Gaps, measure
from rollmesh.trainer.loss import Loss, TokenTerms, policy_loss, token_logprobs
from rollmesh.trainer.minibatches import minibatches_of, weigh
from rollmesh.trainer.publisher import Probe
from rollmesh.trainer.rooms import PlainRoom
from rollmesh.trainer.team import Alone, Ranks

PROBE_TOKENS = 32
NAMELESS = -2
"""What no token's policy version is."""


class StepReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one train step did; means over trained tokens, as they were before the step."""

    loss: float
    entropy: float
    """Nats."""
    kl: float
    """From the recorded to the current policy: mean of exp(d) - 1 - d, d = current - recorded
    (Schulman 2020, "Approximating KL divergence")."""
    clip_fraction: float
    grad_norm: float
    """Before clipping; the mean over the step's minibatches."""
    learning_rate: float
    logprob_gap_mean: float | None
    """|recorded - recomputed| over tokens of the weights held as the step began; None if no token
    is of them."""
    logprob_gap_max: float | None
    num_tokens: int
    num_masked: int
    """Samples left out because that gap was too large."""
    held_policy_version: int | None
    """Of the weights held as the step began; None where they have no name."""
    gaps: list[Gaps]
    """Of each sample given, in order: |recorded - recomputed|, of whatever version."""

    def figures(self) -> dict[str, Any]:
        """All but the gaps, which exactness.py tells in fewer words."""
        row = msgspec.structs.asdict(self)
        del row["gaps"]
        return row


class Policy:
    """A model folder's weights, an optimiser, and which policy version the weights are."""

    def __init__(self, path: str, settings: TrainerConfig, ranks: Ranks | None = None) -> None:
        """Trained with `ranks`, each of which has one; default: alone."""
        torch.set_num_threads(settings.num_threads)
        self.room = PlainRoom()
        """Where samples lie that train here."""
        self._ranks = ranks or Alone()
        self._source = Path(path)
        self._settings = settings
        self._model = load_model(self._source).to(settings.device)
        # A batch of one token at most is one of a single sequence.
        self._max_tokens = settings.microbatch_tokens if packs(self._model) else 1
        self._ranks.share(self._model)
        self._descent = Descent(self._model, settings)
        self._policy_version: int | None = 0

    def step(
        self, samples: Sequence[Sample], step: int, minibatches: Sequence[int] | None = None
    ) -> StepReport:
        """Train once on `samples`, all of one batch, or this rank's whole groups of it.

        `step` counts from 0; `minibatches` says which each sample is in, where these are not all.
        The report is of all ranks.
        """
        rate = self._descent.warm_up(step)
        meter = _Meter(samples)
        if minibatches is None:
            minibatches = minibatches_of(samples, self._settings.num_minibatches)
        plan = self._plan(samples, np.array(minibatches, np.int64))
        # Batches of a single minibatch meet the very weights that are proximal to them.
        proximals = self._proximals(plan) if len(plan) > 1 else None
        for at, batches in enumerate(plan):
            self._minibatch(batches, proximals[at] if proximals else None, meter)
        held, self._policy_version = self._policy_version, None
        return meter.report(rate, self._ranks, held)

    def end_step(self, step: int) -> None:
        """The samples of `step` are gone when nobody holds them, and were nowhere else."""

    def save(self, folder: Path, policy_version: int | None = None) -> None:
        """Write a folder that stock transformers loads; whole at every moment that it exists.

        `policy_version` is the name under which these weights will sample, if they will.
        """
        state = self._ranks.state(self._model)
        if self._ranks.is_first:
            save_model(self._model, self._source, folder, state)
        if policy_version is not None:
            self._policy_version = policy_version

    @torch.no_grad()
    def probe(self) -> Probe:
        """What these weights say of a fixed text; an engine that holds them must agree."""
        vocab_size = int(self._model.config.vocab_size)
        token_ids = [(PROBE_STRIDE * (at + 1)) % vocab_size for at in range(PROBE_TOKENS)]
        ids_BT = torch.tensor([token_ids], device=self._settings.device)
        logits_BTV = self._model(input_ids=ids_BT, use_cache=False).logits
        logprobs_TV = torch.log_softmax(logits_BTV[0, :-1].float(), -1)
        logprobs_T = logprobs_TV.gather(-1, ids_BT[0, 1:, None])[:, 0]
        return Probe(tuple(token_ids), tuple(logprobs_T.tolist()))

    def close(self) -> None:
        """It is of this process, and goes with it."""

    def _plan(
        self, samples: Sequence[Sample], minibatches: npt.NDArray[np.int64]
    ) -> list[list[TokenBatch]]:
        """The batches of each minibatch; at all ranks as many."""
        advantages = sample_advantages(samples, self._settings.advantage)
        num = int(self._ranks.most(minibatches.max(initial=-1) + 1))
        parts = [np.flatnonzero(minibatches == each) for each in range(num)]
        return [self._batches(samples, part, advantages[part]) for part in parts]

    def _batches(
        self,
        of_step: Sequence[Sample],
        part: npt.NDArray[np.int64],
        advantages: npt.NDArray[np.float32],
    ) -> list[TokenBatch]:
        """Of one minibatch; their `samples_N` count through the whole step's."""
        samples = [of_step[row] for row in part]
        weights, own = weigh(samples, self._settings.loss_weight)
        weights /= max(1.0, self._ranks.total([own])[0])
        packed = pack(samples, advantages, weights, self._max_tokens, self._settings.device)
        rows = torch.from_numpy(part).to(self._settings.device)
        batches = [each._replace(samples_N=rows[each.samples_N]) for each in packed]
        num_missing = int(self._ranks.most(len(batches))) - len(batches)
        return batches + [nothing(self._settings.device)] * num_missing

    @torch.no_grad()
    def _proximals(self, plan: list[list[TokenBatch]]) -> list[list[Tensor]]:
        return [[self._forward(batch)[0] for batch in batches] for batches in plan]

    def _minibatch(
        self, batches: list[TokenBatch], proximals: list[Tensor] | None, meter: "_Meter"
    ) -> None:
        """One optimiser step."""
        for at, batch in enumerate(batches):
            logprobs_N, entropies_N = self._forward(batch)
            terms = TokenTerms(
                logprobs_N=logprobs_N,
                entropies_N=entropies_N if self._settings.entropy_coef else entropies_N.detach(),
                proximal_N=proximals[at] if proximals else logprobs_N.detach(),
                recorded_N=batch.recorded_N,
                advantages_N=batch.advantages_N,
                weights_N=batch.weights_N,
            )
            terms = self._without_strangers(batch, terms, meter)
            loss = policy_loss(terms, self._settings)
            torch.autograd.backward(loss.value)
            meter.add(terms, loss)
        meter.grad_norms.append(self._descent.step())

    def _forward(self, batch: TokenBatch) -> tuple[Tensor, Tensor]:
        """(log-probs [N], entropies [N]) of the trained tokens under the weights held now."""
        logits_KV = packed_logits(self._model, batch.token_ids_T, batch.starts, batch.kept_K)
        logprobs_K, entropies_K = token_logprobs(logits_KV, batch.targets_K, batch.temperatures_K)
        return logprobs_K[batch.places_N], entropies_K[batch.places_N]

    def _without_strangers(
        self, batch: TokenBatch, terms: TokenTerms, meter: "_Meter"
    ) -> TokenTerms:
        """Measure the gaps; samples that these very weights did not make weigh nothing.

        Such a sample was not made by the model that its recording names, so its ratio is noise:
        what was recorded of it counts no more, be it a number or not.
        """
        gaps_N = (terms.proximal_N - terms.recorded_N).abs()
        held = NAMELESS if self._policy_version is None else self._policy_version
        own_N = batch.policy_versions_N == held
        meter.add_gaps(batch, gaps_N, own_N)
        # Written so that a gap that is no number is past the bound, too.
        strange_N = own_N & ~(gaps_N <= self._settings.max_logprob_gap)
        if not strange_N.any():
            return terms
        strangers = torch.tensor(sorted(set(batch.samples_N[strange_N].tolist())))
        meter.num_masked += len(strangers)
        is_stranger_N = torch.isin(batch.samples_N, strangers.to(batch.samples_N))
        return terms._replace(
            weights_N=terms.weights_N.masked_fill(is_stranger_N, 0.0),
            recorded_N=torch.where(is_stranger_N, terms.proximal_N, terms.recorded_N),
        )


class _Meter:
    """Sums over the batches of one train step."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self.grad_norms: list[float] = []
        self.num_masked = 0
        self._samples = samples
        self._gaps: list[Gaps] = [[] for _ in samples]
        self._num_tokens = 0
        self._num_clipped = 0
        self._loss = 0.0
        self._entropy = 0.0
        self._kl = 0.0
        self._num_own = 0
        self._gap = 0.0
        self._gap_max = 0.0

    def add(self, terms: TokenTerms, loss: Loss) -> None:
        drift_N = terms.proximal_N - terms.recorded_N
        self._num_tokens += len(drift_N)
        self._num_clipped += loss.num_clipped
        self._loss += float(loss.value.detach())
        self._entropy += float(terms.entropies_N.detach().sum())
        self._kl += float((torch.expm1(drift_N) - drift_N).sum())

    def add_gaps(self, batch: TokenBatch, gaps_N: Tensor, own_N: Tensor) -> None:
        own = gaps_N[own_N]
        self._num_own += len(own)
        self._gap += float(own.sum())
        self._gap_max = max(self._gap_max, float(own.max()) if len(own) else 0.0)
        rows_N = batch.samples_N.cpu().numpy()
        rows = rows_N[np.flatnonzero(np.diff(rows_N, prepend=-1))].tolist()
        samples = [self._samples[row] for row in rows]
        for row, gaps in zip(rows, measure(gaps_N.cpu().numpy(), samples), strict=True):
            self._gaps[row] = gaps

    def report(self, learning_rate: float, ranks: Ranks, held: int | None) -> StepReport:
        """Of all ranks."""
        counts = [self._num_tokens, self._num_clipped, self._num_own, self.num_masked]
        num_tokens, num_clipped, num_own, num_masked = map(int, ranks.total(counts))
        loss, entropy, kl, gap = ranks.total([self._loss, self._entropy, self._kl, self._gap])
        gap_max = ranks.most(self._gap_max)
        num = max(1, num_tokens)
        return StepReport(
            loss=loss / max(1, len(self.grad_norms)),
            entropy=entropy / num,
            kl=kl / num,
            clip_fraction=num_clipped / num,
            grad_norm=sum(self.grad_norms) / max(1, len(self.grad_norms)),
            learning_rate=learning_rate,
            logprob_gap_mean=gap / num_own if num_own else None,
            logprob_gap_max=gap_max if num_own else None,
            num_tokens=num_tokens,
            num_masked=num_masked,
            held_policy_version=held,
            gaps=self._gaps,
        )
