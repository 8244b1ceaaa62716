"""Whose turn it is: a pipeline's resizes are done one after another, but none waits for who hangs.

    resize   SENT, in its turn -> ended;  turn_s passes -> SENT, overdue -> ended, or its deadline

A pipeline is busy while a resize of it has its turn: it is promised nothing more, and nothing is
begun there. One that is overdue keeps only the GPUs of its own engines, until these have answered
or are lost. Invariant: so an op waits for a resize before it no longer than `turn_s`, however long
the deadline is. Owns nothing. Driven by intents.py, and by scheduler.py before each plan and at
each tick.
"""

from rollmesh.scheduler.service.book import Book
from rollmesh.scheduler.service.records import Intent, IntentKind, IntentPhase
from rollmesh.scheduler.service.settings import SchedulerSettings


def limit_s(settings: SchedulerSettings, kind: IntentKind) -> float:
    """A resize that wakes, or one that puts to sleep, has so long for all of it."""
    if kind is IntentKind.WAKE:
        return settings.resize_deadline_s
    return min(settings.sleep_deadline_s, settings.resize_deadline_s)


def has_turn(book: Book, intent: Intent) -> bool:
    """Whether it is under way, and the next resize of its pipeline waits for it."""
    if intent.phase is not IntentPhase.SENT:
        return False
    settings = book.settings
    left_s = limit_s(settings, intent.kind) + settings.slack_s - settings.turn_s
    return book.now_s < intent.until_s - left_s


def note_turns(book: Book) -> bool:
    """Note who is busy; whether somebody is so no more."""
    busy = {each.pipeline_id for each in book.intents.values() if has_turn(book, each)}
    is_over = False
    for name, pipeline in book.state.pipelines.items():
        is_over |= pipeline.is_resizing and name not in busy
        pipeline.is_resizing = name in busy
    return is_over
