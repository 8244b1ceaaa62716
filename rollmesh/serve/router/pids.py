"""The workers of this machine: the kernel tells when their processes end, whoever started them.

Owns one pidfd (pidfd_open(2)) per local worker, MAX_PIDS at most. Invariants: an end is told once,
and one look late, so that launch, which knows the cause, is heard first; a pid of another pid
namespace, as that of a container, is not watched, whatever its host is called. Driven by
process.py, once per tick.
"""

import os
import select

from rollmesh.wire.messages import WorkerExited, WorkerHello

MAX_PIDS = 512
CAUSE = "its process is gone"


class LocalPids:
    """See the module."""

    def __init__(self, space: str) -> None:
        """`space` is that of our pids, as workers say theirs in their hello; '' watches nobody."""
        self._space = space
        self._poll = select.poll()
        self._worker_of: dict[int, tuple[str, int]] = {}
        """Worker id and pid, by pidfd."""
        self._ended: list[WorkerExited] = []

    def watch(self, hello: WorkerHello) -> None:
        """Tell when this worker's process ends, if that is one of ours."""
        worker = (hello.worker_id, hello.pid)
        is_known = worker in self._worker_of.values()
        is_ours = bool(self._space) and hello.pid_space == self._space
        if not is_ours or is_known or len(self._worker_of) >= MAX_PIDS:
            return
        try:
            pidfd = os.pidfd_open(hello.pid)
        except (OSError, OverflowError):  # not here, no pid at all, or a kernel without pidfds
            return
        self._worker_of[pidfd] = worker
        self._poll.register(pidfd, select.POLLIN)

    def take_ended(self) -> list[WorkerExited]:
        """Who was seen to have ended at the last look; looks again."""
        ended, self._ended = self._ended, []
        for pidfd, _ in self._poll.poll(0):
            worker_id, pid = self._unwatch(pidfd)
            self._ended.append(WorkerExited(worker_id, pid, CAUSE))
        return ended

    def forget(self, exited: WorkerExited) -> None:
        """Somebody else has told of this end, and knows its cause."""
        worker = (exited.worker_id, exited.pid)
        self._ended = [each for each in self._ended if (each.worker_id, each.pid) != worker]
        for pidfd in [each for each, known in self._worker_of.items() if known == worker]:
            self._unwatch(pidfd)

    def close(self) -> None:
        """Watch nobody any more."""
        for pidfd in self._worker_of:
            os.close(pidfd)
        self._worker_of.clear()

    def _unwatch(self, pidfd: int) -> tuple[str, int]:
        self._poll.unregister(pidfd)
        os.close(pidfd)
        return self._worker_of.pop(pidfd)
