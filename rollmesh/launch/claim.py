"""A pipeline's name, which one run has at a time: claimed as it begins, given back once it ended.

    free ------------------------------claim--> ours --give back--> free
    a dead run's, of this place --end what is left of it, claim--> ours

- Before the name changes hands no process of the run before is left, so that its GPUs are free.
- What is left of a dead run is found by the record that its launch wrote (core/claimed.py), never
  by what a peer reports: a claim of another user, or a forged one, ends nothing.
- A run that is alive, or that cannot be looked at from here, keeps the name.
- Of two runs that claim it at once the scheduler refuses one.
- It is given back when nothing of this run can be on its GPUs any more.
"""

import os
import socket
from pathlib import Path

from rollmesh.core.claimed import Claimed, place, read_claimed, write_claimed
from rollmesh.core.errors import AddressError, ConfigError
from rollmesh.core.ids import new_id
from rollmesh.core.logs import get_logger
from rollmesh.core.process import start_ticks
from rollmesh.core.share import Share
from rollmesh.launch.share import ANSWER_S, GOES_ON, ask, look
from rollmesh.wire.scheduling import ClaimPipeline, RunClaim

log = get_logger()

LAST_S = 10.0
"""Seconds for which a run that has ended waits for the scheduler: as long as one takes to be
started again. One that runs answers at once."""
RUN_ID_BYTES = 8


def claim_of(share: Share, mark: str, runs: Path, *, owns_engines: bool) -> RunClaim:
    """Write the record of this process's run, whose processes carry `mark`; return its claim."""
    pid, run_id = os.getpid(), new_id("run-", RUN_ID_BYTES)
    here, ticks, record = place(), start_ticks(pid), ""
    if here and ticks:  # elsewhere (not Linux) nothing could be found by it
        claimed = Claimed(
            run_id=run_id,
            pipeline_id=share.pipeline_id,
            mark=mark,
            pid=pid,
            life=ticks,
            place=here,
        )
        record = str(write_claimed(runs, claimed))
    return RunClaim(run_id, socket.gethostname(), pid, here, ticks, owns_engines, record)


def take(share: Share, run: RunClaim) -> None:
    """Claim the name; UserError where another run has it, or the scheduler does not answer."""
    try:
        earlier = look(share).run
        if earlier:
            end(earlier, share)
        after = earlier.run_id if earlier else ""
        claim = ClaimPipeline(new_id("claim-"), share.pipeline_id, run, after, share.token)
        told = ask(share, claim, ANSWER_S)
        if told is None:
            raise AddressError(
                f"--scheduler {share.scheduler}: the scheduler does not answer any more"
            )
        answer, _ = told
        if not answer.ok:
            raise ConfigError(f"--pipeline {share.pipeline_id}: {answer.error}")
    except BaseException:
        _remove(run)
        raise
    if earlier:
        _remove(earlier)


def give_back(share: Share, run: RunClaim) -> str:
    """Report that all processes of `run` have ended, so that what it had is free.

    Return what to do where the scheduler did not answer, or ''.
    """
    ended = ClaimPipeline(new_id("dead-"), share.pipeline_id, None, run.run_id, share.token)
    told = ask(share, ended, LAST_S)
    if told and told[0].ok:
        _remove(run)
        return ""
    why = told[0].error if told else "it does not answer"
    return (
        f"{share.scheduler} could not be told that {share.pipeline_id} has ended ({why}): its next "
        f"run from here frees its GPUs, or `rollmesh scheduler kill {share.pipeline_id} --dead`"
    )


def end(earlier: RunClaim, share: Share) -> None:
    """End what is left of a run whose launch is dead; ConfigError where that still runs, or where
    this cannot be found out from here."""
    name, where = f"--pipeline {share.pipeline_id}", f"pid {earlier.pid} on {earlier.host}"
    free = f"`rollmesh scheduler kill {share.pipeline_id} --dead` frees its name"
    if not earlier.place or earlier.place != place():
        raise ConfigError(
            f"{name}: its last run ({where}) has not said that it has ended, and cannot be looked "
            f"at from here; once nothing of it is left, {free}"
        )
    if start_ticks(earlier.pid) == earlier.life:
        raise ConfigError(f"{name} ({where}): {GOES_ON}")
    try:
        record = read_claimed(earlier.record, earlier.run_id, share.pipeline_id)
    except ConfigError as error:
        raise ConfigError(
            f"{name}: its last run ({where}) has not ended in order, and {error}; once nothing of "
            f"it is left, {free}"
        ) from None
    if record.uid != os.getuid():
        raise ConfigError(
            f"{name}: its last run ({where}) has not ended in order, and its record "
            f"{earlier.record!r} is another user's; once nothing of it is left, {free}"
        )
    if record.is_alive or record.claimed.place != place():
        raise ConfigError(f"{name} (pid {record.claimed.pid}): {GOES_ON}")
    if num_left := record.end_marked():
        log.warning("leftovers.killed", run=earlier.run_id, num_processes=num_left)
    if record.end_marked():
        what = "processes of its last run cannot be ended"
        raise ConfigError(f"{name}: {what}; once they have ended, {free}")


def _remove(run: RunClaim) -> None:
    """Remove the record of a run that has ended."""
    if run.record:
        Path(run.record).unlink(missing_ok=True)
