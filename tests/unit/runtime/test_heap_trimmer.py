"""The heap trimmer trims when enough was freed, not too often, and never if it cannot."""

import threading

from rollmesh.core.heap import SOME_FREED_BYTES, Heap, note_freed
from rollmesh.runtime.heap_trimmer import (
    MIN_FREED_BYTES,
    MIN_INTERVAL_S,
    SETTLED_S,
    HeapTrimmer,
    TrimPlan,
)
from rollmesh.testing.clock import FakeClock


def test_many_freed_bytes_are_returned_at_once() -> None:
    plan = TrimPlan()
    assert not plan.is_due(MIN_FREED_BYTES - 1, 100.0)
    assert plan.is_due(MIN_FREED_BYTES, 100.1)


def test_trims_have_a_minimum_interval() -> None:
    plan = TrimPlan()
    plan.trimmed(0, 100.0)
    assert not plan.is_due(10 * MIN_FREED_BYTES, 100.0 + MIN_INTERVAL_S - 0.1)
    assert plan.is_due(10 * MIN_FREED_BYTES, 100.0 + MIN_INTERVAL_S)


def test_the_rest_is_returned_when_nothing_more_is_freed() -> None:
    plan = TrimPlan()
    assert not plan.is_due(SOME_FREED_BYTES, 100.0)
    assert not plan.is_due(
        SOME_FREED_BYTES + 1, 100.0 + SETTLED_S
    )  # more was freed, so the heap has not settled
    assert plan.is_due(SOME_FREED_BYTES + 1, 100.0 + 2 * SETTLED_S)


def test_returned_bytes_are_not_returned_again() -> None:
    plan = TrimPlan()
    plan.is_due(MIN_FREED_BYTES, 100.0)
    plan.trimmed(MIN_FREED_BYTES, 100.0)
    assert not plan.is_due(MIN_FREED_BYTES + SOME_FREED_BYTES - 1, 1000.0)


class Library:
    """A malloc_trim that counts its calls and their threads."""

    def __init__(self) -> None:
        self.threads: list[str] = []
        self.called = threading.Event()

    def malloc_trim(self, _: object) -> int:
        self.threads.append(threading.current_thread().name)
        self.called.set()
        return 1


def figures(kept: HeapTrimmer) -> dict[str, float]:
    return {figure.name: figure.value for figure in kept.figures()}


def test_a_due_trim_runs_and_is_in_the_metrics() -> None:
    library, clock = Library(), FakeClock(100.0)
    kept = HeapTrimmer(clock, Heap(lambda: library))
    kept.turn()
    clock.advance(MIN_INTERVAL_S)
    note_freed(MIN_FREED_BYTES)
    kept.turn()
    kept.turn()
    values = figures(kept)
    assert (len(library.threads), values["trims_total"], values["trim_on"]) == (1, 1, True)
    assert 0 < values["trim_last_seconds"] == values["trim_worst_seconds"]


def test_the_trimmers_thread_trims_and_ends() -> None:
    library = Library()
    kept = HeapTrimmer(FakeClock(100.0), Heap(lambda: library))
    note_freed(MIN_FREED_BYTES)
    kept.start()
    try:
        assert library.called.wait(60.0)
    finally:
        kept.close()
    assert library.threads == ["keeper"]
    assert "keeper" not in [each.name for each in threading.enumerate()]


def test_without_malloc_trim_the_trimmer_does_nothing() -> None:
    kept = HeapTrimmer(FakeClock(), Heap(object))
    note_freed(MIN_FREED_BYTES)
    kept.start()
    kept.close()
    kept.turn()
    assert figures(kept)["trim_on"] is False
    assert figures(kept)["trims_total"] == 0
