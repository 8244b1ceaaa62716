"""When a worker has served long enough: its memory, its age in rollouts, what it could not end.

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


class Wear(msgspec.Struct, frozen=True):
    """What a worker has gathered."""

    rss_bytes: int
    num_rollouts: int
    num_left_behind: int


def worn_out(settings: WorkerConfig, wear: Wear) -> str:
    """Why the worker should make place for a fresh one; '' if it should not."""
    if 0 < settings.max_rss_bytes < wear.rss_bytes:
        return f"{wear.rss_bytes} bytes of memory, worker.max_rss_bytes = {settings.max_rss_bytes}"
    if 0 < settings.recycle_rollouts <= wear.num_rollouts:
        limit = settings.recycle_rollouts
        return f"{wear.num_rollouts} rollouts, worker.recycle_rollouts = {limit}"
    if wear.num_left_behind >= MAX_LEFT_BEHIND:
        return f"{wear.num_left_behind} calls of its environment never ended"
    return ""


def is_urgent(settings: WorkerConfig, wear: Wear) -> bool:
    """Whether it should not wait until it can be spared."""
    return 0 < URGENT_SHARE * settings.max_rss_bytes < wear.rss_bytes
