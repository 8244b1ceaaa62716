"""The policy in training: recompute log-probs of exact tokens, step the weights, write them out.

    one train step:  advantages -> minibatches of whole groups -> per minibatch: forwards of many
                     sequences in one row, loss, backward; clip the gradient; AdamW

- Log-probs are recomputed by the definition under which they were recorded: softmax of
  logits / temperature over the whole vocabulary.
- Samples of the weights held now whose recorded log-probs are off by more than `max_logprob_gap` on
  average, and single tokens off by more than `max_token_gap`, do not train and are counted.
- The weights change in `step` and `restore` only. An offloaded policy has nothing on its device and
  can still be saved.

Shapes: B rows, T tokens, K kept positions, N trained tokens, V vocabulary.
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
from rollmesh.engine.shared_memory import SharedSegment
from rollmesh.serve.client.samples import Sample
from rollmesh.trainer.algorithms.advantages import sample_advantages
from rollmesh.trainer.algorithms.lora import LoraAdapters
from rollmesh.trainer.algorithms.loss import (
    ProximalInputs,
    TokenTerms,
    needs_extra_forward,
    proximal_logprobs,
    token_logprobs,
)
from rollmesh.trainer.algorithms.optimizer import ModelOptimizer
from rollmesh.trainer.algorithms.packing import (
    PROBE_STRIDE,
    TokenBatch,
    assign_minibatches,
    empty_batch,
    enable_packing,
    pack,
    packed_logits,
    token_weights,
)
from rollmesh.trainer.algorithms.registry import find_advantage, find_loss
from rollmesh.trainer.algorithms.step_report import StepMeter, StepReport, TokenAges
from rollmesh.trainer.checkpoints.snapshot import RankSnapshot
from rollmesh.trainer.models.folders import (
    begin_without_weights,
    disk_errors,
    has_native_layout,
    load_model,
    save_model,
    write_config_files,
)
from rollmesh.trainer.pacing.ready_queue import LocalAllocator
from rollmesh.trainer.ranks import (
    Ranks,
    SingleRank,
    check_finite,
    is_finite,
    named_weights,
    resolve_device,
)
from rollmesh.trainer.weights.transfer import WeightBuffer
from rollmesh.trainer.weights.verdicts import Probe

PROBE_TOKENS = 32
HOST = torch.device("cpu")


class Policy:
    """The weights of a model folder, an optimiser, and the policy version of the weights."""

    def __init__(self, path: str, settings: TrainerConfig, ranks: Ranks | None = None) -> None:
        """Load the model in the folder `path`; `ranks` are the ranks that train it (default: one).

        Raises ConfigError for an unknown device, loss or advantage, ModelError without a model.
        """
        self._loss = find_loss(settings.loss)
        self._advantage = find_advantage(settings.advantage)
        torch.set_num_threads(settings.num_threads)
        self.allocator = LocalAllocator()
        """Allocates the samples that train here."""
        self._ranks = ranks or SingleRank()
        self._source = Path(path)
        self._settings = settings
        self._device = resolve_device(settings.device)
        model, rank = load_model(self._source), settings.lora_rank
        self._adapters = LoraAdapters(model, rank, self._source) if rank else None
        self._model = model.to(self._device)
        # A limit of one token makes each sequence a batch of its own.
        self._max_tokens = settings.microbatch_tokens if enable_packing(self._model) else 1
        self._ranks.shard(self._model)
        self._optimizer = ModelOptimizer(self._model, settings)
        self._imprint = RankSnapshot(self._model, self._optimizer, self._ranks)
        self._weight_buffer = WeightBuffer()
        self._policy_version: int | None = 0

    def step(
        self,
        samples: Sequence[Sample],
        step: int,
        minibatches: Sequence[int] | None = None,
        step_of_version: Mapping[int, int] | None = None,
    ) -> StepReport:
        """Train once on `samples`: a whole batch, or this rank's groups of it.

        `step` counts from 0. `minibatches` has the minibatch of each sample (needed for a part of a
        batch). `step_of_version` has the number of train steps after which each policy version was
        made; tokens of other versions have age 0. The report is of all ranks.
        """
        rate = self._optimizer.warm_up(step)
        meter = StepMeter(samples, TokenAges(step, step_of_version or {}), self._policy_version)
        if minibatches is None:
            minibatches = assign_minibatches(samples, self._settings.num_minibatches)
        plan = self._plan(samples, np.array(minibatches, np.int64))
        start = None
        if needs_extra_forward(self._settings.proximal, len(plan)):
            start = self._logprobs(plan)
        for at, batches in enumerate(plan):
            self._minibatch(at, batches, start[at] if start else None, meter)
        self._policy_version = None
        return meter.report(rate, self._optimizer.num_skipped_in_row, self._ranks)

    def end_step(self, step: int) -> None:
        """Do nothing: the samples of `step` are freed with their last reference."""

    def save(self, folder: Path, policy_version: int | None = None) -> None:
        """Write a folder that stock transformers loads; it is complete whenever it exists.

        `policy_version` is the version under which these weights will be published, if they will.
        Raises NotFinite for weights that hold NaN or infinity, and then writes nothing.
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

    def export(self, folder: Path, policy_version: int) -> tuple[SharedSegment, ...]:
        """Copy this rank's part of the weights to memory that transports can read, and begin
        `folder`; return the part, which stays unchanged until the next call, or nothing if the
        folder is already complete.

        The weights are `policy_version` from now on. Raises ModelError if they cannot be written,
        NoRoom if the disk is full (the call may be repeated), and NotFinite for weights that hold
        NaN or infinity.
        """
        check_finite(self._model, self._ranks, folder)
        with disk_errors(folder):
            return self._export(folder, policy_version)

    def _export(self, folder: Path, policy_version: int) -> tuple[SharedSegment, ...]:
        if self._adapters:
            self._adapters.save(folder, self._ranks)
            self._policy_version = policy_version
            return ()
        if not has_native_layout(self._model):
            self.save(folder, policy_version)
            return ()
        weights = named_weights(self._model)
        part = self._weight_buffer.store(weights, self._ranks.owned(weights), folder.parent)
        # After all collectives: a rank whose disk is full leaves no other rank waiting.
        if self._ranks.is_first:
            begin_without_weights(self._model, self._source, folder)
        self._policy_version = policy_version
        return (part,)

    def snapshot(self, folder: Path) -> None:
        """Copy this rank's part, and write it in the background; see Subject.

        Raises NotFinite for weights with NaN or infinity. Stock transformers loads `folder/model`,
        unless it has to convert the tensors that such a model holds.
        """
        check_finite(self._model, self._ranks, folder)
        is_plain = has_native_layout(self._model) and not self._adapters
        face = (
            functools.partial(write_config_files, self._model, self._source) if is_plain else None
        )
        self._imprint.take(folder, face)

    def is_snapshot_written(self) -> bool:
        """Whether all ranks have written their part; a collective."""
        return self._imprint.is_written()

    def restore(self, folder: Path) -> None:
        """Read this rank's part; the weights have no version until they are published again."""
        self._imprint.restore(folder)
        self._policy_version = None

    def is_finite(self) -> bool:
        """Whether no weight is NaN or infinite; a collective."""
        return is_finite(self._model, self._ranks)

    def set_policy_version(self, policy_version: int | None) -> None:
        """Set the version under which the weights held now were published, or None."""
        self._policy_version = policy_version

    def probe(self) -> Probe:
        """Score a fixed text; an engine that holds these weights must return the same scores."""
        vocab_size = int(self._model.config.vocab_size)
        token_ids = [(PROBE_STRIDE * (at + 1)) % vocab_size for at in range(PROBE_TOKENS)]
        logprobs = self._scores(token_ids)
        with rounded_weights(self._model, torch.bfloat16):
            rounded_logprobs = self._scores(token_ids)
        return Probe(tuple(token_ids), logprobs, rounded_logprobs)

    @torch.no_grad()
    def _scores(self, token_ids: Sequence[int]) -> tuple[float, ...]:
        """Log-probs of all `token_ids` except the first."""
        ids_BT = torch.tensor([token_ids], device=self._device)
        logits_BTV = self._model(input_ids=ids_BT, use_cache=False).logits
        logprobs_TV = torch.log_softmax(logits_BTV[0, :-1].float(), -1)
        return tuple(logprobs_TV.gather(-1, ids_BT[0, 1:, None])[:, 0].tolist())

    def offload(self) -> None:
        """Move weights and optimiser to the host; torch's own context stays on the device."""
        self._move(HOST)
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.empty_cache()

    def reload(self) -> None:
        """Move weights and optimiser back to the device."""
        self._move(self._device)

    def _move(self, device: torch.device) -> None:
        # torch moves in place: references to a parameter stay valid.
        self._model.to(device)
        self._optimizer.move(device)

    def close(self) -> None:
        """Free the exported weights; everything else is freed with the process."""
        self._weight_buffer.close()

    def _plan(
        self, samples: Sequence[Sample], minibatches: npt.NDArray[np.int64]
    ) -> list[list[TokenBatch]]:
        """The batches of each minibatch; every rank has the same number."""
        advantages = sample_advantages(samples, self._advantage)
        num = int(self._ranks.max(minibatches.max(initial=-1) + 1))
        parts = [np.flatnonzero(minibatches == each) for each in range(num)]
        return [self._batches(samples, part, advantages[part]) for part in parts]

    def _batches(
        self,
        all_samples: Sequence[Sample],
        part: npt.NDArray[np.int64],
        advantages: npt.NDArray[np.float32],
    ) -> list[TokenBatch]:
        """The batches of one minibatch; their `samples_N` index the samples of the whole step."""
        samples = [all_samples[row] for row in part]
        weights, own = token_weights(samples, self._settings.loss_weight)
        weights /= max(1.0, self._ranks.sum([own])[0])
        packed = pack(samples, advantages, weights, self._max_tokens, self._device)
        rows = torch.from_numpy(part).to(self._device)
        batches = [each._replace(samples_N=rows[each.samples_N]) for each in packed]
        num_missing = int(self._ranks.max(len(batches))) - len(batches)
        return batches + [empty_batch(self._device)] * num_missing

    @torch.no_grad()
    def _logprobs(self, plan: list[list[TokenBatch]]) -> list[list[Tensor]]:
        """Log-probs [N] of each batch, by the weights held now."""
        return [[self._forward(batch)[0] for batch in batches] for batches in plan]

    def _minibatch(
        self, at: int, batches: list[TokenBatch], start: list[Tensor] | None, meter: StepMeter
    ) -> None:
        """Do optimiser step number `at` of the train step; `start` has the log-probs of each batch
        as the train step began."""
        for number, batch in enumerate(batches):
            logprobs_N, entropies_N = self._forward(batch)
            current_N = logprobs_N.detach()
            start_N = start[number] if start else current_N if at == 0 else None
            inputs = self._proximal_inputs(at, batch, current_N, start_N, meter)
            masked_N = meter.mask(batch, start_N, self._settings)
            # The recorded log-probs of masked tokens may not be finite.
            recorded_N = torch.where(masked_N, inputs.earliest_N, inputs.recorded_N)
            inputs = inputs._replace(recorded_N=recorded_N)
            terms = TokenTerms(
                logprobs_N=logprobs_N,
                entropies_N=entropies_N if self._settings.entropy_coef else entropies_N.detach(),
                proximal_N=proximal_logprobs(self._settings.proximal, inputs),
                recorded_N=recorded_N,
                advantages_N=batch.advantages_N,
                weights_N=batch.weights_N.masked_fill(masked_N, 0.0),
                samples_N=batch.samples_N,
            )
            loss = self._loss(terms, self._settings)
            torch.autograd.backward(loss.value)
            meter.add(batch, terms, inputs.earliest_N, loss)
        [loss_of_all] = self._ranks.sum([meter.minibatch_loss])
        meter.end_minibatch(self._optimizer.step(loss_of_all))

    def _forward(self, batch: TokenBatch) -> tuple[Tensor, Tensor]:
        """(log-probs [N], entropies [N]) of the trained tokens under the weights held now."""
        logits_KV = packed_logits(self._model, batch.token_ids_T, batch.starts, batch.kept_K)
        logprobs_K, entropies_K = token_logprobs(logits_KV, batch.targets_K, batch.temperatures_K)
        return logprobs_K[batch.kept_index_N], entropies_K[batch.kept_index_N]

    def _proximal_inputs(
        self,
        at: int,
        batch: TokenBatch,
        current_N: Tensor,
        start_N: Tensor | None,
        meter: StepMeter,
    ) -> ProximalInputs:
        ages_N = meter.token_ages.ages(batch.policy_versions_N) * self._settings.num_minibatches
        return ProximalInputs(current_N, start_N, batch.recorded_N, ages_N, num_done=at)


@contextmanager
def rounded_weights(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Within this context, compute with the weights of `model` rounded to `dtype`, as an engine
    holds them; for forwards without gradients.

    - One module's weights are rounded at a time, in place, and restored after its forward, so the
      memory needed is a copy of the largest module.
    - After the context the weights are unchanged, also if a forward failed.
    """
    originals: dict[nn.Module, list[Tensor]] = {}

    @torch.no_grad()
    def round_weights(module: nn.Module, *_: Any) -> None:
        weights = [*module.parameters(recurse=False)]
        originals[module] = [weight.detach().clone() for weight in weights]
        for weight in weights:
            weight.copy_(weight.to(dtype))

    @torch.no_grad()
    def restore(module: nn.Module, *_: Any) -> None:
        for weight, was in zip(
            module.parameters(recurse=False), originals.pop(module), strict=True
        ):
            weight.copy_(was)

    with ExitStack() as hooks:
        for module in model.modules():
            if any(True for _ in module.parameters(recurse=False)):
                before = module.register_forward_pre_hook(round_weights)
                after = module.register_forward_hook(restore, always_call=True)
                hooks.callback(before.remove)
                hooks.callback(after.remove)
        yield
