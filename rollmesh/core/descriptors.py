"""How many files and sockets a process may hold open: as many as it needs, or one clear line.

Invariant: asked before anything is opened, since a process that runs out of descriptors half-way
hangs or fails in ways that name no cause; the limit is only ever raised, and children inherit it.
Driven by launch and by the rooms that are started by hand.
"""

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
