"""Journals with changed bytes or records: they are read, or one error names the fault.

A checksum reveals changed bytes. A changed record, as another version of rollmesh could write it,
has a correct checksum and is found when it is decoded.
"""

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from rollmesh.core.config import JournalConfig
from rollmesh.core.errors import ConfigError, JournalError
from rollmesh.core.journal import Journal
from rollmesh.core.types import SamplingPolicy, Task
from rollmesh.runtime.tokens.prompts import Prompts
from rollmesh.runtime.tokens.tokenizer import Tokenizer
from rollmesh.serve.client.journal import open_journal
from rollmesh.serve.client.journal_entries import GroupTried, Published, RunBegan, StepTaken
from rollmesh.wire.frames import encode_ask
from rollmesh.wire.messages import GroupAsk
from tests.security.mutations import Mutator
from tests.unit.serve.client.test_journal import asked, group, keep
from tests.unit.serve.interception.conftest import prompts as prompts  # a fixture
from tests.unit.serve.interception.conftest import tokenizer as tokenizer  # a fixture
from tests.unit.serve.interception.journal.gateway_process import SEGMENT_BYTES, GatewayProcess

CONFIG = JournalConfig(segment_bytes=SEGMENT_BYTES)
SHORT_S = 2.0
LONG_S = 60.0
Records = list[list[bytes]]
Read = Callable[[Path], object]


def records_of(folder: Path) -> Records:
    journal = Journal(folder, SEGMENT_BYTES)
    records = [frames for _, frames in journal.replay()]
    journal.close()
    return records


def changed_record(mutator: Mutator, frames: list[bytes]) -> list[bytes]:
    """A record with its entry changed, or with a frame removed, repeated or changed."""
    found = list(frames)
    kind, at = mutator.rng.randrange(6), mutator.rng.randrange(len(found))
    if kind <= 3:
        found[0] = mutator.msgpack(found[0])
    elif kind == 4:
        found[at : at + 1] = [found[at]] * mutator.rng.choice([0, 2])
    else:
        found[at] = mutator.raw(found[at])
    return found


def write_changed(folder: Path, records: Records, mutator: Mutator) -> None:
    """Write the journal of these records, with some of them changed or with changed bytes."""
    shutil.rmtree(folder, ignore_errors=True)
    of_bytes = mutator.rng.random() < 0.3
    journal = Journal(folder, SEGMENT_BYTES)
    for frames in records:
        is_changed = not of_bytes and mutator.rng.random() < 0.1
        journal.append(changed_record(mutator, frames) if is_changed else frames)
    journal.close()
    if of_bytes:
        path = mutator.rng.choice(sorted(folder.glob("*.journal")))
        path.write_bytes(mutator.raw(path.read_bytes()))


def fuzz(records: Records, folder: Path, read: Read, seed: int, lasts_s: float) -> tuple[int, int]:
    """Return how many journals were read, and how many were refused."""
    mutator, num_read, num_refused = Mutator(seed), 0, 0
    end_s = time.monotonic() + lasts_s
    while time.monotonic() < end_s:
        write_changed(folder, records, mutator)
        try:
            read(folder)
            num_read += 1
        except (ConfigError, JournalError):
            num_refused += 1
    return num_read, num_refused


def read_journal(folder: Path) -> None:
    """Read the journal as a new client does."""
    journal = open_journal(folder.parent, CONFIG)
    try:
        journal.history()
        journal.reopened()
        for filed in journal.begin(RunBegan("r2", "c1", "tcp://sink"), None):
            journal.load(filed)
    finally:
        journal.close()


def write_journal(folder: Path) -> Records:
    """Write a client's journal, with an entry of each kind that a run writes."""
    journal = open_journal(folder.parent, CONFIG)
    journal.begin(RunBegan("r1", "c1", "tcp://sink"), None)
    ask = GroupAsk(task=Task(id="t", data={"a": [1]}), sampling=SamplingPolicy(), seed=7)
    for seq in range(9):
        journal.ask(msgspec.structs.replace(asked(seq, 9.0 * (seq % 2)), body=encode_ask(ask)))
        if seq < 6:
            journal.note(GroupTried(group(seq), attempts=1, excused=0))
            keep(journal, seq, complete=seq != 5)
    journal.note(StepTaken(0, (group(0), group(1))))
    journal.note(Published(1, 1))
    journal.drop(group(2), "stale")
    journal.close()
    return records_of(folder)


@pytest.mark.parametrize("lasts_s", [SHORT_S, pytest.param(LONG_S, marks=pytest.mark.chaos)])
def test_a_client_s_journal_is_read_or_refused(tmp_path: Path, lasts_s: float) -> None:
    folder = tmp_path / "client" / "journal"
    records = write_journal(folder)
    assert min(fuzz(records, folder, read_journal, 1, lasts_s)) > 0


@pytest.mark.parametrize("lasts_s", [SHORT_S, pytest.param(LONG_S, marks=pytest.mark.chaos)])
async def test_a_gateway_s_journal_is_read_or_refused(
    tmp_path: Path, prompts: Prompts, tokenizer: Tokenizer, lasts_s: float
) -> None:
    ids = [*tokenizer.encode("a"), *tokenizer.encode("<|im_end|>")]
    folder = tmp_path / "journal"
    gateway = GatewayProcess(folder, prompts, ids)
    for number in range(4):
        opened = gateway.open()
        await gateway.run_call(opened, "hello", "again")
        await gateway.run_call(opened, "hello " * 300)
        if number % 2:
            gateway.report(opened)
    gateway.journal.close_journal()

    def read(folder: Path) -> None:
        GatewayProcess(folder, prompts, ids).journal.close_journal()

    assert min(fuzz(records_of(folder), folder, read, 1, lasts_s)) > 0
