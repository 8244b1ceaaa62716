"""The policy in training: recompute log-probs of exact tokens, step the weights, write them out.

    one train step:  advantages -> minibatches of whole groups -> per minibatch: forwards of many
                     sequences in one row, loss, backward; clip the gradient; AdamW

Invariants: log-probs are recomputed by the definition under which they were recorded (softmax of
logits / temperature over the whole vocabulary); samples of the very weights held now that disagree
with the recording by more than `max_logprob_gap` on average, and single tokens by more than
`max_token_gap`, do not train and are counted; the weights change in `step` alone; while it is away
from its device nothing of it is there, and it can be saved still. Driven by the train loop, on its
thread.
Shapes: B rows, T tokens, K kept positions, N trained tokens, V vocabulary.

Compute with the weights as an engine of a coarser dtype holds them.

- One module's weights are rounded at a time, in place, and restored after its forward, so that the
  memory needed is a copy of the largest module.
- The weights are as they were when the context ends, also where the forward fails.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from rollmesh.core.config import TrainerConfig
from rollmesh.engine.in_memory import Part
from rollmesh.serve.client.samples import Sample
from rollmesh.trainer.algorithms.advantages import sample_advantages
from rollmesh.trainer.algorithms.attention import PROBE_STRIDE, enable_packing, packed_logits
from rollmesh.trainer.algorithms.batches import (
    TokenBatch,
    assign_minibatches,
    empty_batch,
    pack,
    token_weights,
)
from rollmesh.trainer.algorithms.lora import LoraAdapters
from rollmesh.trainer.algorithms.loss import (
    ProximalInputs,
    TokenTerms,
    needs_extra_forward,
    ppo_loss,
    proximal_logprobs,
    token_logprobs,
)
from rollmesh.trainer.algorithms.optimizer import ModelOptimizer
from rollmesh.trainer.algorithms.step_report import StepMeter, StepReport, TokenAges
from rollmesh.trainer.models.device import resolve_device
from rollmesh.trainer.models.folders import (
    begin_without_weights,
    disk_errors,
    has_native_layout,
    load_model,
    save_model,
    write_config_files,
)
from rollmesh.trainer.pacing.ready_queue import LocalAllocator
from rollmesh.trainer.ranks import Ranks, SingleRank, check_finite, is_finite, named_weights
from rollmesh.trainer.savepoints.imprint import Imprint
from rollmesh.trainer.weights.carriers.hold import Hold
from rollmesh.trainer.weights.events import Probe

PROBE_TOKENS = 32
HOST = torch.device("cpu")


class Policy:
    """A model folder's weights, an optimiser, and which policy version the weights are."""

    def __init__(self, path: str, settings: TrainerConfig, ranks: Ranks | None = None) -> None:
        """Trained with `ranks`, each of which has one; default: alone."""
        torch.set_num_threads(settings.num_threads)
        self.allocator = LocalAllocator()
        """Where samples lie that train here."""
        self._ranks = ranks or SingleRank()
        self._source = Path(path)
        self._settings = settings
        self._device = resolve_device(settings.device)
        model, rank = load_model(self._source), settings.lora_rank
        self._adapters = LoraAdapters(model, rank, self._source) if rank else None
        self._model = model.to(self._device)
        # A batch of one token at most is one of a single sequence.
        self._max_tokens = settings.microbatch_tokens if enable_packing(self._model) else 1
        self._ranks.shard(self._model)
        self._descent = ModelOptimizer(self._model, settings)
        self._imprint = Imprint(self._model, self._descent, self._ranks)
        self._hold = Hold()
        self._policy_version: int | None = 0

    def step(
        self,
        samples: Sequence[Sample],
        step: int,
        minibatches: Sequence[int] | None = None,
        step_of_version: Mapping[int, int] | None = None,
    ) -> StepReport:
        """Train once on `samples`, all of one batch, or this rank's whole groups of it.

        `step` counts from 0; `minibatches` says which each sample is in, where these are not all.
        `step_of_version` has after how many steps a policy version was made: tokens of one that is
        not in it are not old. The report is of all ranks.
        """
        rate = self._descent.warm_up(step)
        meter = StepMeter(samples, TokenAges(step, step_of_version or {}), self._policy_version)
        if minibatches is None:
            minibatches = assign_minibatches(samples, self._settings.num_minibatches)
        plan = self._plan(samples, np.array(minibatches, np.int64))
        began = None
        if needs_extra_forward(self._settings.proximal, len(plan)):
            began = self._logprobs(plan)
        for at, batches in enumerate(plan):
            self._minibatch(at, batches, began[at] if began else None, meter)
        self._policy_version = None
        return meter.report(rate, self._descent.num_skipped_in_row, self._ranks)

    def end_step(self, step: int) -> None:
        """The samples of `step` are gone when nobody holds them, and were nowhere else."""

    def save(self, folder: Path, policy_version: int | None = None) -> None:
        """Write a folder that stock transformers loads; whole at every moment that it exists.

        `policy_version` is the name under which these weights will sample, if they will. Raises
        NotFinite for weights that hold NaN or infinity, and writes nothing.
        """
        check_finite(self._model, self._ranks, folder)
        if self._adapters:
            self._adapters.save_merged(folder, self._ranks)
        else:
            state = self._ranks.full_state(self._model)
            if self._ranks.is_first:
                save_model(self._model, self._source, folder, state)
        if policy_version is not None:
            self._policy_version = policy_version

    def hand_over(self, folder: Path, policy_version: int) -> tuple[Part, ...]:
        """Lay the weights where carriers find them and write them as `folder`: this rank's part,
        which stays as it is until the next call; none where the folder is whole at once.

        From now on they are known as `policy_version`. Raises ModelError where the disk refuses
        them, NoRoom where it is full (then they may be handed over again), and NotFinite for
        weights that hold NaN or infinity.
        """
        check_finite(self._model, self._ranks, folder)
        with disk_errors(folder):
            return self._lay(folder, policy_version)

    def _lay(self, folder: Path, policy_version: int) -> tuple[Part, ...]:
        if self._adapters:
            self._adapters.save(folder, self._ranks)
            self._policy_version = policy_version
            return ()
        if not has_native_layout(self._model):
            self.save(folder, policy_version)
            return ()
        weights = named_weights(self._model)
        part = self._hold.lay(weights, self._ranks.owned(weights), folder.parent)
        # Behind what all ranks do together: one whose disk is full leaves no other waiting.
        if self._ranks.is_first:
            begin_without_weights(self._model, self._source, folder)
        self._policy_version = policy_version
        return (part,)

    def snapshot(self, folder: Path) -> None:
        """Save this rank's part, as Subject has it; NotFinite for weights with NaN or infinity.

        Stock transformers loads `folder/model`, unless it has to convert what such a model holds.
        """
        check_finite(self._model, self._ranks, folder)
        is_plain = has_native_layout(self._model) and not self._adapters
        face = (
            functools.partial(write_config_files, self._model, self._source) if is_plain else None
        )
        self._imprint.take(folder, face)

    def is_snapshot_written(self) -> bool:
        """As Subject has it, of all ranks; a collective."""
        return self._imprint.is_written()

    def restore(self, folder: Path) -> None:
        """As Subject has it. The weights have no name until they are published anew."""
        self._imprint.restore(folder)
        self._policy_version = None

    def is_finite(self) -> bool:
        """Whether no weight is NaN or infinite; a collective."""
        return is_finite(self._model, self._ranks)

    def set_policy_version(self, policy_version: int | None) -> None:
        """The weights held now were published under this name, or under none."""
        self._policy_version = policy_version

    def probe(self) -> Probe:
        """Score a fixed text; an engine that holds these weights must agree."""
        vocab_size = int(self._model.config.vocab_size)
        token_ids = [(PROBE_STRIDE * (at + 1)) % vocab_size for at in range(PROBE_TOKENS)]
        logprobs = self._scores(token_ids)
        with rounded_weights(self._model, torch.bfloat16):
            coarse = self._scores(token_ids)
        return Probe(tuple(token_ids), logprobs, coarse)

    @torch.no_grad()
    def _scores(self, token_ids: Sequence[int]) -> tuple[float, ...]:
        """Log-probs of all of `token_ids` but the first."""
        ids_BT = torch.tensor([token_ids], device=self._device)
        logits_BTV = self._model(input_ids=ids_BT, use_cache=False).logits
        logprobs_TV = torch.log_softmax(logits_BTV[0, :-1].float(), -1)
        return tuple(logprobs_TV.gather(-1, ids_BT[0, 1:, None])[:, 0].tolist())

    def offload(self) -> None:
        """As Lodger has it; what torch itself keeps on a device (its context) stays."""
        self._move(HOST)
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.empty_cache()

    def reload(self) -> None:
        """As Lodger has it."""
        self._move(self._device)

    def _move(self, device: torch.device) -> None:
        # In place, as far as torch goes: who has a parameter has the same one.
        self._model.to(device)
        self._descent.move(device)

    def close(self) -> None:
        """What was handed over is gone; the rest is of this process, and goes with it."""
        self._hold.close()

    def _plan(
        self, samples: Sequence[Sample], minibatches: npt.NDArray[np.int64]
    ) -> list[list[TokenBatch]]:
        """The batches of each minibatch; at all ranks as many."""
        advantages = sample_advantages(samples, self._settings.advantage)
        num = int(self._ranks.max(minibatches.max(initial=-1) + 1))
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
        weights, own = token_weights(samples, self._settings.loss_weight)
        weights /= max(1.0, self._ranks.sum([own])[0])
        packed = pack(samples, advantages, weights, self._max_tokens, self._device)
        rows = torch.from_numpy(part).to(self._device)
        batches = [each._replace(samples_N=rows[each.samples_N]) for each in packed]
        num_missing = int(self._ranks.max(len(batches))) - len(batches)
        return batches + [empty_batch(self._device)] * num_missing

    @torch.no_grad()
    def _logprobs(self, plan: list[list[TokenBatch]]) -> list[list[Tensor]]:
        """[N] of each batch, by the weights held now."""
        return [[self._forward(batch)[0] for batch in batches] for batches in plan]

    def _minibatch(
        self, at: int, batches: list[TokenBatch], began: list[Tensor] | None, meter: StepMeter
    ) -> None:
        """One optimiser step, number `at` of the train step; `began` are log-probs of before it."""
        for number, batch in enumerate(batches):
            logprobs_N, entropies_N = self._forward(batch)
            now_N = logprobs_N.detach()
            began_N = began[number] if began else now_N if at == 0 else None
            sight = self._sight(at, batch, now_N, began_N, meter)
            masked_N = meter.masked(batch, began_N, self._settings)
            # What was recorded of masked tokens counts no more, whether it is finite or not.
            recorded_N = torch.where(masked_N, sight.earliest_N, sight.recorded_N)
            sight = sight._replace(recorded_N=recorded_N)
            terms = TokenTerms(
                logprobs_N=logprobs_N,
                entropies_N=entropies_N if self._settings.entropy_coef else entropies_N.detach(),
                proximal_N=proximal_logprobs(self._settings.proximal, sight),
                recorded_N=recorded_N,
                advantages_N=batch.advantages_N,
                weights_N=batch.weights_N.masked_fill(masked_N, 0.0),
            )
            loss = ppo_loss(terms, self._settings)
            torch.autograd.backward(loss.value)
            meter.add(batch, terms, sight.earliest_N, loss)
        [loss_of_all] = self._ranks.sum([meter.minibatch_loss])
        meter.end_minibatch(self._descent.step(loss_of_all))

    def _forward(self, batch: TokenBatch) -> tuple[Tensor, Tensor]:
        """(log-probs [N], entropies [N]) of the trained tokens under the weights held now."""
        logits_KV = packed_logits(self._model, batch.token_ids_T, batch.starts, batch.kept_K)
        logprobs_K, entropies_K = token_logprobs(logits_KV, batch.targets_K, batch.temperatures_K)
        return logprobs_K[batch.places_N], entropies_K[batch.places_N]

    def _sight(
        self, at: int, batch: TokenBatch, now_N: Tensor, began_N: Tensor | None, meter: StepMeter
    ) -> ProximalInputs:
        ages_N = meter.moment.ages(batch.policy_versions_N) * self._settings.num_minibatches
        return ProximalInputs(now_N, began_N, batch.recorded_N, ages_N, num_done=at)


@contextmanager
def rounded_weights(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Round the weights of `model` to `dtype` within; for forwards without gradients alone."""
    kept: dict[nn.Module, list[Tensor]] = {}

    @torch.no_grad()
    def round_weights(module: nn.Module, *_: Any) -> None:
        weights = [*module.parameters(recurse=False)]
        kept[module] = [weight.detach().clone() for weight in weights]
        for weight in weights:
            weight.copy_(weight.to(dtype))

    @torch.no_grad()
    def restore(module: nn.Module, *_: Any) -> None:
        for weight, was in zip(module.parameters(recurse=False), kept.pop(module), strict=True):
            weight.copy_(was)

    with ExitStack() as hooks:
        for module in model.modules():
            if any(True for _ in module.parameters(recurse=False)):
                before = module.register_forward_pre_hook(round_weights)
                after = module.register_forward_hook(restore, always_call=True)
                hooks.callback(before.remove)
                hooks.callback(after.remove)
        yield
