"""Attention over many sequences in one row without padding, and a test that a model supports it.

    the model's own attention, sequence by sequence   ==   PACKED, all of them in one row ?
        yes: the model packs                no: its own attention again, one sequence a forward

- A sequence's logits do not depend on its neighbours. No mask is built, except for windows shorter
  than a sequence.
- A model that fails the test is never packed: it may carry state along the row, or have soft caps,
  sinks, stretched positions or an attention of its own. The test runs when a model is loaded.
- Sequence boundaries are passed by transformers' own keywords (`cu_seq_lens_q` and others), so its
  flash attention takes the same call. PACKED needs no kernel: neighbours of equal length are one
  batched call on views, so sort sequences by length.

Shapes: T tokens of S sequences of L, K kept positions, H heads of width D, V vocabulary.
"""

import inspect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

from rollmesh.core.logs import get_logger

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

    The result depends on the model only, so it is the same on all ranks.
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
    """The keywords with the boundaries of the sequences."""
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
