"""Who was on which GPU from when to when: what charts are drawn of.

Owns the span. Invariant: spans of one GPU do not overlap; a second who takes a GPU that is not
clear is a fault, and raised. Driven by fleet.py as it simulates, and by what reads a journal.
"""

import enum

import msgspec


class Use(enum.StrEnum):
    """What a GPU does, WAKE > SERVE > SLEEP for generation and FIXED for all else;
    LOST where nobody knows."""

    WAKE = "wake"
    SERVE = "serve"
    SLEEP = "sleep"
    FIXED = "fixed"
    LOST = "lost"


class Span(msgspec.Struct, frozen=True):
    """Of one GPU."""

    gpu: int
    pipeline_id: str
    label: str
    """`engine 3`, or the name of the fixed cluster."""
    use: Use
    start_s: float
    end_s: float


class Spans:
    """Takes down who comes and goes."""

    def __init__(self) -> None:
        self.done: list[Span] = []
        self._open: dict[int, tuple[str, str, Use, float]] = {}

    def enter(
        self, gpus: tuple[int, ...], pipeline_id: str, label: str, use: Use, now_s: float
    ) -> None:
        """Of GPUs that are clear."""
        for gpu in gpus:
            assert gpu not in self._open, f"GPU {gpu} serves {self._open[gpu]} and {pipeline_id}"
            self._open[gpu] = (pipeline_id, label, use, now_s)

    def leave(self, gpus: tuple[int, ...], now_s: float) -> None:
        """They are clear."""
        for gpu in gpus:
            pipeline_id, label, use, start_s = self._open.pop(gpu)
            if now_s > start_s:
                self.done.append(Span(gpu, pipeline_id, label, use, start_s, now_s))

    def turn(self, gpus: tuple[int, ...], use: Use, now_s: float) -> None:
        """Who is there does something else."""
        pipeline_id, label, _, _ = self._open[gpus[0]]
        self.leave(gpus, now_s)
        self.enter(gpus, pipeline_id, label, use, now_s)

    def is_clear(self, gpus: tuple[int, ...]) -> bool:
        return self._open.keys().isdisjoint(gpus)

    def close(self, now_s: float) -> list[Span]:
        """All of them, those that are open cut here."""
        self.leave(tuple(self._open), now_s)
        return sorted(self.done, key=lambda span: (span.gpu, span.start_s))
