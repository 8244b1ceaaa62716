"""Pipelines with a resize under way: they are promised nothing more, and what waits behind one that
takes long is for others.

A pipeline has one resize at a time, so a worker that was promised GPUs while another one hangs
would keep them from everybody until the deadline. Invariant: who is busy (Pipeline.is_busy) is
promised nothing; what was sent is not called off. Owns nothing. Driven by scheduler.py, before each
plan and at each tick.
"""

from rollmesh.scheduler.service.book import Book
from rollmesh.scheduler.service.intents import Intents
from rollmesh.scheduler.service.records import IntentKind, IntentPhase


def call_off_late(book: Book, intents: Intents) -> None:
    """Note who is busy; have others use what workers wait for behind a late resize."""
    busy = {each.pipeline_id for each in book.intents.values() if each.phase is IntentPhase.SENT}
    for name, pipeline in book.state.pipelines.items():
        pipeline.is_busy = name in busy
    for name in _late(book):
        intents.call_off(name, "a resize before it takes long")


def is_held_up(book: Book) -> bool:
    """Whether there is something to call off."""
    late = _late(book)
    planned = (each for each in book.intents.values() if each.phase is IntentPhase.PLANNED)
    return any(each.kind is IntentKind.WAKE and each.pipeline_id in late for each in planned)


def _late(book: Book) -> dict[str, None]:
    """Pipelines whose resize was not done within `promise_s`, in the order of their intents."""
    settings = book.settings
    left_s = settings.resize_deadline_s + settings.slack_s - settings.promise_s
    sent = (each for each in book.intents.values() if each.phase is IntentPhase.SENT)
    return dict.fromkeys(each.pipeline_id for each in sent if each.until_s <= book.now_s + left_s)
