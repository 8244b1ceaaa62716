"""The journal holds live records once and removes dead ones; a full disk loses nothing."""

import asyncio
import itertools
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from rollmesh.core.config import JournalConfig
from rollmesh.core.errors import ConfigError, ContentLost, SessionError
from rollmesh.runtime.blobs import num_blobs, spill_over
from rollmesh.runtime.tokens.prompts import Prompts
from rollmesh.runtime.tokens.tokenizer import Tokenizer
from rollmesh.serve.interception.capture import OpenedSession
from rollmesh.serve.interception.journal.entries import ContentStored, decode
from rollmesh.serve.interception.journal.gateway_journal import GatewayJournal, SessionUsage
from rollmesh.serve.interception.journal.session_writer import MAX_SAME, SessionTexts
from rollmesh.serve.interception.token_capture import TokenSession
from tests.disks import lose_files, no_room_in_memory, small_disk
from tests.unit.serve.interception.journal.gateway_process import SEGMENT_BYTES, GatewayProcess

Begin = Callable[[], GatewayProcess]
LONG = "x" * 20_000
TOOLS = b'[{"type":"function","function":{"name":"%b"}}]' % (b"f" * 90)


@pytest.fixture
def begin(tmp_path: Path, prompts: Prompts, tokenizer: Tokenizer) -> Begin:
    ids = [*tokenizer.encode("a"), *tokenizer.encode("<|im_end|>")]
    return lambda: GatewayProcess(tmp_path / "journal", prompts, ids)


async def fill_segments(gateway: GatewayProcess, opened: OpenedSession) -> None:
    for number in itertools.count():
        await gateway.run_call(opened, f"{number} " + "hello " * 300)


def num_files(gateway: GatewayProcess) -> int:
    return len(list(gateway.journal.folder.glob("*.journal")))


async def test_deleted_sessions_leave_only_a_few_segments(begin: Begin) -> None:
    gateway = begin()
    for _ in range(400):
        opened = gateway.open()
        await gateway.run_call(opened, "hello " * 20)
        gateway.report(opened)
        gateway.registry.delete(gateway.entry(opened))
    assert gateway.journal.live_bytes == 0
    assert gateway.journal.journal.end > 12 * SEGMENT_BYTES
    assert num_files(gateway) <= 4
    assert gateway.journal.journal.size_bytes <= 4 * SEGMENT_BYTES


async def test_a_dead_segment_is_removed_without_being_read(begin: Begin) -> None:
    gateway = begin()
    lasting, first = None, min(gateway.journal.folder.glob("*.journal"))
    while first.exists():
        opened = gateway.open()
        await gateway.run_call(opened, "hello " * 20)
        gateway.registry.delete(gateway.entry(opened))
        if lasting is None and gateway.journal.journal.end > SEGMENT_BYTES:
            first.write_bytes(b"\0" * first.stat().st_size)  # a reader would find damage
            lasting = gateway.open()
            await gateway.run_call(lasting, "a")
        assert gateway.journal.journal.end < 10 * SEGMENT_BYTES
    assert lasting is not None
    gateway.journal.close_journal()
    after = begin()
    assert (after.recovered.num_open, after.recovered.set_aside) == (1, [])


async def test_a_session_that_stays_open_for_days_does_not_retain_the_journal(begin: Begin) -> None:
    gateway = begin()
    lasting = gateway.open()
    texts = ["first"]
    await gateway.run_call(lasting, *texts)
    for number in range(300):
        opened = gateway.open()
        await gateway.run_call(opened, "hello " * 20)
        gateway.registry.delete(gateway.entry(opened))
        if number % 30 == 0:
            texts.append(f"more {number}")
            await gateway.run_call(lasting, *texts)
    assert gateway.journal.journal.size_bytes <= 2 * gateway.journal.live_bytes + 4 * SEGMENT_BYTES
    gateway.journal.close_journal()
    after = begin()
    assert after.recovered.set_aside == []
    assert after.recovered.num_open == 1
    assert gateway.journal.live_bytes == pytest.approx(after.journal.live_bytes, abs=1024)
    report = after.report(lasting)
    assert report["num_calls"] == len(texts)
    assert (len(report["samples"]), report["forks"]) == (1, [])


async def test_a_long_text_is_written_once_and_removed_with_its_last_session(
    begin: Begin,
) -> None:
    gateway = begin()
    one, other = gateway.open(), gateway.open()
    sizes = []
    for opened in (one, other):
        before = gateway.journal.journal.end
        await gateway.run_call(opened, LONG)
        sizes.append(gateway.journal.journal.end - before)
    assert sizes[0] - sizes[1] == pytest.approx(len(LONG), abs=200)
    gateway.journal.close_journal()
    after = begin()
    for opened in (one, other):
        assert after.report(opened)["messages"][0]["content"] == LONG
        after.registry.delete(after.entry(opened))
    assert after.journal.live_bytes == 0


