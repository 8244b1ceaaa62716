"""Suspects: groups under which a worker ended. A task that kills is stopped, its neighbours spared.

    CLEAR --its worker fell silent, stalled or ended--> SUSPECT --its worker speaks again--> CLEAR
                     SUSPECT --MAX_DEATHS workers have ended under it--> quarantined: it FAILED

Who of a worker's groups killed it, nobody knows. So each is a suspect, and next runs where no other
suspect is being watched: a group is watched for as long as it had run when its worker ended, then
the next may join it. Invariants: a group fails as quarantined only after MAX_DEATHS workers are
known to have ended under it; silence alone makes a suspect, never a culprit; a suspect waits at
most SUSPECT_WAIT_BEATS for a worker of its own, or for word of the two that fell silent under it.
Driven by crew.py and deals.py.
"""

from rollmesh.serve.router.groups import Death, Group
from rollmesh.serve.router.lives import Life
from rollmesh.serve.router.workers import Worker

MAX_DEATHS = 2
MAX_WATCH_BEATS = 60
"""No suspect is watched longer, however long it had run."""
SUSPECT_WAIT_BEATS = 60
"""A suspect that found no worker of its own for so long runs beside another."""


def blame(group: Group, worker: Worker, cause: str, now_s: float, *, is_certain: bool) -> None:
    """`worker` has ended, or seems to have, while it ran `group`."""
    others = [each for each in group.deaths if each.life != worker.life]
    death = Death(worker.life, cause, is_certain)
    group.deaths = (*others, death)
    if group.worker_id == worker.worker_id:
        group.ran_s = max(group.ran_s, now_s - group.assigned_s)


def absolve(group: Group, life: Life) -> bool:
    """That process lives after all, or left in peace; whether it had been held against `group`."""
    before = group.deaths
    group.deaths = tuple(each for each in before if each.life != life)
    return len(group.deaths) < len(before)


def confirm(group: Group, life: Life, cause: str) -> None:
    """That process has ended for certain, and the cause is known better now."""
    group.deaths = tuple(
        Death(each.life, cause, is_certain=True) if each.life.may_be(life) else each
        for each in group.deaths
    )


def verdict(group: Group) -> str:
    """Why the group is quarantined; '' if it is not."""
    causes = [f"{each.life.worker_id}: {each.cause}" for each in group.deaths if each.is_certain]
    if len(causes) < MAX_DEATHS:
        return ""
    return f"quarantined: {len(causes)} workers ended under it ({'; '.join(causes)})"


def is_pending(group: Group) -> bool:
    """Whether word of a worker that fell silent may yet make a culprit of the group."""
    return len(group.deaths) >= MAX_DEATHS


def watch(group: Group, worker: Worker, now_s: float, beat_s: float) -> None:
    """`worker` runs `group` from now on; if that is a suspect, no other comes for a while."""
    if group.deaths:
        until_s = now_s + min(group.ran_s, MAX_WATCH_BEATS * beat_s)
        worker.watch_until_s = max(worker.watch_until_s, until_s)


def unwatch(worker: Worker, now_s: float) -> bool:
    """Look whether the watched time is over; True if it just ended."""
    if not worker.watch_until_s:
        return False
    if now_s < worker.watch_until_s and any(group.deaths for group in worker.groups.values()):
        return False
    worker.watch_until_s = 0.0
    return True
