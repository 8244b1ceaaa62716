"""A file that is only added to, and waits for room where its disk is full.

Invariant: what the disk took is whole and there once; nothing is passed over. Whoever writes says
what is done meanwhile, and ends the wait, as a line for people. Driven by records.py, on the train
loop's thread.
"""

import io
from pathlib import Path
from typing import TYPE_CHECKING

from rollmesh.core.errors import FULL, UserError
from rollmesh.core.logs import get_logger
from rollmesh.serve.client.client import TriesAgain

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

log = get_logger()

BUFFER_BYTES = 2**20


class _LastingFile(io.FileIO):
    def __init__(self, path: Path, again: TriesAgain) -> None:
        super().__init__(path, "ab")
        self._tries_again = again
        self._is_told = False

    def write(self, data: "ReadableBuffer", /) -> int:
        """As much of `data` as there is room for, and that is not nothing.

        UserError where it is not to be tried again.
        """
        while True:
            try:
                num_bytes = super().write(data)
            except OSError as error:
                if error.errno not in FULL:
                    raise
                self._wait(f"{self.name}: {error.strerror}")
            else:
                self._is_told = False
                return num_bytes

    def _wait(self, why: str) -> None:
        if not self._is_told:
            self._is_told = True
            log.error("records.wait", error=why, fix="make room; nothing is lost")
        if not self._tries_again():
            raise UserError(f"{why}; make room there, then --resume")


def open_lasting(path: Path, again: TriesAgain) -> io.BufferedWriter:
    """Add to `path`; errors as of any file but for a full disk, which is tried until `again` says
    no."""
    return io.BufferedWriter(_LastingFile(path, again), BUFFER_BYTES)
