"""The logs of a process, set up in a test: as they were afterwards.

Invariant: a test that runs after it in the same process hears events as a library's, in whatever
order files are shared out. Driven by fixtures of tests that call what sets up logs.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import structlog


@contextmanager
def logs_as_before() -> Iterator[None]:
    """Undo what rollmesh.core.logs.setup does meanwhile."""
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
