"""Packing: samples of one optimiser step in rows without padding, and attention over such a row.

    the model's own attention, sequence by sequence   ==   PACKED, all of them in one row ?
        yes: the model packs                no: its own attention again, one sequence a forward

- Minibatches are whole groups, chosen on the whole batch, so neither a minibatch nor a weight
  depends on the number of ranks. The weights of a minibatch add up to 1 over all ranks.
- Each trained token of each sample has exactly one entry; each token of a sequence is in one batch.
- Samples with equal tokens share one sequence: siblings often have the same answer, which is then
  computed once. Neighbours of equal length are one batched call on views, so sequences are sorted.
- A sequence's logits do not depend on its neighbours. No mask is built, except for windows shorter
  than a sequence. A model is tested for that when it is loaded; see `enable_packing`.

Shapes: T input tokens of S sequences of length L (the last token of a sample is a target only), K
kept positions, N trained tokens, H heads of width D, V vocabulary.
"""

import inspect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

from rollmesh.core.config import LossWeight
from rollmesh.core.errors import ConfigError
from rollmesh.core.ids import GroupId
from rollmesh.core.logs import get_logger
from rollmesh.serve.client.samples import Sample


class TokenBatch(NamedTuple):
    """The inputs of one forward pass and of its loss."""

    token_ids_T: Tensor
    """int64."""
    starts: tuple[int, ...]
    """Start of each sequence, and T."""
    kept_K: Tensor
    """int64: positions whose logits are needed."""
    targets_K: Tensor
    """int64: the token after each kept position."""
    temperatures_K: Tensor
    kept_index_N: Tensor
    """int64: for each trained token, sample by sample, the index in kept_K of the position before
    it."""
    recorded_N: Tensor
    advantages_N: Tensor
    weights_N: Tensor
    policy_versions_N: Tensor
    """int32."""
    samples_N: Tensor
    """int64: index of the sample that a token belongs to."""


def pack(
    samples: Sequence[Sample],
    advantages: npt.NDArray[np.float32],
    weights: npt.NDArray[np.float32],
    max_tokens: int,
    device: torch.device | str,
) -> Iterator[TokenBatch]:
    """Yield batches of at most `max_tokens` tokens, short sequences first; a longer sequence has a
    batch of its own.

    `samples` are those of one optimiser step. Each has an advantage, and a weight for each of its
    trained tokens. Raises ConfigError for a temperature of 0.
    """
    equals: dict[tuple[bytes, float], list[int]] = {}
    for at, sample in enumerate(samples):
        _check(sample)
        equals.setdefault((sample.token_ids.tobytes(), sample.temperature), []).append(at)
    rows = sorted(equals.values(), key=lambda members: len(samples[members[0]].token_ids))
    for part in _cut(rows, samples, max_tokens):
        yield _PackedRow(samples, part).tensors(advantages, weights, device)


def empty_batch(device: torch.device | str) -> TokenBatch:
    """A batch of one token that does not train, for a rank with fewer batches than another."""
    one, ones = torch.zeros(1, dtype=torch.int64), torch.ones(1)
    none, floats = one[:0], ones[:0]
    batch = TokenBatch(one, (0, 1), one, one, ones, none, floats, floats, floats, none.int(), none)
    return _moved(batch, device)


def _check(sample: Sample) -> None:
    assert not sample.loss_mask[0], "a sampled token has a token before it"
    assert sample.loss_mask.any(), "a sample has a token that trains"
    if sample.temperature <= 0.0:
        raise ConfigError("sampling.temperature must be above 0: training needs random samples")


def _cut(
    rows: list[list[int]], samples: Sequence[Sample], max_tokens: int
) -> Iterator[list[list[int]]]:
    """Split `rows` into parts of at most `max_tokens` tokens."""
    part: list[list[int]] = []
    num_tokens = 0
    for members in rows:
        num_more = len(samples[members[0]].token_ids) - 1
        if part and num_tokens + num_more > max_tokens:
            yield part
            part, num_tokens = [], 0
        part.append(members)
        num_tokens += num_more
    if part:
        yield part


