"""The book: what a restarted client must know stands on disk before it is acted upon."""

import random
from pathlib import Path

import msgspec
import pytest

from rollmesh.core.config import JournalConfig
from rollmesh.core.errors import JournalError
from rollmesh.core.ids import GroupId
from rollmesh.core.journal import Journal
from rollmesh.serve.client.arrivals import Filed
from rollmesh.serve.client.asks import Asked
from rollmesh.serve.client.book import Book, open_book
from rollmesh.serve.client.entries import (
    GroupParted,
    GroupTried,
    Published,
    RunBegan,
    StateSaved,
    StepTaken,
)
from rollmesh.wire.frames import Packet
from rollmesh.wire.messages import GroupFinished
from tests.disks import full_disk, small_disk

CONFIG = JournalConfig(segment_bytes=200, max_bytes=10_000)


BEGAN = RunBegan("r1", "c1", "tcp://sink")


def ready(book: Book) -> list[Filed]:
    """What the next client without savepoints is handed."""
    return book.begin(book.earlier, None)


def group(seq: int) -> GroupId:
    return GroupId("r1", seq)


def keep(book: Book, seq: int, complete: bool = True) -> int:
    message = GroupFinished(group(seq), 1, "w1", complete)
    return book.keep(message, Packet(message, "", b"record", (b"ids!", b"lps!"))).position


def test_results_that_no_step_took_are_restored_once(tmp_path: Path) -> None:
    book = open_book(tmp_path, CONFIG)
    book.begin(RunBegan("r1"), None)
    for seq in range(4):
        keep(book, seq)
    book.note(StepTaken(0, (group(0), group(2))))
    book.drop(group(3), "stale")
    book.note(Published(1, 1))
    book.close()
    again = open_book(tmp_path, CONFIG)
    [restored] = ready(again)
    assert (restored.group_id, restored.num_bytes) == (group(1), 14)
    loaded = again.load(restored)
    assert (loaded.group_id, loaded.body) == (group(1), b"record")
    assert [bytes(buffer) for buffer in loaded.buffers] == [b"ids!", b"lps!"]
    assert again.ended["r1"].intervals() == [(0, 4)]
    again.close()


def test_incomplete_result_leaves_a_line_and_is_not_restored(tmp_path: Path) -> None:
    book = open_book(tmp_path, CONFIG)
    keep(book, 5, complete=False)
    book.close()
    again = open_book(tmp_path, CONFIG)
    assert ready(again) == []
    assert 5 in again.ended["r1"]
    again.close()


def test_freed_segments_leave_what_has_ended(tmp_path: Path) -> None:
    book = open_book(tmp_path, CONFIG)
    book.begin(RunBegan("r1"), None)
    for seq in range(20):
        keep(book, seq)
        book.ended["r1"].add(seq)
    before = book.size_bytes
    book.take(tuple(group(seq) for seq in range(18)))
    assert book.size_bytes < before
    book.close()
    again = open_book(tmp_path, CONFIG)
    assert again.ended["r1"].intervals() == [(0, 20)]
    assert {raw.group_id.seq for raw in ready(again)} == {18, 19}
    again.close()


def asked(seq: int, deadline_s: float = 0.0) -> Asked:
    return Asked(
        group_id=group(seq),
        env="guess",
        num_samples=4,
        priority=2,
        deadline_s=deadline_s,
        patience_s=9.0,
        body=b"task",
        ticket=bytes(range(16)),
    )


def test_open_asks_outlive_the_process_and_ended_ones_do_not(tmp_path: Path) -> None:
    book = open_book(tmp_path, CONFIG)
    book.begin(RunBegan("r1", "c1", "tcp://sink"), None)
    for seq in range(4):
        book.ask(asked(seq))
    keep(book, 0)
    keep(book, 1, complete=False)
    book.drop(group(2), "deadline: over")
    book.close()
    again = open_book(tmp_path, CONFIG)
    [reopened] = again.reopened()
    assert reopened == msgspec.structs.replace(asked(3), attempts=1)
    assert again.earlier == RunBegan("r1", "c1", "tcp://sink")
    again.close()


