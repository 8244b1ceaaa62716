"""Restore a registry from its journal: which sessions return, and which are set aside by name."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from rollmesh.core.errors import ConfigError, SessionError
from rollmesh.core.journal import Journal
from rollmesh.runtime.session_deps import locks_of
from rollmesh.runtime.tokens.prompts import Prompts
from rollmesh.runtime.tokens.tokenizer import Tokenizer
from rollmesh.serve.interception.capture import JournaledSession
from rollmesh.serve.interception.journal.entries import (
    FORMAT,
    ContentStored,
    JournalHeader,
    SessionEntry,
    SessionGrew,
    SessionOpened,
    decode,
)
from rollmesh.serve.interception.journal.session_writer import SessionEventWriter
from rollmesh.serve.interception.token_capture import TokenSessionRestore
from tests.unit.serve.interception.journal.gateway_process import (
    RETENTION_S,
    SEGMENT_BYTES,
    GatewayProcess,
)

Begin = Callable[[], GatewayProcess]


@pytest.fixture
def begin(tmp_path: Path, prompts: Prompts, tokenizer: Tokenizer) -> Begin:
    ids = [*tokenizer.encode("a"), *tokenizer.encode("<|im_end|>")]
    return lambda: GatewayProcess(tmp_path / "journal", prompts, ids)


def rewrite(
    gateway: GatewayProcess, change: Callable[[list[list[bytes]]], list[list[bytes]]]
) -> None:
    """Rewrite the journal with changed records."""
    folder = gateway.journal.folder
    gateway.journal.close_journal()
    journal = Journal(folder, 2**20)
    records = [frames for _, frames in journal.replay()]
    journal.close()
    for file in folder.glob("*.journal"):
        file.unlink()
    journal = Journal(folder, 2**20)
    for frames in change(records):
        journal.append(frames)
    journal.close()


async def test_entries_are_restored_in_order_wherever_compaction_moved_them(begin: Begin) -> None:
    gateway = begin()
    opened = gateway.open()
    await gateway.run_call(opened, "one")
    gateway.registry.reward(gateway.entry(opened), 0.25, None)
    await gateway.run_call(opened, "one", "two")
    gateway.registry.reward(gateway.entry(opened), 0.5, None)
    await gateway.run_call(opened, "one", "two", "three")
    # All but the newest record are moved behind it, some of them twice.
    rewrite(gateway, lambda records: [records[0], records[-1], *records[1:-1], *records[1:3]])
    after = begin()
    report = after.report(opened)
    assert after.recovered.set_aside == []
    assert (report["num_calls"], len(report["samples"]), report["forks"]) == (3, 1, [])
    assert report["samples"][0]["reward"] == 0.5


async def test_only_the_session_with_missing_records_is_set_aside(begin: Begin) -> None:
    gateway = begin()
    lost, kept = gateway.open(), gateway.open()
    for opened in (lost, kept):
        await gateway.run_call(opened, "one")
        await gateway.run_call(opened, "one", "two")
    lost_id = lost.captured.session_id

    def without_first_call(records: list[list[bytes]]) -> list[list[bytes]]:
        return [each for each in records if decode(each[0]) != SessionGrew(lost_id, 1)]

    rewrite(gateway, without_first_call)
    after = begin()
    assert after.recovered.set_aside == [f"{lost_id}: some of its records are missing"]
    assert after.report(kept)["num_calls"] == 2
    with pytest.raises(SessionError, match=r"records are missing.*DELETE") as refused:
        after.entry(lost)
    assert (refused.value.status, refused.value.code) == (409, "session_set_aside")
    after.journal.close_journal()
    again = begin()
    assert again.recovered.set_aside == after.recovered.set_aside, "reported at each start"
    live_bytes = again.journal.live_bytes
    assert again.registry.delete_set_aside(lost_id)
    assert again.journal.live_bytes < live_bytes
    again.journal.close_journal()
    assert begin().recovered.set_aside == []


async def test_a_session_with_invalid_events_affects_no_other(begin: Begin) -> None:
    gateway = begin()
    lost, kept = gateway.open(), gateway.open()
    for opened in (lost, kept):
        await gateway.run_call(opened, "one")
    lost_id = lost.captured.session_id

    def corrupted(records: list[list[bytes]]) -> list[list[bytes]]:
        wrong = SessionGrew(lost_id, 1)
        return [[each[0], b"\xc1"] if decode(each[0]) == wrong else each for each in records]

    rewrite(gateway, corrupted)
    after = begin()
    [why] = after.recovered.set_aside
    assert why.startswith(f"{lost_id}: DecodeError: ")
    assert after.report(kept)["num_calls"] == 1


async def test_a_finished_session_is_restored_from_its_report_without_its_events(
    begin: Begin,
) -> None:
    gateway = begin()
    opened = gateway.open()
    await gateway.run_call(opened, "one " * 5000)
    report = gateway.report(opened)
    gateway.registry.reward(gateway.entry(opened), 0.5, None)
    rewrite(
        gateway, lambda records: [r for r in records if not isinstance(decode(r[0]), SessionGrew)]
    )
    after = begin()
    assert after.recovered.num_finished == 1
    report_fields = after.report(opened)
    assert report_fields.pop("samples")[0]["reward"] == 0.5
    assert report_fields == {name: value for name, value in report.items() if name != "samples"}


async def test_damage_in_the_middle_is_a_one_line_error_with_file_and_offset(begin: Begin) -> None:
    gateway = begin()
    opened = gateway.open()
    await gateway.run_call(opened, "one")
    gateway.journal.close_journal()
    [file] = gateway.journal.folder.glob("*.journal")
    raw = bytearray(file.read_bytes())
    raw[40] ^= 0xFF
    file.write_bytes(raw)
    with pytest.raises(ConfigError, match=r"journal: the record at offset \d+ .*--no-journal"):
        begin()


@pytest.mark.parametrize(
    ("began", "message"),
    [
        (
            JournalHeader("tokens", "n", "q", FORMAT),
            "chats tokens m q, this gateway has tokens n q; name another",
        ),
        (
            JournalHeader("tokens", "m", "r", FORMAT),
            "chats tokens m q, this gateway has tokens m r; name another",
        ),
        (
            JournalHeader("tokens", "m", "q", FORMAT + 1),
            rf"have format {FORMAT}, this release writes \d+; use",
        ),
    ],
)
async def test_a_journal_of_another_model_or_configuration_is_refused(
    begin: Begin, monkeypatch: pytest.MonkeyPatch, began: JournalHeader, message: str
) -> None:
    gateway = begin()
    gateway.journal.close_journal()
    monkeypatch.setattr("tests.unit.serve.interception.journal.gateway_process.HEADER", began)
    with pytest.raises(ConfigError, match=message):
        begin()


@pytest.mark.parametrize("frames", [[b"\xc1"], [msgspec.msgpack.encode(["grown", "s", 1])], []])
async def test_records_of_another_release_are_refused_in_one_line(
    begin: Begin, frames: list[bytes]
) -> None:
    gateway = begin()
    rewrite(gateway, lambda records: [frames, *records])
    with pytest.raises(ConfigError, match="no gateway of this release wrote; use"):
        begin()


async def test_a_session_with_a_lost_text_is_named_together_with_the_text(begin: Begin) -> None:
    gateway = begin()
    lost, kept = gateway.open(), gateway.open()
    await gateway.run_call(lost, "x" * 20_000)
    await gateway.run_call(kept, "one")
    rewrite(
        gateway, lambda records: [r for r in records if not isinstance(decode(r[0]), ContentStored)]
    )
    after = begin()
    lost_id = lost.captured.session_id
    assert after.recovered.set_aside == [f"{lost_id}: LookupError: its text or image 0 is missing"]
    assert after.report(kept)["num_calls"] == 1


@pytest.mark.parametrize("missing", [ContentStored, SessionOpened])
async def test_a_finished_session_with_lost_contents_affects_no_other(
    begin: Begin, missing: type
) -> None:
    gateway = begin()
    lost, kept = gateway.open(), gateway.open()
    lost_id = lost.captured.session_id
    await gateway.run_call(lost, "one " * 5000)
    await gateway.run_call(kept, "one")
    for opened in (lost, kept):
        gateway.report(opened)

    def is_kept(frames: list[bytes]) -> bool:
        entry = decode(frames[0])
        is_other = isinstance(entry, SessionEntry) and entry.session_id != lost_id
        return is_other or not isinstance(entry, missing)

    rewrite(gateway, lambda records: [each for each in records if is_kept(each)])
    after = begin()
    [why] = after.recovered.set_aside
    what = "its text or image" if missing is ContentStored else "its opening record"
    assert why.startswith(f"{lost_id}: LookupError: {what}")
    assert after.report(kept)["num_calls"] == 1
    with pytest.raises(SessionError) as refused:
        after.runtime.sessions.find(lost.api_key)
    assert refused.value.status == 401, "the key of an unregistered session is unknown"


async def test_a_session_that_was_set_aside_can_be_restored_by_a_later_release(
    begin: Begin,
) -> None:
    """Its contents survive compaction, even if other sessions that shared them are deleted."""
    gateway = begin()
    lost, other = gateway.open(), gateway.open()
    for opened in (lost, other):
        await gateway.run_call(opened, "one " * 5000)
    right = SessionGrew(lost.captured.session_id, 1)
    event_frames: list[bytes] = []

    def corrupted(records: list[list[bytes]]) -> list[list[bytes]]:
        event_frames.extend(each[1] for each in records if decode(each[0]) == right)
        return [[each[0], b"\xc1"] if decode(each[0]) == right else each for each in records]

    rewrite(gateway, corrupted)
    after = begin()
    assert after.recovered.num_set_aside == 1
    after.registry.delete(after.entry(other))
    for _ in range(200):
        passing = after.open()
        await after.run_call(passing, "hello " * 20)
        after.registry.delete(after.entry(passing))
    assert after.journal.journal.end > 8 * SEGMENT_BYTES

    def restored(records: list[list[bytes]]) -> list[list[bytes]]:
        return [
            [each[0], event_frames[0]] if decode(each[0]) == right else each for each in records
        ]

    rewrite(after, restored)
    again = begin()
    assert again.recovered.set_aside == []
    [message] = [each for each in again.report(lost)["messages"] if each["role"] == "user"]
    assert message["content"] == "one " * 5000


async def test_a_session_that_was_set_aside_is_removed_when_its_time_is_over(begin: Begin) -> None:
    gateway = begin()
    opened = gateway.open()
    await gateway.run_call(opened, "one")
    rewrite(
        gateway, lambda records: [r for r in records if not isinstance(decode(r[0]), SessionOpened)]
    )
    after = begin()
    assert after.recovered.num_set_aside == 1
    after.clock.advance(RETENTION_S / 2)
    after.registry.expire()
    assert after.journal.live_bytes > 0
    after.clock.advance(RETENTION_S)
    after.registry.expire()
    assert (after.journal.live_bytes, after.registry.num_expired) == (0, 1)
    after.journal.close_journal()
    assert begin().recovered.num_set_aside == 0


async def test_the_set_of_sent_images_is_never_changed_in_place(
    tmp_path: Path, prompts: Prompts
) -> None:
    gateway = GatewayProcess(tmp_path / "journal", prompts, [])

    def read(number: int) -> bytes:
        raise LookupError(number)

    journaled = JournaledSession("s", locks_of("key", "secret"), None, 7, read)
    writer = SessionEventWriter(gateway.journal, "s")
    restore = TokenSessionRestore(gateway.capture, journaled, writer)
    before = writer.shown
    restore.end()
    writer.shown |= {"a digest"}
    assert isinstance(writer.shown, frozenset)
    assert before == frozenset()
    gateway.journal.close_journal()
