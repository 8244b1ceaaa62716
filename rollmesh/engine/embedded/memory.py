"""Key-value memory: one tensor of slots, who owns each slot, and a table from positions to slots.

Invariant: each slot is free, or in one running request's private part, or in the prefix tree; a
request's slots are the tree's up to `num_shared` and its own from there to `num_computed`. Tokens
enter the tree when their computation is scheduled: within a step all keys of a layer are written
before any row attends, so siblings that start together share their prompt. Driven by the Scheduler;
the Runner reads the table and writes the tensor.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from rollmesh.engine.embedded.checkpoint import Architecture
from rollmesh.engine.embedded.prefix_tree import PrefixTree, Slots
from rollmesh.engine.embedded.request import Request

_EVICTED_SHARE = 16  # evict at least 1/16 of memory at once: finding leaves walks the tree


class Memory:
    """Slots of keys and values for `num_slots` tokens and `num_rows` running requests."""

    def __init__(
        self, architecture: Architecture, dtype: torch.dtype, num_slots: int, num_rows: int
    ) -> None:
        arch = architecture
        shape = (arch.num_layers, num_slots, 2, arch.num_kv_heads, arch.head_dim)
        self._shape = shape
        self.kv = torch.empty(0, dtype=dtype)
        self.retake_slots()
        self.num_slots = num_slots
        self.table: NDArray[np.int64] = np.zeros((num_rows, arch.max_context), dtype=np.int64)
        """Slot of each position of each row; stale past a row's num_computed."""
        self._free_rows = list(range(num_rows - 1, -1, -1))
        self.reset()

    def release_slots(self) -> None:
        """Give the tensor up; only when nothing is held, as after a reset."""
        assert self._num_free == self.num_slots, "keys are held"
        self.kv = torch.empty(0, dtype=self.kv.dtype)

    def retake_slots(self) -> None:
        """Have it again, or for the first time."""
        # Zeros, not empty: masked positions are still read, and a stray NaN would spread.
        self.kv = torch.zeros(self._shape, dtype=self.kv.dtype)

    def reset(self) -> None:
        """Forget all prefixes; only when no request is running."""
        assert len(self._free_rows) == len(self.table), "reset while requests run"
        self._free = np.arange(self.num_slots, dtype=np.int64)
        self._num_free = self.num_slots
        self._tree = PrefixTree()

    @property
    def num_available(self) -> int:
        """Slots that are free or can be made so."""
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
        """Give `request` a row and what is known of its prefix."""
        assert request.row < 0, "admitted twice"
        request.row = self._free_rows.pop()
        self.reuse(request)

    def reuse(self, request: Request) -> None:
        """Take over what the tree has learned of the request's tokens since the last look."""
        if (
            request.num_shared < request.num_computed
            or request.num_reusable <= request.num_computed
        ):
            return
        tokens = request.tokens[: request.num_reusable].tobytes()
        slots, node = self._tree.match(tokens, request.extra_key)
        if request.node is not None and len(slots) <= request.num_computed:
            return
        self._tree.hold(node)
        if request.node is not None:
            self._tree.let_go(request.node)
        request.node = node
        self.table[request.row, : len(slots)] = slots
        request.num_computed = request.num_shared = len(slots)

    def extend(self, request: Request, stop: int) -> bool:
        """Slots for the positions from num_computed to `stop`; False if memory is full.

        They count as computed from now on: the step that was scheduled with them computes them.
        """
        start = request.num_computed
        slots = self._take(stop - start)
        if slots is None:
            return False
        self.table[request.row, start:stop] = slots
        request.num_computed = stop
        return True

    def share(self, request: Request) -> None:
        """Put the request's computed tokens into the tree, but for its last, for siblings to use.

        Called after `reuse`, so the tree knows nothing more of it and no slot is there twice. A
        request that scores its prompt computes what the tree may know; it shares at its release.
        """
        if request.logprob_start is not None:
            return
        stop = min(request.num_computed, request.num_tokens - 1)
        if stop <= request.num_shared:
            return
        tokens, slots = request.tokens[:stop].tobytes(), self.table[request.row, :stop]
        num_known, node = self._tree.insert(tokens, slots, request.extra_key)
        assert num_known == request.num_shared, "shared a prefix that the tree has"
        self._tree.hold(node)
        if request.node is not None:
            self._tree.let_go(request.node)
        request.node, request.num_shared = node, stop

    def release(self, request: Request) -> None:
        """Take the row back; what the request computed stays in the tree until it is evicted."""
        row, stop = request.row, request.num_computed
        slots = self.table[row, :stop]
        tokens = request.tokens[:stop].tobytes()
        num_known, _ = self._tree.insert(tokens, slots, request.extra_key)
        self._give(slots[request.num_shared : max(request.num_shared, num_known)])
        if request.node is not None:
            self._tree.let_go(request.node)
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
