"""A process that can open no file and no socket for a while, while those that it has stay open."""

import contextlib
import resource
from collections.abc import Iterator

LEAST = 3
"""Below every descriptor that is free, so that the next one is refused."""


@contextlib.contextmanager
def no_descriptor_left(pid: int = 0) -> Iterator[None]:
    """In this process, or in `pid`."""
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (LEAST, hard))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))