class _PackedRow:
    """The sequences of one batch, each with the samples that share it."""

    def __init__(self, samples: Sequence[Sample], members: list[list[int]]) -> None:
        self._sequences = [samples[equal[0]] for equal in members]
        self._starts = np.cumsum([0, *[len(each.token_ids) - 1 for each in self._sequences]])
        self._start_of_each = np.repeat(self._starts[:-1], list(map(len, members)))
        self._order = [at for equal in members for at in equal]
        self._chosen = [samples[at] for at in self._order]
        self._counts = [int(sample.loss_mask.sum()) for sample in self._chosen]

    def tensors(
        self,
        advantages: npt.NDArray[np.float32],
        weights: npt.NDArray[np.float32],
        device: torch.device | str,
    ) -> TokenBatch:
        """Return the batch, on `device`."""
        inside = zip(self._start_of_each, self._chosen, strict=True)
        positions_N = [start + np.flatnonzero(each.loss_mask) - 1 for start, each in inside]
        kept_K, kept_index_N = np.unique(np.concatenate(positions_N), return_inverse=True)
        arrays = {
            "token_ids_T": self._tokens(slice(None, -1)),
            "kept_K": kept_K,
            "targets_K": self._tokens(slice(1, None))[kept_K],
            "temperatures_K": self._temperatures()[kept_K],
            "kept_index_N": kept_index_N,
            "recorded_N": self._recorded("logprobs"),
            "advantages_N": self._per_token(advantages),
            "weights_N": self._per_token(weights),
            "policy_versions_N": self._recorded("policy_versions"),
            "samples_N": np.repeat(np.array(self._order, np.int64), self._counts),
        }
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        return _moved(TokenBatch(starts=tuple(self._starts.tolist()), **tensors), device)

    def _tokens(self, which: slice) -> npt.NDArray[np.int64]:
        """[T]: the slice `which` of each sequence's tokens."""
        tokens = [each.token_ids[which] for each in self._sequences]
        return np.concatenate(tokens).astype(np.int64)

    def _temperatures(self) -> npt.NDArray[np.float32]:
        each = np.array([sample.temperature for sample in self._sequences], np.float32)
        return np.repeat(each, np.diff(self._starts))

    def _per_token(self, values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """[N]: a sample's value at each of its trained tokens."""
        return np.repeat(values[self._order], self._counts)

    def _recorded(self, name: str) -> npt.NDArray[np.generic]:
        """[N]: the field `name` of the samples at each trained token."""
        return np.concatenate([getattr(sample, name)[sample.loss_mask] for sample in self._chosen])


def _moved(batch: TokenBatch, device: torch.device | str) -> TokenBatch:
    moved = {n: each.to(device) for n, each in batch._asdict().items() if n != "starts"}
    return batch._replace(**moved)


def assign_minibatches(samples: Sequence[Sample], num: int) -> list[int]:
    """Return the minibatch of each sample, of at most `num`; groups are dealt in turn."""
    turns: dict[GroupId, int] = {}
    return [turns.setdefault(sample.group_id, len(turns)) % num for sample in samples]


def token_weights(
    samples: Sequence[Sample], rule: LossWeight
) -> tuple[npt.NDArray[np.float32], float]:
    """Return the weight of a trained token of each sample [len(samples)], and their sum.

        token     1 / trained tokens of the minibatch     Yu et al. 2025, "DAPO", eq. 8: all tokens
                                                          of a minibatch have the same weight
        rollout   1 / rollouts of the minibatch, spread   GRPO (Shao et al. 2024, "DeepSeekMath",
                  evenly over the rollout's tokens        eq. 3); a rollout may be several samples

    `samples` are one rank's part of a minibatch; the caller divides by the sum over all ranks. A
    rollout has the same weight however many samples it was cut into, since each of its tokens
    trains in one of them. Tokens that are masked later are counted, so the rest gains no weight.
    """
    counts = np.array([sample.loss_mask.sum() for sample in samples], np.float32)
    if rule == "token":
        return np.ones(len(samples), np.float32), float(counts.sum())
    shares = np.array([sample.weight for sample in samples], np.float32)
    return shares / counts, float(len({sample.rollout_id for sample in samples}))


log = get_logger()

PACKED = "rollmesh_packed"
"""Name of the attention; transformers builds no mask for it."""
PROBE_STRIDE = 7919
"""A prime, so that the tokens of a probe are spread over any vocabulary."""
PROOF_LENGTHS = (3, 7, 7, 11)
MAX_REACH = 8192
"""A longer window or chunk is not tested, since the test would need a sequence as long."""
STRETCHED = ("dynamic", "longrope")
"""Rotary embeddings that depend on the longest sequence of a row, and so on neighbours."""
ALIKE = 1e-3
"""Allowed difference of logits as a share of their spread: float32 is within 1e-5."""


def enable_packing(model: PreTrainedModel) -> bool:
    """Return whether `model` supports many sequences in one row; if so, set PACKED attention.

    The model's own attention, sequence by sequence, must give the same logits. A model that fails
    this test is never packed: it may carry state along the row, or have soft caps, sinks, stretched
    positions or an attention of its own. The result depends on the model only, so it is the same on
    all ranks.
    """
    before = _attention_of(model)
    reason = _why_not(model)
    if reason:
        if _attention_of(model) != before:
            model.set_attn_implementation(before)
        log.warning("model.not_packed", model=type(model).__name__, reason=reason)
    return not reason


def packed_logits(
    model: PreTrainedModel, token_ids_T: Tensor, starts: Sequence[int], kept_K: Tensor
) -> Tensor:
    """[K, V]: the logits at the kept positions of a row.

    `starts` has where each sequence begins, and T at its end. A model that does not pack
    (`enable_packing`)
    takes rows of one sequence.
    """
    call: dict[str, Any] = {"input_ids": token_ids_T[None], "use_cache": False}
    if len(starts) > 2:
        attention = _attention_of(model)
        assert attention.startswith((PACKED, "flash_attention")), "this model does not pack"
        call |= _boundaries(starts, token_ids_T.device, attention)
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        kept_1KV: Tensor = model(**call, logits_to_keep=kept_K).logits
        return kept_1KV[0]
    all_1TV: Tensor = model(**call).logits
    return all_1TV[0, kept_K]


def _boundaries(starts: Sequence[int], device: torch.device, attention: str) -> dict[str, Any]:
    """The boundaries of the sequences by transformers' own keywords, which its flash attention
    reads."""
    starts_S1 = torch.tensor(starts, dtype=torch.int32)
    lengths_S = starts_S1.diff()
    longest = int(lengths_S.max())
    positions_T = torch.arange(starts[-1]) - starts_S1[:-1].repeat_interleave(lengths_S)
    # PACKED reads them on the host, in every layer; flash attention on the device.
    bounds = starts_S1 if attention == PACKED else starts_S1.to(device)
    return {
        "position_ids": positions_T[None].to(device),
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def packed_attention(
    module: torch.nn.Module,
    query_1HTD: Tensor,
    key_1HTD: Tensor,
    value_1HTD: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Implement transformers' attention interface: ([1, T, H, D], no weights), causal, by sequence.

    Without `cu_seq_lens_q` a row is one sequence. Raises ValueError for unsupported arguments.
    """
    asked = [name for name in ("softcap", "s_aux", "position_bias") if others.get(name) is not None]
    if asked or attention_mask is not None or not getattr(module, "is_causal", True):
        raise ValueError(f"{PACKED} is plain causal attention, without {asked or 'masks'}")
    starts = [0, query_1HTD.shape[2]] if cu_seq_lens_q is None else cu_seq_lens_q.tolist()
    runs = _runs(starts)
    queries, keys, values = [_split(each, runs) for each in (query_1HTD, key_1HTD, value_1HTD)]
    done = []
    for num, length in runs:
        mask = _window(length, sliding_window, query_1HTD.device)
        heads_SHLD = scaled_dot_product_attention(
            next(queries),
            next(keys),
            next(values),
            attn_mask=mask,
            dropout_p=dropout,
            is_causal=mask is None,
            scale=scaling,
            enable_gqa=query_1HTD.shape[1] != key_1HTD.shape[1],
        )
        rows = heads_SHLD.transpose(1, 2)
        done.append(rows.reshape(-1, num * length, *rows.shape[2:]))
    return (done[0] if len(done) == 1 else torch.cat(done, 1)), None


AttentionInterface.register(PACKED, packed_attention)


def _runs(starts: Sequence[int]) -> list[tuple[int, int]]:
    """(number, length) of neighbouring sequences of equal length."""
    lengths = [end - start for start, end in itertools.pairwise(starts)]
    return [(len(list(same)), length) for length, same in itertools.groupby(lengths)]


def _split(row_1HTD: Tensor, runs: Sequence[tuple[int, int]]) -> Iterator[Tensor]:
    """Views [S, H, L, D] of each run; the gradient of a slice would have all T positions."""
    parts = torch.split(row_1HTD, [num * length for num, length in runs], 2)
    for (num, length), part_1HTD in zip(runs, parts, strict=True):
        if num == 1:
            yield part_1HTD
        else:
            heads, _, width = part_1HTD.shape[1:]
            yield part_1HTD.view(heads, num, length, width).transpose(0, 1)


def _window(length: int, window: int | None, device: torch.device) -> Tensor | None:
    """[L, L]: the mask of a sequence that is longer than its window."""
    if window is None or length <= window:
        return None
    ones = torch.ones(length, length, dtype=torch.bool, device=device)
    return ones.tril().triu(1 - window)


@torch.no_grad()
def _why_not(model: PreTrainedModel) -> str:
    """The reason why `model` cannot be packed; '' if it can, and then its attention is PACKED."""
    config = model.config.get_text_config()
    if _rope_types(getattr(config, "rope_parameters", None) or {}) & set(STRETCHED):
        return "its rotary embeddings depend on the longest sequence of a row"
    lengths = _proof_lengths(config)
    starts = [0, *itertools.accumulate(lengths)]
    numbers_T = PROBE_STRIDE * torch.arange(1, starts[-1] + 1)
    token_ids_T = (numbers_T % config.vocab_size).to(model.device)
    try:
        alone_KV = torch.cat(
            [
                packed_logits(model, row, [0, len(row)], _ends([0, len(row)], row.device))
                for row in torch.split(token_ids_T, lengths)
            ]
        )
        model.set_attn_implementation(PACKED)
        together_KV = packed_logits(model, token_ids_T, starts, _ends(starts, token_ids_T.device))
    except Exception as error:  # noqa: BLE001 - door: a user's model may raise anything
        return next(iter(str(error).splitlines()), type(error).__name__)
    if _attention_of(model) != PACKED:
        return "its attention cannot be set"
    off = float((together_KV - alone_KV).abs().max() / alone_KV.std())
    return "" if off < ALIKE else f"together and alone differ by {off:.2g} of the logits' spread"


def _proof_lengths(config: PreTrainedConfig) -> list[int]:
    """Lengths with two equal ones, and one longer than the model's window or chunk."""
    reaches = (getattr(config, each, None) for each in ("sliding_window", "attention_chunk_size"))
    longest = max(each or 0 for each in reaches)
    return [*PROOF_LENGTHS, longest + 5] if 0 < longest <= MAX_REACH else [*PROOF_LENGTHS]


def _rope_types(parameters: Mapping[str, Any]) -> set[Any]:
    """The rope types of all layers; some models have parameters for each kind of layer."""
    nested = [each for each in parameters.values() if isinstance(each, Mapping)]
    return {each.get("rope_type") for each in (parameters, *nested)}


def _attention_of(model: PreTrainedModel) -> str:
    name: str = model.config._attn_implementation  # noqa: SLF001 - transformers has no public name
    return name


def _ends(starts: Sequence[int], device: torch.device) -> Tensor:
    """The first and the last position of each sequence."""
    ends = [at for start, end in itertools.pairwise(starts) for at in (start, end - 1)]
    return torch.tensor(ends, device=device)
