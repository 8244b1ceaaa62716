"""How many files and sockets a process may hold open: as many as it needs, or one clear line.

Invariant: asked before anything is opened, since a process that runs out of descriptors half-way
hangs or fails in ways that name no cause; the limit is only ever raised, and children inherit it.
Driven by launch and by the rooms that are started by hand; a worker looks at what it has taken.
"""

import errno
import os
import resource

from rollmesh.core.errors import ConfigError

ENOUGH = 65_536
"""The limit is raised to this, where it may be: nobody here needs more."""
BASE = 64
"""What any process has open: libraries, logs, a few sockets."""
PER_ROLLOUT = 4
"""An agent's connection, its end here, an engine's leg, and one that is closing."""
PER_CHILD = 8
"""Of launch: pipes, a pidfd, a listening socket."""
PEERS = 64
"""A server that could not take so many connections would serve nobody."""


def allow_descriptors(num: int, for_what: str) -> None:
    """Raise our limit as far as it goes; ConfigError if that is less than `num` above the base."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = ENOUGH if hard == resource.RLIM_INFINITY else min(hard, ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < BASE + num:
        raise ConfigError(
            f"{for_what} needs {BASE + num} open files and this shell allows {allowed}; "
            f"raise the limit: ulimit -n {ENOUGH}"
        )


def share_in_use() -> float:
    """Of the files that we may hold open, those that we do; 0 where that cannot be told."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        num = len(os.listdir("/proc/self/fd")) - 1
    except OSError as error:
        return 1.0 if error.errno in (errno.EMFILE, errno.ENFILE) else 0.0
    return 0.0 if limit == resource.RLIM_INFINITY else num / limit
