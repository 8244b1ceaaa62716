"""Many processes read one store while it frees and refills memory: all shards that they see are
intact, and everything is free in the end.
"""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from rollmesh.core.clock import SystemClock
from rollmesh.core.errors import StoreFull
from rollmesh.tensors.arena import Arena
from rollmesh.tensors.handles import Content, RTensor, pack
from rollmesh.tensors.segment import SHARED_MEMORY
from rollmesh.tensors.server import TensorServer
from rollmesh.tensors.store import OwnerStore, StoreSettings
from tests.flow.tensor_guest import filling_of

NUM_GUESTS = 3
MAX_BYTES = 2**20
SOON_S = 60.0

Turn = tuple[list[int], str]
"""Sizes of new shards, and the action that runs while the guests fetch."""
SCHEDULES = st.lists(
    st.tuples(
        st.lists(st.integers(0, 90_000), max_size=8),
        st.sampled_from(["keep", "clear some", "clear all", "take", "end step", "overwrite"]),
    ),
    min_size=4,
    max_size=14,
)


class Crowd:
    """A store, its server, and processes of tensor_guest.py."""

    def __init__(self, folder: Path | None, guests: list["subprocess.Popen[str]"]) -> None:
        self._arena = Arena(MAX_BYTES, folder)
        self.store = OwnerStore(StoreSettings(max_bytes=MAX_BYTES), SystemClock(), self._arena)
        self._server = TensorServer(self.store, "tcp://127.0.0.1:0")
        self._server.start()
        self._guests = guests
        self._handles: list[RTensor] = []
        self._step = 1

    def live(self, turn: Turn) -> list[str]:
        """Run one turn; return the guests' answers."""
        sizes, action = turn
        self._put(sizes)
        self._send(self._handles)
        self._do(action)
        return [self._answer(each) for each in self._guests]

    def part(self) -> tuple[list[str], int, int, int]:
        """Free everything and let all guests release everything; return their answers and what is
        left soon after.
        """
        self._clear(slice(None))
        self.store.end_step(self._step)
        self._send([])
        answers = [self._answer(each) for each in self._guests]
        deadline_s = time.monotonic() + SOON_S
        while self.store.stats().retained_bytes and time.monotonic() < deadline_s:
            threading.Event().wait(0.005)
        stats = self.store.stats()
        return answers, stats.num_tensors, stats.retained_bytes, self._arena.held_bytes

    def close(self) -> None:
        """The guests keep running for the next example."""
        self._server.stop()
        self.store.close()

    def _put(self, sizes: list[int]) -> None:
        contents = [
            Content("uint8", (size,), np.full(size, filling_of(size), np.uint8)) for size in sizes
        ]
        try:
            self._handles += self.store.put(contents)
        except StoreFull:
            self._clear(slice(0, None, 2))

    def _clear(self, some: slice) -> None:
        self.store.clear([each.shard_id for each in self._handles[some]])
        del self._handles[some]

    def _do(self, action: str) -> None:
        ids = [each.shard_id for each in self._handles]
        match action:
            case "clear some":
                self._clear(slice(0, None, 2))
            case "clear all" | "overwrite":
                self._clear(slice(None))
            case "take":
                self.store.take(ids[::3], self._step)
                del self._handles[::3]
            case "end step":
                self.store.end_step(self._step)
                self._step += 1
        if action == "overwrite":
            self._put([80_000] * 8)

    def _send(self, handles: list[RTensor]) -> None:
        for guest in self._guests:
            assert guest.stdin is not None
            guest.stdin.write(f"{pack(handles).hex()}\n")
            guest.stdin.flush()

    def _answer(self, guest: "subprocess.Popen[str]") -> str:
        assert guest.stdout is not None
        return guest.stdout.readline().strip()


@pytest.fixture(scope="module")
def guests() -> Iterator[list["subprocess.Popen[str]"]]:
    """Several guests, which end with their stdin."""
    pipe = subprocess.PIPE
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-m", "tests.flow.tensor_guest", str(seed)],
                    stdin=pipe,
                    stdout=pipe,
                    text=True,
                )
            )
            for seed in range(NUM_GUESTS)
        ]


@pytest.mark.parametrize("folder", [SHARED_MEMORY, None], ids=["shared", "sent"])
def test_shards_that_others_fetch_are_intact_whatever_is_freed_meanwhile(
    folder: Path | None, guests: list["subprocess.Popen[str]"]
) -> None:
    num_seen = 0

    @hypothesis.settings(max_examples=12, deadline=None, derandomize=True, database=None)
    @hypothesis.given(schedule=SCHEDULES)
    def check(schedule: list[Turn]) -> None:
        nonlocal num_seen
        crowd = Crowd(folder, guests)
        try:
            for turn in schedule:
                answers = crowd.live(turn)
                assert "broken" not in answers
                num_seen += sum(map(int, answers))
            assert crowd.part() == (["0"] * NUM_GUESTS, 0, 0, 0)
        finally:
            crowd.close()

    check()
    assert num_seen > 100
