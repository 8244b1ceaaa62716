"""The cache folder that torch makes in TMPDIR as transformers imports its compiler."""

import contextlib
import os
import tempfile


def drop_empty_cache() -> None:
    """Remove it while it is empty; torch makes it again if it compiles anything."""
    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR", "")
    if os.path.dirname(folder) == tempfile.gettempdir():
        with contextlib.suppress(OSError):  # it is in use, or gone
            os.rmdir(folder)
