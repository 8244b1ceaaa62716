"""Fetches under a test's control: requests to owners are recorded and wait until the test releases
them.

A shard's bytes follow from its id, so that wrong bytes are noticed.
"""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Generic, TypeVar

import numpy as np

from rollmesh.core.errors import FetchMismatch, OwnerGone, ShardMissing
from rollmesh.tensors.fetch_buffer import FetchBuffer, FetchFn
from rollmesh.tensors.handles import UNTAGGED, Content, RTensor

OWNER = "tcp://127.0.0.1:7"
SHARD_BYTES = 100
BUDGET = 10 * SHARD_BYTES
"""Shards of a World."""
WAIT_S = 60.0

T = TypeVar("T")


def handle(number: int, step: int = UNTAGGED, num_bytes: int = SHARD_BYTES) -> RTensor:
    """A handle of a shard of one dimension."""
    return RTensor(1 << 32 | number, OWNER, step, "uint8", (num_bytes,), num_bytes)


def handles(*numbers: int, step: int = UNTAGGED) -> list[RTensor]:
    return [handle(number, step) for number in numbers]


def ids(*numbers: int) -> list[int]:
    return [handle(number).shard_id for number in numbers]


def bytes_of(shard: RTensor) -> bytes:
    """The content of the shard with this id."""
    return np.random.default_rng(shard.shard_id).bytes(shard.num_bytes)


def content(shard: RTensor) -> Content:
    """Return the content of the shard, in its own memory."""
    data = np.frombuffer(bytes_of(shard), np.uint8).copy()
    data.flags.writeable = False
    return Content(shard.dtype, shard.shape, data)


def in_one_block(shards: Sequence[RTensor]) -> list[Content]:
    """Return the contents, one after the other in one block of memory."""
    block = np.frombuffer(b"".join(map(bytes_of, shards)), np.uint8).copy()
    block.flags.writeable = False
    ends = np.cumsum([each.num_bytes for each in shards]).tolist()
    places = zip(shards, [0, *ends[:-1]], ends, strict=True)
    return [Content(each.dtype, each.shape, block[start:end]) for each, start, end in places]


def assert_are(contents: Sequence[Content], shards: Sequence[RTensor]) -> None:
    """Assert that these are the contents of those handles."""
    assert [each.data.tobytes() for each in contents] == [bytes_of(each) for each in shards]


ERRORS = [
    OwnerGone(OWNER, "it hung up"),
    ShardMissing(1 << 32 | 1, OWNER, "cleared"),
    FetchMismatch("too few"),
    ConnectionResetError(104, "reset"),
    RuntimeError("a fault of ours"),
]
"""Errors that a fetch may raise."""


class Owners:
    """All existing shards, with a fetch that answers at once."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []
        """Numbers of the shards of each fetch."""

    def __call__(self, shards: list[RTensor]) -> list[Content]:
        self.asked.append([each.shard_id & 0xFFFFFFFF for each in shards])
        return [content(each) for each in shards]


class HeldFetch:
    """A fetch that waits until the test lets it answer or fail."""

    def __init__(self, owners: Owners) -> None:
        self._owners = owners
        self._began = threading.Semaphore(0)
        self._may_end = threading.Semaphore(0)
        self._error: BaseException | None = None

    def __call__(self, shards: list[RTensor]) -> list[Content]:
        answer = self._owners(shards)
        self._began.release()
        assert self._may_end.acquire(timeout=WAIT_S)
        error, self._error = self._error, None
        if error is not None:
            raise error
        return answer

    def wait_begun(self) -> None:
        """Wait for the next call."""
        assert self._began.acquire(timeout=WAIT_S)

    def release(self) -> None:
        """Let the waiting call answer."""
        self._may_end.release()

    def fail(self, error: BaseException) -> None:
        """Let the waiting call raise this error."""
        self._error = error
        self._may_end.release()


class ThreadCall(threading.Thread, Generic[T]):
    """Runs a call in its own thread, at once."""

    def __init__(self, call: Callable[[], T]) -> None:
        super().__init__(daemon=True)
        self._call = call
        self._values: list[T] = []
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._values.append(self._call())
        # door: `result` raises the error in the test
        except BaseException as error:  # noqa: BLE001 - see above
            self._error = error

    def result(self) -> T:
        """Wait for the call; return its value or raise its error."""
        self.join(WAIT_S)
        assert not self.is_alive()
        if self._error is not None:
            raise self._error
        return self._values[0]


class World:
    """A buffer, and the owners that it fetches from."""

    def __init__(self, max_bytes: int = BUDGET) -> None:
        self.buffer = FetchBuffer(max_bytes)
        self.owners = Owners()

    def ask(self, *shards: RTensor, fetch: FetchFn | None = None) -> list[Content]:
        contents = self.buffer.get_many(shards, fetch or self.owners)
        assert_are(contents, shards)
        return contents

    def kept(self) -> tuple[int, int]:
        stats = self.buffer.stats()
        return stats.num_tensors, stats.total_bytes


class Pair:
    """Two threads: the first fetches shard 1; the second fetches 2, and waits for 1."""

    def __init__(self, world: World) -> None:
        self.fetches = HeldFetch(world.owners), HeldFetch(world.owners)
        self.first = ThreadCall(partial(world.ask, handle(1), fetch=self.fetches[0]))
        self.fetches[0].wait_begun()
        self.second = ThreadCall(partial(world.ask, *handles(1, 2), fetch=self.fetches[1]))
        # It fetches its own shard after it has found the other fetch.
        self.fetches[1].wait_begun()


@contextlib.contextmanager
def control_c_enabled() -> Iterator[None]:
    """Raise KeyboardInterrupt on SIGINT, also if the shell has made the tests ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
