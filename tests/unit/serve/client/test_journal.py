"""The state that a restarted client needs is on disk before the client acts on it."""

import random
from pathlib import Path

import msgspec
import pytest

from rollmesh.core.config import JournalConfig
from rollmesh.core.errors import JournalError
from rollmesh.core.ids import GroupId
from rollmesh.core.journal import Journal
from rollmesh.serve.client.arrivals import StoredResult
from rollmesh.serve.client.asks import Asked
from rollmesh.serve.client.journal import ClientJournal, open_journal
from rollmesh.serve.client.journal_entries import (
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


def ready(client_journal: ClientJournal) -> list[StoredResult]:
    """Return the results that the next client without checkpoints hands out."""
    return client_journal.begin(client_journal.earlier, None)


def group(seq: int) -> GroupId:
    return GroupId("r1", seq)


def keep(client_journal: ClientJournal, seq: int, complete: bool = True) -> int:
    message = GroupFinished(group(seq), 1, "w1", complete)
    return client_journal.keep(message, Packet(message, "", b"record", (b"ids!", b"lps!"))).position


def test_results_that_no_step_used_are_restored_once(tmp_path: Path) -> None:
    client_journal = open_journal(tmp_path, CONFIG)
    client_journal.begin(RunBegan("r1"), None)
    for seq in range(4):
        keep(client_journal, seq)
    client_journal.note(StepTaken(0, (group(0), group(2))))
    client_journal.drop(group(3), "stale")
    client_journal.note(Published(1, 1))
    client_journal.close()
    again = open_journal(tmp_path, CONFIG)
    [restored] = ready(again)
    assert (restored.group_id, restored.num_bytes) == (group(1), 14)
    loaded = again.load(restored)
    assert (loaded.group_id, loaded.body) == (group(1), b"record")
    assert [bytes(buffer) for buffer in loaded.buffers] == [b"ids!", b"lps!"]
    assert again.ended["r1"].intervals() == [(0, 4)]
    again.close()


def test_an_incomplete_result_leaves_an_entry_and_is_not_restored(tmp_path: Path) -> None:
    client_journal = open_journal(tmp_path, CONFIG)
    keep(client_journal, 5, complete=False)
    client_journal.close()
    again = open_journal(tmp_path, CONFIG)
    assert ready(again) == []
    assert 5 in again.ended["r1"]
    again.close()


def test_freed_segments_leave_the_set_of_ended_groups(tmp_path: Path) -> None:
    client_journal = open_journal(tmp_path, CONFIG)
    client_journal.begin(RunBegan("r1"), None)
    for seq in range(20):
        keep(client_journal, seq)
        client_journal.ended["r1"].add(seq)
    before = client_journal.size_bytes
    client_journal.take(tuple(group(seq) for seq in range(18)))
    assert client_journal.size_bytes < before
    client_journal.close()
    again = open_journal(tmp_path, CONFIG)
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


def test_open_requests_survive_the_process_and_ended_ones_do_not(tmp_path: Path) -> None:
    client_journal = open_journal(tmp_path, CONFIG)
    client_journal.begin(RunBegan("r1", "c1", "tcp://sink"), None)
    for seq in range(4):
        client_journal.ask(asked(seq))
    keep(client_journal, 0)
    keep(client_journal, 1, complete=False)
    client_journal.drop(group(2), "deadline: over")
    client_journal.close()
    again = open_journal(tmp_path, CONFIG)
    [reopened] = again.reopened()
    assert reopened == msgspec.structs.replace(asked(3), attempts=1)
    assert again.earlier == RunBegan("r1", "c1", "tcp://sink")
    again.close()


def test_the_deadline_of_an_open_request_continues_while_no_process_runs(tmp_path: Path) -> None:
    client_journal = open_journal(tmp_path, CONFIG)
    client_journal.ask(asked(0, deadline_s=60.0))
    client_journal.ask(asked(1, deadline_s=0.001))
    client_journal.close()
    again = open_journal(tmp_path, CONFIG)
    lasting, over = again.reopened()
    assert 50.0 < lasting.deadline_s < 60.0
    assert 0.0 < over.deadline_s < 0.01
    again.close()


@pytest.mark.parametrize("is_dropped", [False, True], ids=["trained", "dropped"])
def test_taken_results_free_their_segments_and_are_not_restored(
    tmp_path: Path, is_dropped: bool
) -> None:
    client_journal = open_journal(tmp_path, CONFIG)
    client_journal.begin(RunBegan("r1", "c1", "tcp://sink"), None)
    sizes = []
    for seq in range(100):
        keep(client_journal, seq)
        client_journal.ended["r1"].add(seq)
        if is_dropped:
            client_journal.part(GroupParted(group(seq), "barren", 0))
        else:
            client_journal.take((group(seq),))
        sizes.append(client_journal.size_bytes)
    assert max(sizes) < 5 * CONFIG.segment_bytes
    client_journal.close()
    again = open_journal(tmp_path, CONFIG)
    assert ready(again) == []
    assert again.ended["r1"].intervals() == [(0, 100)]
    assert again.earlier == RunBegan("r1", "c1", "tcp://sink")
    again.close()


def test_taking_a_result_keeps_open_requests_and_other_results(tmp_path: Path) -> None:
    client_journal = open_journal(tmp_path, CONFIG)
    client_journal.begin(RunBegan("r1"), None)
    client_journal.ask(asked(0))
    for seq in range(1, 60):
        keep(client_journal, seq)
        client_journal.ended["r1"].add(seq)
        if seq > 1:
            client_journal.take((group(seq),))
    client_journal.close()
    again = open_journal(tmp_path, CONFIG)
    assert [each.group_id for each in again.reopened()] == [group(0)]
    assert [each.group_id for each in ready(again)] == [group(1)]
    again.close()


def test_an_open_request_does_not_retain_later_entries(tmp_path: Path) -> None:
    client_journal = open_journal(tmp_path, CONFIG)
    client_journal.begin(RunBegan("r1"), None)
    client_journal.ask(asked(1000, deadline_s=600.0))
    client_journal.note(GroupTried(group(1000), attempts=3, excused=1))
    [before] = client_journal.reopened()
    for seq in range(300):
        keep(client_journal, seq)
        client_journal.ended["r1"].add(seq)
        client_journal.take((group(seq),))
        assert client_journal.size_bytes < 6 * CONFIG.segment_bytes
    client_journal.close()
    again = open_journal(tmp_path, CONFIG)
    [reopened] = again.reopened()
    assert (reopened.group_id, reopened.attempts, reopened.excused) == (group(1000), 3, 1)
    assert bytes(reopened.body) == b"task"
    assert 590.0 < reopened.deadline_s <= before.deadline_s
    again.close()


class Model:
    """Expected contents of a journal, in memory."""

    def __init__(self) -> None:
        self.open: set[int] = set()
        self.untaken: set[int] = set()
        self.ended: set[int] = set()
        self.next_seq = 0

    def ask(self, client_journal: ClientJournal) -> None:
        client_journal.ask(asked(self.next_seq))
        self.open.add(self.next_seq)
        self.next_seq += 1

    def end(self, client_journal: ClientJournal, seq: int, *, has_result: bool) -> None:
        if has_result:
            keep(client_journal, seq)
            self.untaken.add(seq)
        else:
            client_journal.drop(group(seq), "deadline: over")
        client_journal.ended["r1"].add(seq)
        self.ended.add(seq)
        self.open.discard(seq)

    def take(self, client_journal: ClientJournal, seqs: list[int]) -> None:
        client_journal.take(tuple(group(seq) for seq in seqs))
        self.untaken -= set(seqs)


@pytest.mark.parametrize("seed", range(40))
def test_a_reopened_journal_has_all_needed_state_after_any_operations(
    tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    model, client_journal = Model(), open_journal(tmp_path, CONFIG)
    client_journal.begin(RunBegan("r1", "c1", "tcp://sink"), None)
    for _ in range(150):
        match rng.choice(["ask", "ask", "end", "end", "take", "take", "reopen"]):
            case "ask":
                model.ask(client_journal)
            case "end" if model.open:
                model.end(
                    client_journal, rng.choice(sorted(model.open)), has_result=rng.random() < 0.8
                )
            case "take" if model.untaken:
                num = rng.randint(1, len(model.untaken))
                model.take(client_journal, rng.sample(sorted(model.untaken), num))
            case "reopen":
                client_journal.close()
                client_journal = open_journal(tmp_path, CONFIG)
                assert {each.group_id.seq for each in client_journal.reopened()} == model.open
                assert {each.group_id.seq for each in ready(client_journal)} == model.untaken
                assert set(range(model.next_seq)) - model.open == model.ended
                assert all(
                    (seq in client_journal.ended["r1"]) == (seq in model.ended)
                    for seq in range(150)
                )
                assert client_journal.earlier == BEGAN
    client_journal.close()


def test_entries_that_a_full_disk_refused_are_written_before_any_other(tmp_path: Path) -> None:
    client_journal = open_journal(tmp_path, CONFIG)
    client_journal.begin(RunBegan("r1", "c1", "tcp://sink"), None)
    client_journal.ask(asked(0))
    client_journal.ask(asked(1))
    for seq in (2, 3):
        keep(client_journal, seq)
        client_journal.ended["r1"].add(seq)
    with full_disk(0):
        client_journal.ended["r1"].add(0)
        with pytest.raises(JournalError, match="File too large"):
            client_journal.drop(group(0), "deadline: over")
        with pytest.raises(JournalError, match="File too large"):
            client_journal.take((group(2),))
    keep(client_journal, 4)
    client_journal.close()
    again = open_journal(tmp_path, CONFIG)
    assert [each.group_id for each in again.reopened()] == [group(1)]
    assert [each.group_id for each in ready(again)] == [group(3), group(4)]
    assert again.ended["r1"].intervals() == [(0, 1), (2, 5)]
    assert again.earlier == RunBegan("r1", "c1", "tcp://sink")
    again.close()


def test_results_taken_while_the_disk_was_full_free_their_segments(
    tmp_path: Path,
) -> None:
    client_journal = open_journal(tmp_path, CONFIG)
    client_journal.begin(RunBegan("r1"), None)
    for seq in range(60):
        keep(client_journal, seq)
        client_journal.ended["r1"].add(seq)
    for seq in range(60):
        with full_disk(0 if seq < 30 else 2**20):
            try:
                client_journal.take((group(seq),))
            except JournalError:
                assert seq < 30
    assert client_journal.size_bytes < 5 * CONFIG.segment_bytes
    client_journal.close()
    again = open_journal(tmp_path, CONFIG)
    assert ready(again) == []
    assert again.ended["r1"].intervals() == [(0, 60)]
    again.close()


def test_no_segment_is_freed_before_the_checkpoint_that_covers_it_is_recorded(
    tmp_path: Path,
) -> None:
    client_journal = open_journal(tmp_path, CONFIG)
    client_journal.begin(RunBegan("r1"), StateSaved())
    for seq in range(20):
        keep(client_journal, seq)
        client_journal.ended["r1"].add(seq)
    client_journal.note(StepTaken(0, tuple(map(group, range(20)))))
    before = client_journal.size_bytes
    saved = StateSaved(1, 1, {"r1": [(0, 20)]})
    client_journal.cover(saved)
    assert client_journal.size_bytes == before  # The only checkpoint may become damaged.
    with full_disk(0), pytest.raises(JournalError):
        client_journal.cover(StateSaved(2, 2, {"r1": [(0, 20)]}))
    assert client_journal.size_bytes == before
    client_journal.note(Published(2, 1))  # pending entries are written before this one
    client_journal.cover(StateSaved(3, 3, {"r1": [(0, 20)]}))
    assert client_journal.size_bytes < before
    assert client_journal.history().saved == StateSaved(2, 2, {"r1": [(0, 20)]})
    client_journal.close()


def test_over_budget_the_newest_checkpoint_alone_frees_segments(tmp_path: Path) -> None:
    client_journal = open_journal(tmp_path, JournalConfig(segment_bytes=200, max_bytes=4000))
    client_journal.begin(RunBegan("r1"), StateSaved())
    sizes = []
    for seq in range(300):
        keep(client_journal, seq)
        client_journal.ended["r1"].add(seq)
        client_journal.note(StepTaken(seq, (group(seq),)))
        if seq % 30 == 0:
            client_journal.cover(StateSaved(seq + 1, seq + 1, {"r1": [(0, seq + 1)]}))
        sizes.append(client_journal.size_bytes)
        assert not client_journal.is_full
    assert 3000 < max(sizes) < 4000 + CONFIG.segment_bytes
    client_journal.close()
    again = open_journal(tmp_path, CONFIG)
    assert again.history().steps[0].step > 211, "it was freed by the checkpoint of 241 or 271 steps"
    again.close()


def test_requests_are_not_held_back_when_the_newest_checkpoint_can_free_the_journal(
    tmp_path: Path,
) -> None:
    client_journal = open_journal(tmp_path, JournalConfig(segment_bytes=200, max_bytes=4000))
    client_journal.begin(RunBegan("r1"), StateSaved())
    for seq in range(20):
        keep(client_journal, seq)
        client_journal.ended["r1"].add(seq)
    client_journal.cover(StateSaved(1, 1, {"r1": [(0, 19)]}))
    size_bytes = 0
    while client_journal.size_bytes > size_bytes:
        size_bytes = client_journal.size_bytes
        client_journal.part(GroupParted(group(19), "stale: age 3", 0))
        assert not client_journal.is_full
    client_journal.close()


def test_a_result_whose_entry_frees_segments_counts_as_ended(tmp_path: Path) -> None:
    config = JournalConfig(segment_bytes=200, max_bytes=4000)
    client_journal = open_journal(tmp_path, config)
    client_journal.begin(BEGAN, StateSaved())
    for seq in range(20):
        keep(client_journal, seq)
        client_journal.ended["r1"].add(seq)
    client_journal.cover(StateSaved(1, 1, {"r1": [(0, 20)]}))
    size_bytes, seq = client_journal.size_bytes, 20
    while client_journal.size_bytes >= size_bytes:  # the entry over the budget frees the segments
        size_bytes = client_journal.size_bytes
        keep(client_journal, seq)
        seq += 1
    client_journal.close()
    again = open_journal(tmp_path, config)
    assert again.ended["r1"].intervals() == [(0, seq)]
    again.close()


def test_taking_results_frees_a_disk_that_is_full_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client_journal = open_journal(tmp_path, CONFIG)
    client_journal.begin(RunBegan("r1", "c1", "tcp://sink"), None)
    with small_disk(monkeypatch, tmp_path / "journal", 3000):
        kept: list[int] = []
        for seq in range(500):
            try:
                keep(client_journal, seq)
            except JournalError:
                client_journal.take(tuple(group(each) for each in kept))
                kept.clear()
                keep(client_journal, seq)
            kept.append(seq)
            client_journal.ended["r1"].add(seq)
    client_journal.close()
    again = open_journal(tmp_path, CONFIG)
    assert [each.group_id.seq for each in ready(again)] == kept
    assert again.ended["r1"].intervals() == [(0, 500)]
    assert again.earlier == RunBegan("r1", "c1", "tcp://sink")
    again.close()


def test_a_journal_over_its_budget_is_full(tmp_path: Path) -> None:
    client_journal = open_journal(tmp_path, JournalConfig(segment_bytes=200, max_bytes=120))
    client_journal.begin(BEGAN, None)
    full = [client_journal.is_full]
    keep(client_journal, 0)
    full.append(client_journal.is_full)
    assert full == [False, True]
    client_journal.close()


@pytest.mark.parametrize("frames", [[], [b"\xc1"], [msgspec.msgpack.encode(["later", 1])]])
def test_an_unknown_entry_is_an_error_and_releases_the_journal(
    tmp_path: Path, frames: list[bytes]
) -> None:
    journal = Journal(tmp_path / "journal", 200)
    journal.append(frames)
    journal.close()
    with pytest.raises(JournalError, match="unknown"):
        open_journal(tmp_path, CONFIG)
    Journal(tmp_path / "journal", 200).close()