def test_deadline_of_an_open_ask_goes_on_while_nobody_runs(tmp_path: Path) -> None:
    book = open_book(tmp_path, CONFIG)
    book.ask(asked(0, deadline_s=60.0))
    book.ask(asked(1, deadline_s=0.001))
    book.close()
    again = open_book(tmp_path, CONFIG)
    lasting, over = again.reopened()
    assert 50.0 < lasting.deadline_s < 60.0
    assert 0.0 < over.deadline_s < 0.01
    again.close()


@pytest.mark.parametrize("is_dropped", [False, True], ids=["trained", "dropped"])
def test_taken_results_free_their_segments_and_are_not_restored(
    tmp_path: Path, is_dropped: bool
) -> None:
    book = open_book(tmp_path, CONFIG)
    book.begin(RunBegan("r1", "c1", "tcp://sink"), None)
    sizes = []
    for seq in range(100):
        keep(book, seq)
        book.ended["r1"].add(seq)
        if is_dropped:
            book.part(GroupParted(group(seq), "barren", 0))
        else:
            book.take((group(seq),))
        sizes.append(book.size_bytes)
    assert max(sizes) < 5 * CONFIG.segment_bytes
    book.close()
    again = open_book(tmp_path, CONFIG)
    assert ready(again) == []
    assert again.ended["r1"].intervals() == [(0, 100)]
    assert again.earlier == RunBegan("r1", "c1", "tcp://sink")
    again.close()


def test_taking_keeps_what_others_need(tmp_path: Path) -> None:
    book = open_book(tmp_path, CONFIG)
    book.begin(RunBegan("r1"), None)
    book.ask(asked(0))
    for seq in range(1, 60):
        keep(book, seq)
        book.ended["r1"].add(seq)
        if seq > 1:
            book.take((group(seq),))
    book.close()
    again = open_book(tmp_path, CONFIG)
    assert [each.group_id for each in again.reopened()] == [group(0)]
    assert [each.group_id for each in ready(again)] == [group(1)]
    again.close()


def test_an_ask_that_stays_open_does_not_keep_what_came_after_it(tmp_path: Path) -> None:
    book = open_book(tmp_path, CONFIG)
    book.begin(RunBegan("r1"), None)
    book.ask(asked(1000, deadline_s=600.0))
    book.note(GroupTried(group(1000), attempts=3, excused=1))
    [before] = book.reopened()
    for seq in range(300):
        keep(book, seq)
        book.ended["r1"].add(seq)
        book.take((group(seq),))
        assert book.size_bytes < 6 * CONFIG.segment_bytes
    book.close()
    again = open_book(tmp_path, CONFIG)
    [reopened] = again.reopened()
    assert (reopened.group_id, reopened.attempts, reopened.excused) == (group(1000), 3, 1)
    assert bytes(reopened.body) == b"task"
    assert 590.0 < reopened.deadline_s <= before.deadline_s
    again.close()


class Model:
    """What a book must remember, without files."""

    def __init__(self) -> None:
        self.open: set[int] = set()
        self.untaken: set[int] = set()
        self.ended: set[int] = set()
        self.next_seq = 0

    def ask(self, book: Book) -> None:
        book.ask(asked(self.next_seq))
        self.open.add(self.next_seq)
        self.next_seq += 1

    def end(self, book: Book, seq: int, *, has_result: bool) -> None:
        if has_result:
            keep(book, seq)
            self.untaken.add(seq)
        else:
            book.drop(group(seq), "deadline: over")
        book.ended["r1"].add(seq)
        self.ended.add(seq)
        self.open.discard(seq)

    def take(self, book: Book, seqs: list[int]) -> None:
        book.take(tuple(group(seq) for seq in seqs))
        self.untaken -= set(seqs)


