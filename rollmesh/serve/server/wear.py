"""When a worker has served long enough: its memory, open files, rollouts, what it could not end.

    FRESH --a limit is passed--> WORN OUT (it leaves as soon as the router can spare it)
             --its memory is far past--> URGENTLY (it drains now)

Invariant: pure; the reason names the setting. What a process gathers that nobody gives back (leaks
of environment code, calls that never end) goes with it; by its exit code it asks for a fresh one in
its place. Driven by worker.py, at each tick.
"""

import msgspec

from rollmesh.core.config import WorkerConfig

MAX_LEFT_BEHIND = 100
"""Calls of environment code that were given up and never ended: threads and coroutines."""
URGENT_SHARE = 1.25
"""With so much more memory than it may have, a worker waits for nobody."""
MAX_OPEN_SHARE, URGENT_OPEN_SHARE = 0.9, 0.97
"""The same of open files: without one, all that it runs fails."""


class Wear(msgspec.Struct, frozen=True):
    """What a worker has gathered."""

    rss_bytes: int
    num_rollouts: int
    num_left_behind: int
    open_share: float = 0.0
    """Of the files that it may hold open, those that it does."""


def worn_out(settings: WorkerConfig, wear: Wear) -> str:
    """Why the worker should make place for a fresh one; '' if it should not."""
    if 0 < settings.max_rss_bytes < wear.rss_bytes:
        return f"{wear.rss_bytes} bytes of memory, worker.max_rss_bytes = {settings.max_rss_bytes}"
    if 0 < settings.recycle_rollouts <= wear.num_rollouts:
        limit = settings.recycle_rollouts
        return f"{wear.num_rollouts} rollouts, worker.recycle_rollouts = {limit}"
    if wear.num_left_behind >= MAX_LEFT_BEHIND:
        return f"{wear.num_left_behind} calls of its environment never ended"
    if wear.open_share >= MAX_OPEN_SHARE:
        return f"{wear.open_share:.0%} of the files that it may hold open are (ulimit -n)"
    return ""


def is_urgent(settings: WorkerConfig, wear: Wear) -> bool:
    """Whether it should not wait until it can be spared."""
    is_heavy = 0 < URGENT_SHARE * settings.max_rss_bytes < wear.rss_bytes
    return is_heavy or wear.open_share >= URGENT_OPEN_SHARE
