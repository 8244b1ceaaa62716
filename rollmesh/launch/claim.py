"""A pipeline's name, which one run has at a time: taken as it begins, given back as it has ended.

    nobody's ------------------take-----------> ours --give back--> nobody's
    a dead run's, of this place --end what is left of it, take--> ours

Invariants: before the name changes hands no process of the run before is left, so that its GPUs are
nobody's; a run that lives, or that cannot be looked at from here, keeps it; who decides between two
that take it at once is the scheduler. It is given back when nothing of ours can be on its GPUs any
more. Driven by run.py.
"""

import os
import socket
from pathlib import Path

from rollmesh.core.errors import AddressError, ConfigError
from rollmesh.core.ids import new_id
from rollmesh.core.logs import get_logger
from rollmesh.core.process import start_ticks
from rollmesh.core.share import Share
from rollmesh.core.warden import kill_marked
from rollmesh.launch.share import ANSWER_S, GOES_ON, ask, look
from rollmesh.wire.scheduling import ClaimPipeline, RunClaim

log = get_logger()

LAST_S = 10.0
"""So long a run that has ended waits to be heard: as long as a scheduler takes to be started again.
One that is there answers at once."""


def claim_of(mark: str, *, owns_engines: bool) -> RunClaim:
    """This process's, for a run whose processes carry `mark`."""
    pid = os.getpid()
    return RunClaim(mark, socket.gethostname(), pid, place(), start_ticks(pid), owns_engines)


def take(share: Share, run: RunClaim) -> None:
    """UserError where the name is another's, or nobody answers."""
    earlier = look(share).run
    if earlier:
        end(earlier, share)
    after = earlier.mark if earlier else ""
    told = ask(share, ClaimPipeline(new_id("claim-"), share.pipeline_id, run, after), ANSWER_S)
    if told is None:
        raise AddressError(f"--scheduler {share.scheduler}: nobody answers any more")
    answer, _ = told
    if not answer.ok:
        raise ConfigError(f"--pipeline {share.pipeline_id}: {answer.error}")


def give_back(share: Share, run: RunClaim) -> str:
    """All processes of `run` are dead: what it had is free. What to do where the scheduler did not
    hear of it; else ''."""
    ended = ClaimPipeline(new_id("dead-"), share.pipeline_id, None, run.mark)
    told = ask(share, ended, LAST_S)
    if told and told[0].ok:
        return ""
    why = told[0].error if told else "it does not answer"
    return (
        f"{share.scheduler} could not be told that {share.pipeline_id} has ended ({why}): its next "
        f"run from here frees its GPUs, or `rollmesh scheduler kill {share.pipeline_id} --dead`"
    )


def end(earlier: RunClaim, share: Share) -> None:
    """See to it that nothing is left of a run whose launch is dead; ConfigError where it lives, or
    where nobody can tell."""
    name, where = f"--pipeline {share.pipeline_id}", f"pid {earlier.pid} on {earlier.host}"
    free = f"`rollmesh scheduler kill {share.pipeline_id} --dead` frees its name"
    if not earlier.place or earlier.place != place():
        raise ConfigError(
            f"{name}: its last run ({where}) has not said that it has ended, and cannot be looked "
            f"at from here; once nothing of it is left, {free}"
        )
    if start_ticks(earlier.pid) == earlier.life:
        raise ConfigError(f"{name} ({where}): {GOES_ON}")
    if num_left := kill_marked(earlier.mark):
        log.warning("leftovers.killed", run=earlier.mark, num_processes=num_left)
    if kill_marked(earlier.mark):
        what = "processes of its last run cannot be ended"
        raise ConfigError(f"{name}: {what}; once they have ended, {free}")


def place() -> str:
    """Of this machine since its start, this pid namespace and this user: processes of another one
    cannot all be seen, nor ended. '' where that cannot be told (not Linux)."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return ""
    return f"{boot}/{namespace}/{os.getuid()}"
