"""Let a process open no file and no socket for a while; its open descriptors stay open."""

import contextlib
import resource
from collections.abc import Iterator

LEAST = 3
"""Below every free descriptor, so that the next one is refused."""


@contextlib.contextmanager
def no_descriptor_left(pid: int = 0) -> Iterator[None]:
    """Apply to this process, or to `pid`."""
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (LEAST, hard))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))
