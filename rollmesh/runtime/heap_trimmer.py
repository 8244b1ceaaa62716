"""A thread that returns freed memory to the system (malloc_trim) and spills cold blobs.

    QUIET --MIN_FREED_BYTES freed, or SOME_FREED_BYTES and then none for SETTLED_S-->
    DUE --MIN_INTERVAL_S after the last trim--> trimmed --> QUIET

A trim holds the arena's lock for milliseconds, so it never runs on the event loop. TrimPlan decides
and is pure. If the heap cannot be trimmed, one line is logged, and blobs are still spilled.
"""

import threading
from collections.abc import Iterator

from rollmesh.core import heap
from rollmesh.core.clock import Clock
from rollmesh.core.heap import SOME_FREED_BYTES, Heap
from rollmesh.core.logs import get_logger
from rollmesh.core.metrics import Figure
from rollmesh.runtime import blobs

LOOK_S = 0.5
MIN_FREED_BYTES = 32 * 2**20
SETTLED_S = 2.0
MIN_INTERVAL_S = 3.0

log = get_logger()


class TrimPlan:
    """Decides when to trim, from the bytes freed since the start."""

    def __init__(self, freed_bytes: int = 0) -> None:
        self._trimmed_s = float("-inf")
        self._trimmed_bytes = freed_bytes
        """Bytes freed before the last trim, or before this object was created."""
        self._seen_bytes = freed_bytes
        self._moved_s = 0.0
        """When something was last freed."""

    def is_due(self, freed_bytes: int, now_s: float) -> bool:
        """Whether a trim is worth its cost now."""
        if freed_bytes > self._seen_bytes:
            self._seen_bytes, self._moved_s = freed_bytes, now_s
        if now_s - self._trimmed_s < MIN_INTERVAL_S:
            return False
        freed = freed_bytes - self._trimmed_bytes
        is_settled = now_s - self._moved_s >= SETTLED_S
        return freed >= MIN_FREED_BYTES or (freed >= SOME_FREED_BYTES and is_settled)

    def trimmed(self, freed_bytes: int, now_s: float) -> None:
        """Record a trim, made when `freed_bytes` had been freed."""
        self._trimmed_bytes, self._trimmed_s = freed_bytes, now_s


class HeapTrimmer:
    """The trimming thread, from `start` to `close`."""

    def __init__(self, clock: Clock, own_heap: Heap | None = None) -> None:
        self.num_trims = 0
        self.last_trim_s = 0.0
        self.worst_trim_s = 0.0
        self.total_trim_s = 0.0
        self._clock = clock
        self._heap = own_heap or Heap()
        self._plan = TrimPlan(_freed_bytes())
        self._last_fault = ""
        """The last logged fault; each is logged once, since it may recur at each turn."""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="keeper", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        if not self._heap.can_trim:
            log.info("trim.off", why="malloc is not glibc's")
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join()

    def turn(self) -> None:
        """Spill excess blobs and trim if it is due; the thread calls this every LOOK_S."""
        blobs.spill_over()
        now_s, freed = self._clock.now_s(), _freed_bytes()
        if not self._heap.can_trim or not self._plan.is_due(freed, now_s):
            return
        took_s = self._heap.trim() or 0.0
        self._plan.trimmed(freed, self._clock.now_s())
        self.num_trims += 1
        self.last_trim_s = took_s
        self.worst_trim_s = max(self.worst_trim_s, took_s)
        self.total_trim_s += took_s

    def figures(self) -> Iterator[Figure]:
        """Metrics of the trimmer."""
        yield Figure("trim_on", self._heap.can_trim, "1 if freed memory is returned to the system.")
        yield Figure("trims_total", self.num_trims, "Trims so far.")
        yield Figure("trim_seconds_total", self.total_trim_s, "Total duration of all trims.")
        yield Figure("trim_last_seconds", self.last_trim_s, "Duration of the last trim.")
        yield Figure("trim_worst_seconds", self.worst_trim_s, "Duration of the longest trim.")
        yield Figure(
            "freed_bytes_total",
            _freed_bytes(),
            "Freed bytes of bodies, sessions and blobs.",
        )
        yield Figure("spilled_bytes", blobs.spilled_bytes(), "Bytes of blobs on disk.")

    def _run(self) -> None:
        while not self._closing.wait(LOOK_S):
            try:
                self.turn()
            except Exception as error:  # door: one failed turn must not end the thread
                if str(error) != self._last_fault:
                    self._last_fault = str(error)
                    log.exception("heap_trimmer.failed")


def _freed_bytes() -> int:
    return heap.freed_bytes() + blobs.freed_bytes()
