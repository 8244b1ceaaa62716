"""Runs the model once over all chunks of a step, and samples the next tokens.

- One forward pass per step for any mix of prompts and decoding requests; the cost in Python does
  not grow with the tokens.
- A sample depends only on its row's logits, parameters, seed and position, so a generation that is
  interrupted and resumed from its exact tokens continues identically.
- Log-probs are of the distribution after temperature, before top-k and top-p: SGLang's default
  (only with SGLANG_RETURN_ORIGINAL_LOGPROB are they of raw logits). Greedy rows count as
  temperature 1 in both.

Shapes: N tokens of the step, B rows of an attention group, T their padded new tokens, S their
padded context, R rows that sample, V vocabulary.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollmesh.engine.embedded.model import AppliedAdapter, Model, Rows
from rollmesh.engine.embedded.request import Request, Sampling, Top
from rollmesh.engine.embedded.scheduler import Batch, Chunk, Memory, Sampled
from rollmesh.engine.embedded.shaping import shape

_U64 = NDArray[np.uint64]
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_DRAW_BITS = 48  # few enough that draw * total, rounded, stays below the total


def draw(
    logits_RV: Tensor, samplings: Sequence[Sampling], positions: Sequence[int]
) -> tuple[list[int], list[float]]:
    """Sample tokens and return them with their log-probs; `positions[r]` is row r's next
    position."""
    logprobs_RV = tempered(logits_RV, samplings)
    greedy = [s.temperature == 0 or s.top_k == 1 for s in samplings]
    if all(greedy):
        tokens_R1 = logprobs_RV.argmax(dim=-1, keepdim=True)
    else:
        seeds = np.array([s.seed & 0xFFFFFFFFFFFFFFFF for s in samplings], dtype=np.uint64)
        draws_R = uniforms(seeds, np.array(positions, dtype=np.uint64))
        probs_RV = cut_tails(logprobs_RV.exp(), samplings)
        tokens_R1 = invert_cdf(probs_RV, torch.from_numpy(draws_R))
        if any(greedy):
            best_R1 = logprobs_RV.argmax(dim=-1, keepdim=True)
            tokens_R1 = torch.where(torch.tensor(greedy).unsqueeze(1), best_R1, tokens_R1)
    picked_R1 = logprobs_RV.gather(1, tokens_R1)
    return tokens_R1.squeeze(1).tolist(), picked_R1.squeeze(1).tolist()


def tempered(logits_RV: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Return log-probs of the sampled distributions, before anything is cut off."""
    temperatures = [s.temperature or 1.0 for s in samplings]
    if any(t != 1.0 for t in temperatures):
        logits_RV = logits_RV / torch.tensor(temperatures).unsqueeze(1)
    return logits_RV.log_softmax(dim=-1)


def likeliest(logprobs_RV: Tensor, counts: Sequence[int]) -> list[Top]:
    """Return the `counts[r]` likeliest tokens of each row; impossible ones have the minimum
    float."""
    most = min(max(counts), logprobs_RV.shape[1])
    values_RK, tokens_RK = logprobs_RV.clamp(min=torch.finfo(torch.float32).min).topk(most)
    rows = zip(values_RK.tolist(), tokens_RK.tolist(), counts, strict=True)
    return [list(zip(values[:n], tokens[:n], strict=True)) for values, tokens, n in rows]


def invert_cdf(probs_RV: Tensor, draws_R: Tensor) -> Tensor:
    """Return the first token whose cumulative probability exceeds the draw: (R, 1).

    Summed in float64, since float32 would shift the borders of a large vocabulary.
    """
    cumulated_RV = probs_RV.double().cumsum(dim=-1)
    targets_R1 = draws_R.unsqueeze(1) * cumulated_RV[:, -1:]
    return torch.searchsorted(cumulated_RV, targets_R1, right=True)


