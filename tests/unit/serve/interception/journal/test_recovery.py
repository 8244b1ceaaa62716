"""Restoring a registry from its journal: which sessions return, and which are set aside by name."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from rollmesh.core.errors import ConfigError, SessionError
from rollmesh.core.journal import Journal
from rollmesh.runtime.tokens.prompts import Prompts
from rollmesh.runtime.tokens.tokenizer import Tokenizer
from rollmesh.serve.interception.journal.entries import (
    FORMAT,
    ContentStored,
    JournalHeader,
    SessionEntry,
    SessionGrew,
    SessionOpened,
    decode,
)
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


async def test_entries_come_back_in_their_order_wherever_they_stand(begin: Begin) -> None:
    gateway = begin()
    opened = gateway.open()
    await gateway.say(opened, "one")
    gateway.registry.reward(gateway.entry(opened), 0.25, None)
    await gateway.say(opened, "one", "two")
    gateway.registry.reward(gateway.entry(opened), 0.5, None)
    await gateway.say(opened, "one", "two", "three")
    # As if all but the newest record had been moved behind it, some of them twice.
    rewrite(gateway, lambda records: [records[0], records[-1], *records[1:-1], *records[1:3]])
    after = begin()
    report = after.report(opened)
    assert after.recovered.set_aside == []
    assert (report["num_calls"], len(report["samples"]), report["forks"]) == (3, 1, [])
    assert report["samples"][0]["reward"] == 0.5


async def test_a_session_without_all_of_its_records_is_set_aside_alone(begin: Begin) -> None:
    gateway = begin()
    lost, kept = gateway.open(), gateway.open()
    for opened in (lost, kept):
        await gateway.say(opened, "one")
        await gateway.say(opened, "one", "two")
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
    assert again.recovered.set_aside == after.recovered.set_aside, "it is told at each start"
    live_bytes = again.journal.live_bytes
    assert again.registry.delete_set_aside(lost_id)
    assert again.journal.live_bytes < live_bytes
    again.journal.close_journal()
    assert begin().recovered.set_aside == []


async def test_a_session_with_invalid_events_affects_no_other(begin: Begin) -> None:
    gateway = begin()
    lost, kept = gateway.open(), gateway.open()
    for opened in (lost, kept):
        await gateway.say(opened, "one")
    lost_id = lost.captured.session_id

    def garbled(records: list[list[bytes]]) -> list[list[bytes]]:
        wrong = SessionGrew(lost_id, 1)
        return [[each[0], b"\xc1"] if decode(each[0]) == wrong else each for each in records]

    rewrite(gateway, garbled)
    after = begin()
    [why] = after.recovered.set_aside
    assert why.startswith(f"{lost_id}: DecodeError: ")
    assert after.report(kept)["num_calls"] == 1


async def test_a_finished_session_is_restored_as_its_report_though_its_events_are_gone(
    begin: Begin,
) -> None:
    gateway = begin()
    opened = gateway.open()
    await gateway.say(opened, "one " * 5000)
    report = gateway.report(opened)
    gateway.registry.reward(gateway.entry(opened), 0.5, None)
    rewrite(
        gateway, lambda records: [r for r in records if not isinstance(decode(r[0]), SessionGrew)]
    )
    after = begin()
    assert after.recovered.num_finished == 1
    told = after.report(opened)
    assert told.pop("samples")[0]["reward"] == 0.5
    assert told == {name: value for name, value in report.items() if name != "samples"}


async def test_damage_in_the_middle_is_one_line_that_names_file_and_offset(begin: Begin) -> None:
    gateway = begin()
    opened = gateway.open()
    await gateway.say(opened, "one")
    gateway.journal.close_journal()
    [file] = gateway.journal.folder.glob("*.journal")
    raw = bytearray(file.read_bytes())
    raw[40] ^= 0xFF
    file.write_bytes(raw)
    with pytest.raises(ConfigError, match=r"journal: the record at offset \d+ .*--no-journal"):
        begin()


@pytest.mark.parametrize(
    ("began", "said"),
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
async def test_what_is_made_again_is_made_by_what_made_it(
    begin: Begin, monkeypatch: pytest.MonkeyPatch, began: JournalHeader, said: str
) -> None:
    gateway = begin()
    gateway.journal.close_journal()
    monkeypatch.setattr("tests.unit.serve.interception.journal.gateway_process.HEADER", began)
    with pytest.raises(ConfigError, match=said):
        begin()


@pytest.mark.parametrize("frames", [[b"\xc1"], [msgspec.msgpack.encode(["grown", "s", 1])], []])
async def test_records_of_another_release_are_refused_in_a_line(
    begin: Begin, frames: list[bytes]
) -> None:
    gateway = begin()
    rewrite(gateway, lambda records: [frames, *records])
    with pytest.raises(ConfigError, match="no gateway of this release wrote; use"):
        begin()


async def test_a_session_whose_texts_are_gone_is_named_with_the_text(begin: Begin) -> None:
    gateway = begin()
    lost, kept = gateway.open(), gateway.open()
    await gateway.say(lost, "x" * 20_000)
    await gateway.say(kept, "one")
    rewrite(
        gateway, lambda records: [r for r in records if not isinstance(decode(r[0]), ContentStored)]
    )
    after = begin()
    lost_id = lost.captured.session_id
    assert after.recovered.set_aside == [f"{lost_id}: LookupError: its text or image 0 is missing"]
    assert after.report(kept)["num_calls"] == 1


@pytest.mark.parametrize("missing", [ContentStored, SessionOpened])
async def test_a_finished_session_that_lacks_something_takes_no_other_along(
    begin: Begin, missing: type
) -> None:
    gateway = begin()
    lost, kept = gateway.open(), gateway.open()
    lost_id = lost.captured.session_id
    await gateway.say(lost, "one " * 5000)
    await gateway.say(kept, "one")
    for opened in (lost, kept):
        gateway.report(opened)

    def is_there(frames: list[bytes]) -> bool:
        entry = decode(frames[0])
        is_other = isinstance(entry, SessionEntry) and entry.session_id != lost_id
        return is_other or not isinstance(entry, missing)

    rewrite(gateway, lambda records: [each for each in records if is_there(each)])
    after = begin()
    [why] = after.recovered.set_aside
    what = "its text or image" if missing is ContentStored else "its opening record"
    assert why.startswith(f"{lost_id}: LookupError: {what}")
    assert after.report(kept)["num_calls"] == 1
    with pytest.raises(SessionError) as refused:
        after.runtime.find(lost.api_key)
    assert refused.value.status == 401, "no door leads to what is not in the book"


async def test_what_could_not_be_done_again_is_there_for_a_release_that_can(begin: Begin) -> None:
    """With its contents, though other sessions that shared them are gone, and after compaction."""
    gateway = begin()
    lost, other = gateway.open(), gateway.open()
    for opened in (lost, other):
        await gateway.say(opened, "one " * 5000)
    right = SessionGrew(lost.captured.session_id, 1)
    deeds: list[bytes] = []

    def garbled(records: list[list[bytes]]) -> list[list[bytes]]:
        deeds.extend(each[1] for each in records if decode(each[0]) == right)
        return [[each[0], b"\xc1"] if decode(each[0]) == right else each for each in records]

    rewrite(gateway, garbled)
    after = begin()
    assert after.recovered.num_set_aside == 1
    after.registry.delete(after.entry(other))
    for _ in range(200):
        passing = after.open()
        await after.say(passing, "hello " * 20)
        after.registry.delete(after.entry(passing))
    assert after.journal.journal.end > 8 * SEGMENT_BYTES

    def mended(records: list[list[bytes]]) -> list[list[bytes]]:
        return [[each[0], deeds[0]] if decode(each[0]) == right else each for each in records]

    rewrite(after, mended)
    again = begin()
    assert again.recovered.set_aside == []
    [told] = [each for each in again.report(lost)["messages"] if each["role"] == "user"]
    assert told["content"] == "one " * 5000


async def test_what_is_set_aside_is_freed_when_its_time_is_over(begin: Begin) -> None:
    gateway = begin()
    opened = gateway.open()
    await gateway.say(opened, "one")
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
