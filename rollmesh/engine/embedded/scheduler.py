"""Chooses the tokens of each step, and manages the slots of keys and values.

- Each slot is free, or private to one running request, or in the prefix tree; a request's slots are
  the tree's up to `num_shared` and its own up to `num_computed`.
- Tokens enter the tree when their computation is scheduled: in a step all keys of a layer are
  written before any row attends, so siblings that start together share their prompt.
- Each decoding request is in every step, so a long prompt never stalls it. Requests start in order;
  when memory is full the youngest returns to the queue, so the oldest always ends.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from rollmesh.engine.embedded.checkpoint import Architecture
from rollmesh.engine.embedded.prefix_tree import PrefixTree, Slots
from rollmesh.engine.embedded.request import (
    ABORTED,
    FinishReason,
    Progress,
    Request,
    RequestPhase,
    Top,
)

_EVICTED_SHARE = 16  # evict at least 1/16 of memory at once, since finding leaves walks the tree


class Memory:
    """Slots of keys and values for `num_slots` tokens and `num_rows` running requests."""

    def __init__(
        self, architecture: Architecture, dtype: torch.dtype, num_slots: int, num_rows: int
    ) -> None:
        arch = architecture
        shape = (arch.num_layers, num_slots, 2, arch.num_kv_heads, arch.head_dim)
        self._shape = shape
        self.kv = torch.empty(0, dtype=dtype)
        self.allocate_slots()
        self.num_slots = num_slots
        self.table: NDArray[np.int64] = np.zeros((num_rows, arch.max_context), dtype=np.int64)
        """Slot of each position of each row; stale past a row's num_computed."""
        self._free_rows = list(range(num_rows - 1, -1, -1))
        self.reset()

    def release_slots(self) -> None:
        """Free the tensor; only when no slot is held, as after a reset."""
        assert self._num_free == self.num_slots, "keys are held"
        self.kv = torch.empty(0, dtype=self.kv.dtype)

    def allocate_slots(self) -> None:
        """Allocate the tensor."""
        # Zeros, not empty: masked positions are still read, and a stray NaN would spread.
        self.kv = torch.zeros(self._shape, dtype=self.kv.dtype)

    def reset(self) -> None:
        """Drop all cached prefixes; only when no request is running."""
        assert len(self._free_rows) == len(self.table), "reset while requests run"
        self._free = np.arange(self.num_slots, dtype=np.int64)
        self._num_free = self.num_slots
        self._tree = PrefixTree()

    @property
    def num_available(self) -> int:
        """Slots that are free or can be freed."""
        return self._num_free + self._tree.num_evictable

    @property
    def num_held(self) -> int:
        """Slots that running requests use."""
        return self.num_slots - self.num_available

    @property
    def has_free_row(self) -> bool:
        """Whether one more request can run."""
        return bool(self._free_rows)

    def admit(self, request: Request) -> None:
        """Give `request` a row and its cached prefix."""
        assert request.row < 0, "admitted twice"
        request.row = self._free_rows.pop()
        self.reuse(request)

    def reuse(self, request: Request) -> None:
        """Use tokens that entered the tree since the last look."""
        if (
            request.num_shared < request.num_computed
            or request.num_reusable <= request.num_computed
        ):
            return
        tokens = request.tokens[: request.num_reusable].tobytes()
        slots, node = self._tree.match(tokens, request.extra_key)
        if request.node is not None and len(slots) <= request.num_computed:
            return
        self._tree.pin(node)
        if request.node is not None:
            self._tree.unpin(request.node)
        request.node = node
        self.table[request.row, : len(slots)] = slots
        request.num_computed = request.num_shared = len(slots)

    def extend(self, request: Request, stop: int) -> bool:
        """Allocate slots for positions num_computed to `stop`; return False if memory is full.

        They count as computed from now on, as the step that was scheduled with them computes them.
        """
        start = request.num_computed
        slots = self._take(stop - start)
        if slots is None:
            return False
        self.table[request.row, start:stop] = slots
        request.num_computed = stop
        return True

    def share(self, request: Request) -> None:
        """Add the request's computed tokens, except the last, to the tree for siblings.

        Called after `reuse`, so the tree has none of them and no slot is there twice. A request
        that scores its prompt computes tokens that the tree may have; it shares at its release.
        """
        if request.logprob_start is not None:
            return
        stop = min(request.num_computed, request.num_tokens - 1)
        if stop <= request.num_shared:
            return
        tokens, slots = request.tokens[:stop].tobytes(), self.table[request.row, :stop]
        num_known, node = self._tree.insert(tokens, slots, request.extra_key)
        assert num_known == request.num_shared, "shared a prefix that the tree has"
        self._tree.pin(node)
        if request.node is not None:
            self._tree.unpin(request.node)
        request.node, request.num_shared = node, stop

    def release(self, request: Request) -> None:
        """Free the row; computed tokens stay in the tree until evicted."""
        row, stop = request.row, request.num_computed
        slots = self.table[row, :stop]
        tokens = request.tokens[:stop].tobytes()
        num_known, _ = self._tree.insert(tokens, slots, request.extra_key)
        self._give(slots[request.num_shared : max(request.num_shared, num_known)])
        if request.node is not None:
            self._tree.unpin(request.node)
        request.node = None
        request.row = -1
        request.num_computed = request.num_shared = 0
        self._free_rows.append(row)

    def _take(self, num_slots: int) -> Slots | None:
        if num_slots > self._num_free:
            if num_slots > self.num_available:
                return None
            wanted = max(num_slots - self._num_free, self.num_slots // _EVICTED_SHARE)
            for slots in self._tree.evict(wanted):
                self._give(slots)
        self._num_free -= num_slots
        return self._free[self._num_free : self._num_free + num_slots].copy()

    def _give(self, slots: Slots) -> None:
        self._free[self._num_free : self._num_free + len(slots)] = slots
        self._num_free += len(slots)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens `start:stop` of a request, to be computed in this step."""

    request: Request
    start: int
    stop: int

    @property
    def samples(self) -> bool:
        """Whether the step samples the request's next token."""
        return self.stop == self.request.num_tokens and self.request.sampling.max_new_tokens > 0


Sampled = tuple[int, float, Top | None]
"""A sampled token, its log-prob and, if requested, the likeliest tokens at its position."""
Batch = list[Chunk]
"""Chunks of one step; single tokens first."""


class Scheduler:
    """Two queues and the rule that moves requests between them."""

    def __init__(self, memory: Memory, max_step_tokens: int) -> None:
        """`max_step_tokens`: prompt tokens that one step computes besides decoding requests."""
        self._memory = memory
        self._max_step_tokens = max_step_tokens
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self.running

    def schedule(self) -> Batch:
        """Return the next step's chunks; empty if there is nothing to do."""
        singles = self._decoding_chunks()
        prompts = self._prompt_chunks()
        while not singles and not prompts and len(self.running) > 1:
            self._retract_youngest()  # prompts alone have filled memory; the oldest must continue
            prompts = self._prompt_chunks()
        # A prompt with one unknown token is computed like a decoding request.
        singles += [chunk for chunk in prompts if chunk.stop - chunk.start == 1]
        return singles + [chunk for chunk in prompts if chunk.stop - chunk.start > 1]

    def settle(
        self, batch: Batch, sampled: Iterable[Sampled], policy_version: str
    ) -> list[Progress]:
        """Apply the step's tokens; return the progress, with finished requests released."""
        progress = []
        draws = iter(sampled)
        for chunk in batch:
            request = chunk.request
            if chunk.stop < request.num_tokens:
                continue
            finish = None
            if chunk.samples:
                token, logprob, top = next(draws)
                request.append(token, logprob, policy_version, top)
                finish = request.finish(token)
            else:
                finish = FinishReason("length", length=0)
            if finish is not None:
                self._end(request)
            if finish is not None or request.reports_progress:
                progress.append(
                    Progress(request, request.num_output_tokens, policy_version, finish)
                )
        if any(update.finish is not None for update in progress):
            self.running = [r for r in self.running if r.phase is RequestPhase.RUNNING]
        return progress

    def abort(self, chosen: Callable[[Request], bool], policy_version: str) -> list[Progress]:
        """End the chosen requests, waiting or running, with the tokens they have."""
        progress = []
        for request in [r for r in (*self.waiting, *self.running) if chosen(r)]:
            if request.phase is RequestPhase.RUNNING:
                self.running.remove(request)
            else:
                self.waiting.remove(request)
            self._end(request)
            progress.append(Progress(request, request.num_output_tokens, policy_version, ABORTED))
        return progress

    def retract_all(self) -> None:
        """Return all running requests to the queue, in order."""
        while self.running:
            self._retract_youngest()

    def _decoding_chunks(self) -> Batch:
        """Return one token of each decoding request; the youngest is retracted until memory
        suffices."""
        chunks: Batch = []
        at = 0
        while at < len(self.running):
            request = self.running[at]
            if request.num_pending > 1 or request.num_output_tokens == 0:
                at += 1
            elif self._memory.extend(request, request.num_tokens):
                chunks.append(Chunk(request, request.num_tokens - 1, request.num_tokens))
                at += 1
            else:
                assert len(self.running) > 1, "one request alone always fits"
                self._retract_youngest()
        return chunks

    def _prompt_chunks(self) -> Batch:
        """Return chunks of prompts in progress, then of requests that start."""
        chunks: Batch = []
        budget = self._max_step_tokens
        for request in self.running:
            if budget > 0 and request.num_pending > 0:
                budget -= self._add_chunk(chunks, request, budget)
        while budget > 0 and self.waiting and self._fits(self.waiting[0]):
            request = self.waiting.popleft()
            request.phase = RequestPhase.RUNNING
            self.running.append(request)
            self._memory.admit(request)
            if request.num_retractions == 0:
                request.num_cached = request.num_computed
            budget -= self._add_chunk(chunks, request, budget)
        return chunks

    def _add_chunk(self, chunks: Batch, request: Request, budget: int) -> int:
        """Schedule up to `budget` tokens of a prompt; return how many, 0 if memory is full."""
        self._memory.reuse(request)
        start = request.num_computed
        stop = min(request.num_tokens, start + budget)
        if not self._memory.extend(request, stop):
            return 0
        self._memory.share(request)
        chunks.append(Chunk(request, start, stop))
        return stop - start

    def _fits(self, request: Request) -> bool:
        """Whether `request` may start: its tokens fit, with a step of growth for all running
        ones."""
        if not self._memory.has_free_row:
            return False
        return (
            request.num_tokens + len(self.running) < self._memory.num_available or not self.running
        )

    def _retract_youngest(self) -> None:
        request = self.running.pop()
        self._memory.release(request)
        request.retract()
        self.waiting.appendleft(request)

    def _end(self, request: Request) -> None:
        if request.phase is RequestPhase.RUNNING:
            self._memory.release(request)
        request.phase = RequestPhase.FINISHED
