"""How many files and sockets a process may hold open, and what to say when none is left.

- The limit is checked before anything is opened, since a process that runs out of descriptors
  half-way hangs or fails in ways that name no cause.
- The limit is only ever raised, and children inherit it.
- `shortage_of` distinguishes a connection that fails because this process or machine lacks
  descriptors, ports or memory from one that its peer refuses, so that no peer is blamed for it.
"""

import errno
import os
import resource
import socket
import ssl

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


def shortage_of(error: OSError) -> str:
    """Why a dial failed here, in a line with the remedy; '' where it failed on the way or there."""
    number = error.errno
    is_vague = number is None or isinstance(error, socket.gaierror | ssl.SSLError)
    if is_vague and not isinstance(error, ConnectionError | TimeoutError):
        # The resolver and TLS read files, and do not say that they could not open one.
        number = _why_none_opens()
    match number:
        case errno.EMFILE:
            limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            wanted = max(ENOUGH, 2 * limit)
            return (
                f"this process has no file descriptor left for a connection (RLIMIT_NOFILE is "
                f"{limit}); start it with a higher limit: ulimit -n {wanted}"
            )
        case errno.ENFILE:
            return (
                "this machine has no file descriptor left for a connection; raise its limit: "
                "sysctl fs.file-max"
            )
        case errno.EADDRNOTAVAIL:
            return (
                "this machine has no local address or port left for a connection; widen the range: "
                "sysctl net.ipv4.ip_local_port_range"
            )
        case errno.ENOBUFS | errno.ENOMEM:
            return "this machine has no memory left for a connection; lower its load"
    return ""


def require_one() -> None:
    """Raise OSError if no descriptor is left."""
    os.close(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))


def _why_none_opens() -> int | None:
    """The number of the error with which no file can be opened now; None where one can."""
    try:
        require_one()
    except OSError as error:
        return error.errno
    return None