async def test_an_answer_that_a_full_disk_refused_is_written_and_returned_on_a_retry(
    begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = begin()
    opened = gateway.open()
    await gateway.run_call(opened, "one")
    size = sum(path.stat().st_size for path in gateway.journal.folder.iterdir())
    with small_disk(monkeypatch, gateway.journal.folder, size):
        for _ in range(2):
            with pytest.raises(SessionError, match=r"No space left") as refused:
                await gateway.run_call(opened, "one", "two")
            assert (refused.value.status, refused.value.code) == (507, "journal_full")
        with pytest.raises(SessionError, match=r"No space left"):
            gateway.open()
        with pytest.raises(SessionError, match=r"No space left"):
            gateway.registry.reward(gateway.entry(opened), 1.0, None)
        assert len(gateway.registry) == 1
    await gateway.run_call(opened, "one", "two")
    assert len(gateway.sampler.generations) == 2, "the retry returns the unwritten answer"
    gateway.registry.reward(gateway.entry(opened), 1.0, None)
    gateway.journal.close_journal()
    after = begin()
    assert after.recovered.set_aside == []
    report = after.report(opened)
    assert (report["num_calls"], len(report["samples"]), report["unused"]) == (2, 1, [])
    assert report["samples"][0]["reward"] == 1.0


async def test_no_call_begins_over_budget_until_a_deletion_makes_room(
    tmp_path: Path, prompts: Prompts, tokenizer: Tokenizer
) -> None:
    ids = [*tokenizer.encode("a"), *tokenizer.encode("<|im_end|>")]
    gateway = GatewayProcess(tmp_path / "journal", prompts, ids, max_bytes=6 * SEGMENT_BYTES)
    kept, large = gateway.open(), gateway.open()
    await gateway.run_call(kept, "one")
    with pytest.raises(SessionError, match=r"journal\.max_bytes") as refused:
        await fill_segments(gateway, large)
    assert (refused.value.status, refused.value.code) == (503, "journal_full")
    assert refused.value.retry_after_s
    with pytest.raises(SessionError, match=r"delete finished sessions"):
        gateway.open()
    gateway.registry.delete(gateway.entry(large))
    await gateway.run_call(kept, "one", "two")
    assert gateway.journal.journal.size_bytes <= 6 * SEGMENT_BYTES


def test_a_folder_that_other_users_can_read_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "journal"
    folder.mkdir(mode=0o755)
    with pytest.raises(ConfigError, match=r"other users can read it; chmod 700"):
        GatewayJournal(folder, JournalConfig())
    with pytest.raises(ConfigError, match=r"name another folder, or --no-journal"):
        GatewayJournal(Path("/proc/here"), JournalConfig())


def test_a_file_instead_of_a_journal_folder_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "notes"
    file.touch()
    with pytest.raises(ConfigError) as caught:
        GatewayJournal(file, JournalConfig())
    assert str(caught.value) == f"--journal {file}: is a file; name a folder, or --no-journal"


async def test_tools_are_written_once_for_all_sessions_and_removed_with_the_last(
    begin: Begin,
) -> None:
    gateway = begin()
    opened = [gateway.open() for _ in range(3)]
    before = num_blobs()
    for each in opened:
        for texts in (["one"], ["one", "two"]):
            await gateway.run_call(each, *texts, tools=TOOLS)
    records = b"".join(b"".join(frames) for _, frames in gateway.journal.journal.replay())
    assert records.count(TOOLS) == 1
    assert num_blobs() == before, "tools are no blobs, which would take whole pages on disk"
    gateway.journal.close_journal()
    after = begin()
    await after.run_call(opened[0], "one", "two", "three", tools=TOOLS)
    records = b"".join(b"".join(frames) for _, frames in after.journal.journal.replay())
    assert records.count(TOOLS) == 1
    for each in opened:
        after.registry.delete(after.entry(each))
    assert after.journal.live_bytes == 0


async def test_compaction_starts_only_after_recovery(begin: Begin) -> None:
    """Recovery has to note the positions of contents first."""
    gateway = begin()
    opened = gateway.open()
    await gateway.run_call(opened, LONG)
    gateway.journal.close_journal()
    journal = GatewayJournal(gateway.journal.folder, JournalConfig(segment_bytes=1024))

    def write_records() -> None:
        for number in range(200):
            journal.usage["s"] = SessionUsage(contents=set())
            journal.reward("s", number, None)
            journal.close("s")

    write_records()
    assert journal.journal.size_bytes == journal.journal.end
    journal.drop_unreferenced()
    write_records()
    assert journal.journal.size_bytes < journal.journal.end
    journal.close_journal()


def test_a_folder_of_another_gateway_is_refused_even_if_a_segment_vanishes_meanwhile(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "journal"
    other = GatewayJournal(folder, JournalConfig())
    # The segment is listed, but has gone when it is examined.
    (folder / "00000000000000000000.journal").symlink_to(folder / "gone")
    with pytest.raises(ConfigError, match="another process writes this journal"):
        GatewayJournal(folder, JournalConfig())
    other.close_journal()


async def test_no_call_begins_while_the_disk_is_full(
    begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = begin()
    opened = gateway.open()
    await gateway.run_call(opened, "one")
    size = sum(path.stat().st_size for path in gateway.journal.folder.iterdir())
    with small_disk(monkeypatch, gateway.journal.folder, size):
        for text in ("two", "three", "four"):
            with pytest.raises(SessionError, match=r"No space left") as refused:
                await gateway.run_call(opened, "one", text)
            assert (refused.value.status, refused.value.code) == (507, "journal_full")
        assert len(gateway.sampler.generations) == 2, "a call that cannot be written is not sampled"
    await gateway.run_call(opened, "one", "three")
    assert len(gateway.sampler.generations) == 3


async def test_texts_that_never_recur_are_not_retained(begin: Begin) -> None:
    """Settings that differ with each call are such texts."""
    gateway = begin()
    opened = gateway.open()
    session_id = opened.captured.session_id
    texts = SessionTexts(gateway.journal, session_id)

    def name(number: int, size: int) -> int | bytes:
        named = texts.same(b"%d " % number * (size // 4))
        gateway.journal.reward(
            session_id, 1.0, None
        )  # a record after the texts that it may reference
        return named

    before = num_blobs()
    tracemalloc.start()
    try:
        for number in range(300):
            name(number, 12_000)
            name(number, 40_000)
        held_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert num_blobs() - before <= MAX_SAME
    assert held_bytes < 300 * 12_000 / 4 + MAX_SAME * 60_000
    assert name(299, 12_000) == name(299, 12_000), "the texts are found again"
    assert name(299, 40_000) == name(299, 40_000)


async def test_each_byte_that_is_written_is_counted_once(begin: Begin) -> None:
    gateway = begin()
    naming = gateway.open()
    session_id = naming.captured.session_id
    before = (
        gateway.journal.live_bytes - gateway.journal.journal.end
    )  # both are equal while everything is live
    texts = SessionTexts(gateway.journal, session_id)
    for record in range(3):
        texts.text(b"%d" % record + LONG.encode())
        gateway.open()
        gateway.journal.reward(session_id, 1.0, None)
    assert gateway.journal.live_bytes - gateway.journal.journal.end == pytest.approx(
        before, abs=200
    )
    gateway.report(naming)
    after = gateway.journal.live_bytes - gateway.journal.journal.end
    assert after == pytest.approx(before - 3 * len(LONG), abs=200), (
        "a report references none of its texts"
    )


async def test_lost_contents_affect_only_the_sessions_that_use_them(
    begin: Begin, tmp_path: Path
) -> None:
    gateway, spilled = begin(), tmp_path / "spilled"
    spilled.mkdir()
    losing, other = gateway.open(), gateway.open()
    number = SessionTexts(gateway.journal, losing.captured.session_id).text(LONG.encode())
    with no_room_in_memory(spilled):
        assert spill_over() >= len(LONG)
        lose_files(spilled)
        calls = [gateway.run_call(opened, "one") for opened in (losing, other)]
        [failure, result] = await asyncio.gather(*calls, return_exceptions=True)
        assert result is None
        assert isinstance(failure, ContentLost)
        with pytest.raises(ContentLost):
            gateway.registry.reward(gateway.entry(losing), 1.0, None)
        gateway.open()
        gateway.report(losing)  # references no lost text
    gateway.journal.close_journal()
    records = [decode(frames[0]) for _, frames in gateway.journal.journal.replay()]
    assert ContentStored(int(number)) not in records
    after = begin()
    assert (after.recovered.num_open, after.recovered.num_finished) == (2, 1)
    assert after.recovered.set_aside == []


async def test_a_report_is_written_after_earlier_pending_events(begin: Begin) -> None:
    gateway = begin()
    opened = gateway.open()
    await gateway.run_call(opened, "one")
    captured = gateway.entry(opened).captured
    assert isinstance(captured, TokenSession)
    captured.session.end_early("a limit of ours")
    report = gateway.report(opened)
    gateway.journal.close_journal()
    after = begin()
    assert (after.recovered.num_finished, after.recovered.set_aside) == (1, [])
    assert after.report(opened) == report


async def test_a_segment_that_cannot_be_compacted_delays_no_write(begin: Begin) -> None:
    gateway = begin()
    await gateway.run_call(gateway.open(), "one")
    gateway.journal.journal.append([b"no entry"])
    opened = gateway.open()
    while gateway.journal.journal.end < 8 * SEGMENT_BYTES:
        await gateway.run_call(opened, "hello " * 300)
        gateway.registry.delete(gateway.entry(opened))
        opened = gateway.open()
    await gateway.run_call(opened, "one")
    assert gateway.journal.journal.segments[0] == 0, "the unreadable record keeps its segment"
