"""Limits of open files and sockets: check them at the start, and explain when none is left.

- The limit is checked before anything is opened: a process that runs out of descriptors later hangs
  or fails without naming the cause.
- The limit is only ever raised, and children inherit it.
- `shortage_of` distinguishes a connection that fails for lack of descriptors, ports or memory here
  from one that its peer refuses, so that no peer is blamed for it.
"""

import errno
import os
import resource
import socket
import ssl

from rollmesh.core.errors import ConfigError

ENOUGH = 65_536
"""The limit is raised to this, if allowed."""
BASE = 64
"""Open files of any process: libraries, logs, a few sockets."""
PER_ROLLOUT = 4
"""Per rollout: the agent's connection, its end here, an engine connection, and one that is
closing.
"""
PER_CHILD = 8
"""Per child process of launch: pipes, a pidfd, a listening socket."""
PEERS = 64
"""The minimum number of connections of a server."""


def allow_descriptors(num: int, for_what: str) -> None:
    """Raise our limit as far as allowed; ConfigError if it stays below `num` above the base."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max(ENOUGH, BASE + num)
    allowed = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < BASE + num:
        raise ConfigError(
            f"{for_what} needs {BASE + num} open files and this shell allows {allowed}; "
            f"raise the limit: ulimit -n {wanted}"
        )


def share_in_use() -> float:
    """Return the fraction of the allowed descriptors in use; 0 if unknown."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        num = len(os.listdir("/proc/self/fd")) - 1
    except OSError as error:
        return 1.0 if error.errno in (errno.EMFILE, errno.ENFILE) else 0.0
    return 0.0 if limit == resource.RLIM_INFINITY else num / limit


def shortage_of(error: OSError) -> str:
    """Explain a connection that failed for lack of resources here, with the remedy; '' for other
    causes.
    """
    number = error.errno
    is_vague = number is None or isinstance(error, socket.gaierror | ssl.SSLError)
    if is_vague and not isinstance(error, ConnectionError | TimeoutError):
        # The resolver and TLS read files, and do not report that they could not open one.
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
    """Return the errno with which opening a file fails now; None if it works."""
    try:
        require_one()
    except OSError as error:
        return error.errno
    return None
