"""Ends the processes of a pipeline's run, all of them, on this machine.

- Only a run that has the pipeline's name at the scheduler is ended: its launch, matched by pid and
  start time, and the processes that carry the mark in the record of that launch.
- Only the record's owner and root may have a run ended.
- `end` returns only when all have ended, since their GPUs are then given to others.
"""

import os
import select
import signal
import socket

from rollmesh.core.errors import ConfigError, UserError
from rollmesh.core.share import StoredClaim, is_same_machine, place, read_claim, uid_of
from rollmesh.wire.scheduling import RunClaim

GONE_MS = 10_000


def end(run: RunClaim, pipeline_id: str, caller_uid: int) -> int:
    """SIGKILL to the launch of `run` and to all that carries its mark; return how many there were.

    UserError where the run is not this machine's, its record cannot be trusted, `caller_uid` may
    not have it ended, or a process does not end.
    """
    if not is_same_machine(run.place, place()):
        raise UserError(
            f"pid {run.pid} is on {run.host}, and the admission process on "
            f"{socket.gethostname()}, or in another container; end it there, then say --dead"
        )
    try:
        record = read_claim(run.record, run.run_id, pipeline_id)
    except ConfigError as error:
        raise ConfigError(
            f"the run of {pipeline_id} (pid {run.pid}): {error}; end it by hand, then say --dead"
        ) from None
    _check(record, caller_uid)
    num = _end_launch(record) + record.end_marked()
    if record.end_marked():
        raise UserError(
            f"processes of {pipeline_id} do not end; its GPUs stay its own until they have"
        )
    return num


def _check(record: StoredClaim, caller_uid: int) -> None:
    """UserError where this caller may not have the run ended, or we are its launch."""
    pid = record.claimed.pid
    if caller_uid not in (0, record.uid):
        raise UserError(
            f"pid {pid} is of user {record.uid}: user {caller_uid} may not end it; ask that user, "
            "or root"
        )
    if not is_same_machine(record.claimed.place, place()) or pid == os.getpid():
        raise UserError(f"the record of pid {pid} is not of a run of this machine")


def _end_launch(record: StoredClaim) -> int:
    """SIGKILL to the launch, if it still runs; how many that are."""
    pid = record.claimed.pid
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:  # it has ended
        return 0
    try:
        is_owners = record.uid in (0, uid_of(pid))
        if not record.is_alive or not is_owners:  # the pid is another process's by now
            return 0
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        ended = select.poll()
        ended.register(descriptor, select.POLLIN)
        if not ended.poll(GONE_MS):
            raise UserError(f"pid {pid} does not end; its GPUs stay its own until it has")
    except ProcessLookupError:
        return 0
    finally:
        os.close(descriptor)
    return 1