@pytest.mark.parametrize("seed", range(40))
def test_whatever_happened_a_reopened_book_knows_what_is_needed(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    model, book = Model(), open_book(tmp_path, CONFIG)
    book.begin(RunBegan("r1", "c1", "tcp://sink"), None)
    for _ in range(150):
        match rng.choice(["ask", "ask", "end", "end", "take", "take", "reopen"]):
            case "ask":
                model.ask(book)
            case "end" if model.open:
                model.end(book, rng.choice(sorted(model.open)), has_result=rng.random() < 0.8)
            case "take" if model.untaken:
                num = rng.randint(1, len(model.untaken))
                model.take(book, rng.sample(sorted(model.untaken), num))
            case "reopen":
                book.close()
                book = open_book(tmp_path, CONFIG)
                assert {each.group_id.seq for each in book.reopened()} == model.open
                assert {each.group_id.seq for each in ready(book)} == model.untaken
                assert set(range(model.next_seq)) - model.open == model.ended
                assert all((seq in book.ended["r1"]) == (seq in model.ended) for seq in range(150))
                assert book.earlier == BEGAN
    book.close()


def test_what_a_full_disk_does_not_take_is_written_before_anything_else(tmp_path: Path) -> None:
    book = open_book(tmp_path, CONFIG)
    book.begin(RunBegan("r1", "c1", "tcp://sink"), None)
    book.ask(asked(0))
    book.ask(asked(1))
    for seq in (2, 3):
        keep(book, seq)
        book.ended["r1"].add(seq)
    with full_disk(0):
        book.ended["r1"].add(0)
        with pytest.raises(JournalError, match="File too large"):
            book.drop(group(0), "deadline: over")
        with pytest.raises(JournalError, match="File too large"):
            book.take((group(2),))
    keep(book, 4)
    book.close()
    again = open_book(tmp_path, CONFIG)
    assert [each.group_id for each in again.reopened()] == [group(1)]
    assert [each.group_id for each in ready(again)] == [group(3), group(4)]
    assert again.ended["r1"].intervals() == [(0, 1), (2, 5)]
    assert again.earlier == RunBegan("r1", "c1", "tcp://sink")
    again.close()


def test_results_that_were_taken_while_the_disk_was_full_free_their_segments(
    tmp_path: Path,
) -> None:
    book = open_book(tmp_path, CONFIG)
    book.begin(RunBegan("r1"), None)
    for seq in range(60):
        keep(book, seq)
        book.ended["r1"].add(seq)
    for seq in range(60):
        with full_disk(0 if seq < 30 else 2**20):
            try:
                book.take((group(seq),))
            except JournalError:
                assert seq < 30
    assert book.size_bytes < 5 * CONFIG.segment_bytes
    book.close()
    again = open_book(tmp_path, CONFIG)
    assert ready(again) == []
    assert again.ended["r1"].intervals() == [(0, 60)]
    again.close()


def test_nothing_is_let_go_of_before_the_savepoint_that_frees_it_is_told(tmp_path: Path) -> None:
    book = open_book(tmp_path, CONFIG)
    book.begin(RunBegan("r1"), StateSaved())
    for seq in range(20):
        keep(book, seq)
        book.ended["r1"].add(seq)
    book.note(StepTaken(0, tuple(map(group, range(20)))))
    before = book.size_bytes
    saved = StateSaved(1, 1, {"r1": [(0, 20)]})
    book.cover(saved)
    assert book.size_bytes == before  # it may go bad, and there is no other
    with full_disk(0), pytest.raises(JournalError):
        book.cover(StateSaved(2, 2, {"r1": [(0, 20)]}))
    assert book.size_bytes == before
    book.note(Published(2, 1))  # what was owed is written before it
    book.cover(StateSaved(3, 3, {"r1": [(0, 20)]}))
    assert book.size_bytes < before
    assert book.history().saved == StateSaved(2, 2, {"r1": [(0, 20)]})
    book.close()


def test_over_the_budget_the_newest_savepoint_frees_alone(tmp_path: Path) -> None:
    book = open_book(tmp_path, JournalConfig(segment_bytes=200, max_bytes=4000))
    book.begin(RunBegan("r1"), StateSaved())
    sizes = []
    for seq in range(300):
        keep(book, seq)
        book.ended["r1"].add(seq)
        book.note(StepTaken(seq, (group(seq),)))
        if seq % 30 == 0:
            book.cover(StateSaved(seq + 1, seq + 1, {"r1": [(0, seq + 1)]}))
        sizes.append(book.size_bytes)
        assert not book.is_full
    assert 3000 < max(sizes) < 4000 + CONFIG.segment_bytes
    book.close()
    again = open_book(tmp_path, CONFIG)
    assert again.history().steps[0].step > 211, "it was freed by the savepoint of 241 or 271 steps"
    again.close()


def test_asks_are_not_held_where_the_newest_savepoint_frees_the_journal(
    tmp_path: Path,
) -> None:
    book = open_book(tmp_path, JournalConfig(segment_bytes=200, max_bytes=4000))
    book.begin(RunBegan("r1"), StateSaved())
    for seq in range(20):
        keep(book, seq)
        book.ended["r1"].add(seq)
    book.cover(StateSaved(1, 1, {"r1": [(0, 19)]}))
    size_bytes = 0
    while book.size_bytes > size_bytes:
        size_bytes = book.size_bytes
        book.part(GroupParted(group(19), "stale: age 3", 0))
        assert not book.is_full
    book.close()


def test_result_that_makes_room_has_ended_though_its_sink_has_not_said_so(tmp_path: Path) -> None:
    config = JournalConfig(segment_bytes=200, max_bytes=4000)
    book = open_book(tmp_path, config)
    book.begin(BEGAN, StateSaved())
    for seq in range(20):
        keep(book, seq)
        book.ended["r1"].add(seq)
    book.cover(StateSaved(1, 1, {"r1": [(0, 20)]}))
    size_bytes, seq = book.size_bytes, 20
    while book.size_bytes >= size_bytes:  # the one that is over the budget frees the segments
        size_bytes = book.size_bytes
        keep(book, seq)
        seq += 1
    book.close()
    again = open_book(tmp_path, config)
    assert again.ended["r1"].intervals() == [(0, seq)]
    again.close()


def test_disk_full_of_results_is_emptied_by_taking_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    book = open_book(tmp_path, CONFIG)
    book.begin(RunBegan("r1", "c1", "tcp://sink"), None)
    with small_disk(monkeypatch, tmp_path / "journal", 3000):
        kept: list[int] = []
        for seq in range(500):
            try:
                keep(book, seq)
            except JournalError:
                book.take(tuple(group(each) for each in kept))
                kept.clear()
                keep(book, seq)
            kept.append(seq)
            book.ended["r1"].add(seq)
    book.close()
    again = open_book(tmp_path, CONFIG)
    assert [each.group_id.seq for each in ready(again)] == kept
    assert again.ended["r1"].intervals() == [(0, 500)]
    assert again.earlier == RunBegan("r1", "c1", "tcp://sink")
    again.close()


def test_book_over_its_budget_says_so(tmp_path: Path) -> None:
    book = open_book(tmp_path, JournalConfig(segment_bytes=200, max_bytes=120))
    book.begin(BEGAN, None)
    full = [book.is_full]
    keep(book, 0)
    full.append(book.is_full)
    assert full == [False, True]
    book.close()


@pytest.mark.parametrize("frames", [[], [b"\xc1"], [msgspec.msgpack.encode(["later", 1])]])
def test_unknown_entry_is_an_error_and_gives_the_journal_back(
    tmp_path: Path, frames: list[bytes]
) -> None:
    journal = Journal(tmp_path / "journal", 200)
    journal.append(frames)
    journal.close()
    with pytest.raises(JournalError, match="unknown"):
        open_book(tmp_path, CONFIG)
    Journal(tmp_path / "journal", 200).close()
