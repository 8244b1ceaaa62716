"""A cache for pure functions of texts that agents send repeatedly, within a budget of bytes.

    @Memo
    def read(raw: bytes) -> Parsed: ...

- It keeps at most MAX_BYTES of texts (functools.lru_cache bounds only their number), and none
  longer than MAX_TEXT_BYTES.
- The oldest entry is evicted first, used or not, so that a hit costs one lookup.
- Errors are not cached. Thread-safe.
"""

import threading
from collections.abc import Callable
from typing import Generic, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

MAX_BYTES = 4 * 2**20
MAX_TEXT_BYTES = 2**19
ENTRY_BYTES = 500
"""Size of an entry beside its texts."""


class Memo(Generic[P, R]):
    """A memoized function of positional texts and other hashable arguments."""

    def __init__(self, function: Callable[P, R]) -> None:
        self.num_bytes = 0
        """Bytes of the cached texts."""
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
