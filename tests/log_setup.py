"""Set up the logs of a process in a test, and restore them afterwards.

A later test of the same process gets log events as from a library, in any order of test files.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import structlog


@contextmanager
def logs_as_before() -> Iterator[None]:
    """Undo the setup by rollmesh.core.logs.setup."""
    root = logging.getLogger()
    level, configured = root.level, structlog.get_config()
    try:
        yield
    finally:
        logging.captureWarnings(False)
        for handler in [h for h in root.handlers if (h.name or "").startswith("rollmesh.")]:
            root.removeHandler(handler)
            handler.close()
        root.setLevel(level)
        structlog.configure(**configured)
