"""Spans of GPUs: one at a time."""

import pytest

from rollmesh.scheduler.simulator.spans import Span, Spans, Use


def test_who_does_something_else_has_a_span_for_each() -> None:
    spans = Spans()
    spans.enter((0, 1), "a", "engine 0", Use.WAKE, 1.0)
    spans.turn((0, 1), Use.SERVE, 4.0)
    spans.leave((0, 1), 6.0)
    assert spans.is_clear((0, 1))
    spans.enter((1,), "b", "actor_train", Use.FIXED, 6.0)
    assert spans.close(9.0) == [
        Span(0, "a", "engine 0", Use.WAKE, 1.0, 4.0),
        Span(0, "a", "engine 0", Use.SERVE, 4.0, 6.0),
        Span(1, "a", "engine 0", Use.WAKE, 1.0, 4.0),
        Span(1, "a", "engine 0", Use.SERVE, 4.0, 6.0),
        Span(1, "b", "actor_train", Use.FIXED, 6.0, 9.0),
    ]


def test_a_second_on_a_gpu_is_a_fault() -> None:
    spans = Spans()
    spans.enter((0,), "a", "engine 0", Use.SERVE, 0.0)
    assert not spans.is_clear((0, 1))
    with pytest.raises(AssertionError, match="GPU 0"):
        spans.enter((0,), "b", "engine 0", Use.SERVE, 1.0)
