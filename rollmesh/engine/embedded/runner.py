"""Turns a step's chunks into tensors, runs the model once over all of them, and draws tokens.

Invariant: one forward pass per step, whatever mix of prompts and decoding requests it holds; the
cost in Python does not grow with the tokens. Driven by Engine.step.

Shapes: N tokens of the step, B rows of an attention group, T their padded new tokens, S their
padded context, R rows that draw, V vocabulary.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollmesh.engine.embedded.adapters import Applied
from rollmesh.engine.embedded.memory import Memory
from rollmesh.engine.embedded.model import Model, Rows
from rollmesh.engine.embedded.request import Request, Top
from rollmesh.engine.embedded.sampler import draw, likeliest, tempered
from rollmesh.engine.embedded.scheduler import Batch, Chunk, Sampled
from rollmesh.engine.embedded.shaping import shape

_Index = NDArray[np.int64]

_SHORT_CHUNK = 32  # chunks up to this length are padded to one group; longer ones by power of two
_SCORED_ROWS = 128  # logits of scored prompts are made in slices: a vocabulary is wide


class Runner:
    """The model at work: one policy version's weights over the shared memory."""

    def __init__(self, model: Model, memory: Memory) -> None:
        self.model = model
        self._memory = memory
        self.num_computed_tokens = 0
        """Tokens that went through the model so far; prefix reuse shows as its absence here."""

    @torch.inference_mode()
    def run(self, batch: Batch) -> list[Sampled]:
        """What was drawn for each chunk that draws, in order; prompt log-probs are filled in."""
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
        """Log-probs, at temperature 1, of the prompt tokens that follow those of the chunk."""
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
        """Neighbouring chunks of like length, attended together."""
        start = first = 0
        for at, chunk in enumerate(batch):
            if at + 1 < len(batch) and length_class(batch[at + 1]) == length_class(chunk):
                continue
            members = batch[first : at + 1]
            rows = self._rows(members, start)
            yield rows
            start, first = rows.stop, at + 1

    def _rows(self, chunks: Batch, start: int) -> Rows:
        """The attention group of `chunks`, whose tokens begin at `start` of N."""
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


def applied(batch: Batch, ends: _Index) -> list[Applied]:
    """The adapters of a step, each with the places of its tokens among N."""
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
    """Change a request's logits in place, by what it has put out so far."""
    output = request.tokens[request.num_prompt_tokens : request.num_tokens].astype(np.int64)
    shape(logits_V, request.sampling.shaping, request.guide, torch.from_numpy(output))


def tops(logits_RV: Tensor, requests: Sequence[Request]) -> Sequence[Top | None]:
    """The likeliest tokens of the rows that ask for them."""
    found: list[Top | None] = [None] * len(requests)
    asking = [row for row, request in enumerate(requests) if request.num_top]
    if asking:
        logprobs_RV = tempered(logits_RV[asking], [requests[row].sampling for row in asking])
        counts = [requests[row].num_top for row in asking]
        for row, top in zip(asking, likeliest(logprobs_RV, counts), strict=True):
            found[row] = top
    return found


def length_class(chunk: Chunk) -> int:
    """Chunks of one class are padded together: single tokens, short, then powers of two."""
    length = chunk.stop - chunk.start
    if length == 1:
        return 0
    return 1 if length <= _SHORT_CHUNK else length.bit_length()


def padding(sizes_B: _Index, num_padded: int) -> tuple[Tensor, Tensor]:
    """(B, T) indices of packed tokens, padding at 0; and (n,) indices back into B * T."""
    real_BT = np.arange(num_padded) < sizes_B[:, None]
    pad_BT = np.zeros(real_BT.shape, dtype=np.int64)
    pad_BT[real_BT] = np.arange(int(sizes_B.sum()))
    return torch.from_numpy(pad_BT), torch.from_numpy(np.flatnonzero(real_BT))
