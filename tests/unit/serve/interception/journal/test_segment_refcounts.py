"""Reference counts of segments agree with a scan of the whole journal."""

import random
from collections import defaultdict
from pathlib import Path

from rollmesh.core.config import JournalConfig
from rollmesh.core.types import Outcome
from rollmesh.runtime.session_deps import locks_of
from rollmesh.runtime.session_log import DeliveryChanged
from rollmesh.serve.interception.journal.entries import (
    ContentStored,
    SessionEntry,
    SessionFinished,
    SessionOpened,
    decode,
)
from rollmesh.serve.interception.journal.gateway_journal import GatewayJournal
from rollmesh.serve.interception.journal.write_buffer import WriteBuffer

SEGMENT_BYTES = 512
NUM_ACTS = 120


class RandomSessions:
    """Sessions that are opened, called and closed, with the expected contents of each."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.rng = random.Random(seed)
        self.journal = GatewayJournal(folder, JournalConfig(segment_bytes=SEGMENT_BYTES))
        self.journal.drop_unreferenced()
        self.num_opened = self.num_dead_seen = 0

    def act(self) -> None:
        names = list(self.journal.usage)
        acts = [self._run_call, self._reward, self._finish, self._close]
        if len(names) < 2 or self.rng.random() < 0.2:
            self._open()
        else:
            self.rng.choices(acts, [6, 2, 1, 2])[0](self.rng.choice(names))

    def _open(self) -> None:
        self.num_opened += 1
        name = f"s{self.num_opened}"
        self.journal.open(SessionOpened(name, 0, 0.0, locks_of(name, name), b"{}", 7, None))

    def _run_call(self, name: str) -> None:
        if self.rng.random() < 0.4:
            self.journal.name(name, b"%d" % self.rng.randrange(6) * self.rng.choice([80, 300]))
        page = WriteBuffer(name, self.journal.flush_queue)
        for call in range(self.rng.randrange(1, 12)):
            page.put(DeliveryChanged(call, is_undelivered=True))
        page.schedule_flush()
        self.journal.flush_queue.flush()

    def _reward(self, name: str) -> None:
        self.journal.reward(name, 1.0, None)

    def _finish(self, name: str) -> None:
        room = self.journal.usage[name]
        if not room.is_finished:
            of = (name, room.next_number)
            done = SessionFinished(
                *of, Outcome.COMPLETED, b"x" * 50, (), b"", (), {}, {}, "", "", 1
            )
            self.journal.finish(done, set())

    def _close(self, name: str) -> None:
        self.journal.close(name)

    def check(self) -> None:
        """Assert that live records exist and that the oldest segment is dead exactly if no
        record in it is live.
        """
        usage, journal = self.journal.usage, self.journal.journal
        numbers: dict[str, set[int]] = defaultdict(set)
        kept: set[int] = set()
        is_needed = False
        for position, frames in journal.replay():
            match decode(frames[0]):
                case ContentStored(number):
                    kept.add(number)
                    is_live = number in self.journal._contents  # noqa: SLF001 - the live contents
                case SessionEntry(name, number):
                    numbers[name].add(number)
                    is_live = name in usage
                case _:
                    is_live = False
            is_needed |= is_live and len(journal.segments) > 1 and position < journal.segments[1]
        for name, room in usage.items():
            lacking = set(range(room.next_number)) - numbers[name]
            assert room.is_finished or not lacking, f"{name} has lost {lacking}"
            assert room.next_number - 1 in numbers[name]
            unwritten = self.journal._unwritten  # noqa: SLF001 - referenced, and written with the next record
            assert room.contents <= kept | set(unwritten)
        tenants = self.journal._segment_refs  # noqa: SLF001 - the counts
        if len(journal.segments) > 1:
            assert tenants.is_oldest_dead is not is_needed
            self.num_dead_seen += tenants.is_oldest_dead


async def test_live_records_are_never_lost_and_dead_segments_are_found(tmp_path: Path) -> None:
    num_dead_seen = 0
    for seed in range(4):
        sessions = RandomSessions(tmp_path / str(seed), seed)
        for _ in range(NUM_ACTS):
            sessions.act()
            sessions.check()
        assert sessions.journal.journal.segments[0] > 0, "no record was dropped"
        num_dead_seen += sessions.num_dead_seen
        sessions.journal.close_journal()
    assert num_dead_seen > 0
