"""What has come of the newest ops, for whoever asks afterwards why something was so.

Owns the intents that have ended: the newest KEPT of the fleet, which the journal has too.
Invariant: they are only read, nothing is decided by them. Driven by intents.py; scheduler.py has
them told.
"""

from collections.abc import Iterable

from rollmesh.scheduler.planning.state import FIXED
from rollmesh.scheduler.service.book import Book
from rollmesh.scheduler.service.records import Intent

KEPT = 500
"""Some 100 kB of journal."""
TOLD = 3
"""Of a pipeline, in words."""


def remember(book: Book, intent: Intent) -> None:
    """It has ended."""
    book.ended[intent.intent_id] = intent
    book.mark("ended", intent.intent_id)
    while len(book.ended) > KEPT:
        oldest = next(iter(book.ended))
        del book.ended[oldest]
        book.mark("ended", oldest)


def told(ended: Iterable[Intent], now_s: float) -> dict[str, tuple[str, ...]]:
    """By pipeline the newest in words, the newest first."""
    lines: dict[str, list[str]] = {}
    for intent in ended:
        lines.setdefault(intent.pipeline_id, []).append(_line(intent, now_s))
    return {name: tuple(reversed(each[-TOLD:])) for name, each in lines.items()}


def _line(intent: Intent, now_s: float) -> str:
    what = intent.cluster if intent.rank == FIXED else f"worker {intent.rank}"
    took_s, ago_s = intent.ended_s - intent.planned_s, now_s - intent.ended_s
    why = f" ({intent.detail})" if intent.detail else ""
    return (
        f"{intent.kind} of {what} {intent.phase} {ago_s:.1f} s ago, {took_s:.1f} s after it was "
        f"planned{why}"
    )
