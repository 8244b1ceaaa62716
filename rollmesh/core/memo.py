"""What pure functions made of texts that agents send again and again, within a budget of bytes.

    @Memo
    def read(raw: bytes) -> Parsed: ...

Owns the newest results of each function. Invariants: a memo keeps MAX_BYTES of texts at most,
whatever agents send (functools.lru_cache bounds their number alone, and a list of tools may have
megabytes), and none that is longer than MAX_TEXT_BYTES; the oldest goes first, used or not, so that
a hit costs one look-up; an error is not kept. From any thread. Driven by who reads requests.
"""

import threading
from collections.abc import Callable
from typing import Generic, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

MAX_BYTES = 4 * 2**20
MAX_TEXT_BYTES = 2**19
ENTRY_BYTES = 500
"""What an entry takes beside its texts."""


class Memo(Generic[P, R]):
    """See the module. Its function takes texts by their place, and what else has a hash."""

    def __init__(self, function: Callable[P, R]) -> None:
        self.num_bytes = 0
        """Of the texts that are kept."""
        self._function = function
        self._kept: dict[tuple[object, ...], R] = {}
        self._lock = threading.Lock()

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return self._kept[args]
        except KeyError:
            return self._made(args, self._function(*args, **kwargs))

    def _made(self, args: tuple[object, ...], made: R) -> R:
        num_bytes = _size_of(args)
        if num_bytes <= MAX_TEXT_BYTES:
            with self._lock:
                if args not in self._kept:
                    self._kept[args] = made
                    self.num_bytes += num_bytes
                while self.num_bytes > MAX_BYTES:
                    oldest = next(iter(self._kept))
                    del self._kept[oldest]
                    self.num_bytes -= _size_of(oldest)
        return made


def _size_of(args: tuple[object, ...]) -> int:
    return ENTRY_BYTES + sum([len(each) for each in args if isinstance(each, str | bytes)])