def cut_tails(probs_RV: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Zero the tokens that top-k, top-p and min-p exclude, in rows that set them; not renormalised.

    All are cut from the full distribution, as in SGLang's torch backend: a token stays if it is
    among the k likeliest, the likelier ones before it do not exceed p, and it is at least min_p
    times as likely as the likeliest.
    """
    vocab_size = probs_RV.shape[1]
    rows = [
        r
        for r, s in enumerate(samplings)
        if s.top_p < 1.0 or 1 < s.top_k < vocab_size or s.min_p > 0
    ]
    if not rows:
        return probs_RV
    top_p = torch.tensor([samplings[r].top_p for r in rows]).unsqueeze(1)
    top_k = torch.tensor(
        [k if (k := samplings[r].top_k) > 0 else vocab_size for r in rows]
    ).unsqueeze(1)
    min_p = torch.tensor([samplings[r].min_p for r in rows]).unsqueeze(1)
    sorted_RV, order_RV = probs_RV[rows].sort(dim=-1, descending=True, stable=True)
    before_RV = sorted_RV.double().cumsum(dim=-1) - sorted_RV
    excluded_RV = (before_RV > top_p) | (torch.arange(vocab_size) >= top_k)
    excluded_RV |= sorted_RV < sorted_RV[:, :1] * min_p
    kept_RV = torch.zeros_like(sorted_RV).scatter(
        1, order_RV, sorted_RV.masked_fill(excluded_RV, 0)
    )
    return probs_RV.index_copy(0, torch.tensor(rows), kept_RV)


def uniforms(seeds: _U64, positions: _U64) -> NDArray[np.float64]:
    """Return one number in [0, 1) for each (seed, position), as a counter-based generator.

    SplitMix64's finaliser (Steele, Lea and Flood, 2014) over the seed, then over its sum with the
    position's multiple of the golden ratio.
    """
    mixed = mix(mix(seeds + _GOLDEN) + positions * _GOLDEN)
    return (mixed >> np.uint64(64 - _DRAW_BITS)).astype(np.float64) * 2.0**-_DRAW_BITS


def mix(values: _U64) -> _U64:
    """Apply SplitMix64's finaliser: each input bit flips each output bit with probability one
    half."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


_Index = NDArray[np.int64]

_SHORT_CHUNK = 32  # chunks up to this length are padded to one group; longer ones by power of two
_SCORED_ROWS = 128  # logits of scored prompts are computed in slices, since a vocabulary is wide


class ModelRunner:
    """One policy version's model over the shared memory."""

    def __init__(self, model: Model, memory: Memory) -> None:
        self.model = model
        self._memory = memory
        self.num_computed_tokens = 0
        """Tokens that passed the model so far; cached prefixes are not among them."""

    @torch.inference_mode()
    def run(self, batch: Batch) -> list[Sampled]:
        """Return the sample of each chunk that samples, in order; prompt log-probs are filled
        in."""
        sizes = np.array([chunk.stop - chunk.start for chunk in batch])
        ends = np.cumsum(sizes)
        tokens_N = np.concatenate([c.request.tokens[c.start : c.stop] for c in batch])
        first_N = np.repeat(ends - sizes - np.array([chunk.start for chunk in batch]), sizes)
        positions_N = np.arange(ends[-1]) - first_N
        rows_N = np.repeat(np.array([c.request.row for c in batch]), sizes)
        self.num_computed_tokens += len(tokens_N)
        hidden_NW = self.model.hidden(
            torch.from_numpy(tokens_N.astype(np.int64)),
            torch.from_numpy(positions_N),
            torch.from_numpy(self._memory.table[rows_N, positions_N]),
            self._memory.kv,
            list(self._groups(batch)),
            applied(batch, ends),
        )
        for chunk, end in zip(batch, ends, strict=True):
            if chunk.request.is_scoring:
                self._score(chunk, hidden_NW[end - (chunk.stop - chunk.start) : end])
        return self._draw(batch, ends, hidden_NW)

    def _draw(self, batch: Batch, ends: _Index, hidden_NW: Tensor) -> list[Sampled]:
        drawing = [at for at, chunk in enumerate(batch) if chunk.samples]
        if not drawing:
            return []
        last_R = torch.from_numpy(ends[drawing] - 1)
        logits_RV = self.model.logits(hidden_NW.index_select(0, last_R))
        requests = [batch[at].request for at in drawing]
        for row, request in enumerate(requests):
            if request.is_shaped:
                shape_row(logits_RV[row], request)
        samplings = [request.sampling for request in requests]
        tokens, logprobs = draw(logits_RV, samplings, [batch[at].stop for at in drawing])
        return list(zip(tokens, logprobs, tops(logits_RV, requests), strict=True))

    def _score(self, chunk: Chunk, hidden_TW: Tensor) -> None:
        """Add log-probs, at temperature 1, of the prompt tokens that follow those of the chunk."""
        request = chunk.request
        assert request.logprob_start is not None
        first = max(chunk.start, request.logprob_start)
        stop = min(chunk.stop, request.num_prompt_tokens - 1)
        targets = torch.from_numpy(request.tokens[first + 1 : stop + 1].astype(np.int64))
        hidden_TW = hidden_TW[first - chunk.start : stop - chunk.start]
        for at in range(0, len(targets), _SCORED_ROWS):
            part = slice(at, at + _SCORED_ROWS)
            logprobs_TV = self.model.logits(hidden_TW[part]).log_softmax(dim=-1)
            picked_T1 = logprobs_TV.gather(1, targets[part].unsqueeze(1))
            request.prompt_logprobs.extend(picked_T1.squeeze(1).tolist())
            if request.num_top:
                counts = [request.num_top] * len(logprobs_TV)
                request.prompt_tops.extend(likeliest(logprobs_TV, counts))

    def _groups(self, batch: Batch) -> Iterator[Rows]:
        """Yield groups of adjacent chunks of similar length."""
        start = first = 0
        for at, chunk in enumerate(batch):
            if at + 1 < len(batch) and length_class(batch[at + 1]) == length_class(chunk):
                continue
            members = batch[first : at + 1]
            rows = self._rows(members, start)
            yield rows
            start, first = rows.stop, at + 1

    def _rows(self, chunks: Batch, start: int) -> Rows:
        """Return the attention group of `chunks`, whose tokens begin at `start` of N."""
        starts_B = np.array([chunk.start for chunk in chunks])
        stops_B = np.array([chunk.stop for chunk in chunks])
        sizes_B = stops_B - starts_B
        rows_B = np.array([chunk.request.row for chunk in chunks])
        slots_BS = self._memory.table[rows_B, : stops_B.max()]
        num_padded = int(sizes_B.max())
        pad_BT = unpad_n = None
        if num_padded > 1 and len(chunks) > 1:
            pad_BT, unpad_n = padding(sizes_B, num_padded)
        positions_BT = starts_B[:, None] + np.arange(num_padded)
        sees_BTS = np.arange(slots_BS.shape[1]) <= positions_BT[:, :, None]
        mask_BTS = torch.zeros(sees_BTS.shape, dtype=self.model.dtype)
        mask_BTS.masked_fill_(torch.from_numpy(~sees_BTS), -torch.inf)
        return Rows(
            start=start,
            stop=start + int(sizes_B.sum()),
            slots_BS=torch.from_numpy(slots_BS),
            mask_BTS=mask_BTS,
            pad_BT=pad_BT,
            unpad_n=unpad_n,
        )


def applied(batch: Batch, ends: _Index) -> list[AppliedAdapter]:
    """Return the adapters of a step, each with the indices of its tokens among N."""
    found = {id(each): each for chunk in batch if (each := chunk.request.adapter)}
    if not found:
        return []
    if len(found) == 1 and all(chunk.request.adapter for chunk in batch):
        return [(adapter, None) for adapter in found.values()]
    places: dict[int, list[_Index]] = {each: [] for each in found}
    for chunk, end in zip(batch, ends, strict=True):
        if chunk.request.adapter:
            own = np.arange(end - (chunk.stop - chunk.start), end)
            places[id(chunk.request.adapter)].append(own)
    return [(found[each], torch.from_numpy(np.concatenate(places[each]))) for each in found]


def shape_row(logits_V: Tensor, request: Request) -> None:
    """Change a request's logits in place, by its output so far."""
    output = request.tokens[request.num_prompt_tokens : request.num_tokens].astype(np.int64)
    shape(logits_V, request.sampling.shaping, request.matcher, torch.from_numpy(output))


def tops(logits_RV: Tensor, requests: Sequence[Request]) -> Sequence[Top | None]:
    """Return the likeliest tokens of rows that request them."""
    found: list[Top | None] = [None] * len(requests)
    asking = [row for row, request in enumerate(requests) if request.num_top]
    if asking:
        logprobs_RV = tempered(logits_RV[asking], [requests[row].sampling for row in asking])
        counts = [requests[row].num_top for row in asking]
        for row, top in zip(asking, likeliest(logprobs_RV, counts), strict=True):
            found[row] = top
    return found


def length_class(chunk: Chunk) -> int:
    """Return the padding class of a chunk: single tokens, short ones, then powers of two."""
    length = chunk.stop - chunk.start
    if length == 1:
        return 0
    return 1 if length <= _SHORT_CHUNK else length.bit_length()


def padding(sizes_B: _Index, num_padded: int) -> tuple[Tensor, Tensor]:
    """Return (B, T) indices of packed tokens, padding at 0; and (n,) indices back into B * T."""
    real_BT = np.arange(num_padded) < sizes_B[:, None]
    pad_BT = np.zeros(real_BT.shape, dtype=np.int64)
    pad_BT[real_BT] = np.arange(int(sizes_B.sum()))
    return torch.from_numpy(pad_BT), torch.from_numpy(np.flatnonzero(real_BT))
