"""A trainer's process reports itself before it reads checkpoints, and exits despite late
threads.
"""

import errno
import os
import threading
from pathlib import Path

import msgspec
import pytest

from rollmesh.core.config import Config, JournalConfig, RunConfig
from rollmesh.core.errors import UserError
from rollmesh.core.process import Ready
from rollmesh.serve.client.journal_entries import StateSaved
from rollmesh.trainer import process
from rollmesh.trainer.checkpoints.recovery import open_client
from rollmesh.trainer.process import CloseTimeouts, close_publisher, write_results
from rollmesh.trainer.publish import PublishShell
from rollmesh.trainer.weights.folder import BackgroundLoop
from tests.disks import small_disk
from tests.unit.trainer.trainer_incarnations import TrainerIncarnations

NOWHERE = "tcp://127.0.0.1:1"


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(run=RunConfig(name="run", folder=str(tmp_path)))


def test_it_says_that_it_is_there_before_it_proves_what_it_goes_on_from(config: Config) -> None:
    client = open_client(config, NOWHERE)
    client.start(StateSaved())
    for num_steps in (4, 5):  # the newest alone frees nothing
        client.note_saved(StateSaved(num_steps, 5, {"r": [(0, 8)]}))
    client.close()
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    with pytest.raises(UserError, match="no checkpoint is intact"):
        process.begin(config, NOWHERE, writing)
    ready = msgspec.json.decode(os.read(reading, 1000), type=Ready)
    os.close(reading)
    assert (ready.role, ready.pid) == ("trainer", os.getpid())
    open_client(config, NOWHERE).close()  # it has let go of what it had opened


def test_a_late_publisher_does_not_delay_the_exit(
    config: Config, caplog: pytest.LogCaptureFixture
) -> None:
    background, is_over = BackgroundLoop("publisher"), threading.Event()
    shell = PublishShell(NOWHERE, config.publish)

    def be_late() -> None:
        is_over.wait(30.0)

    background.post(be_late)
    close_publisher(background, shell, CloseTimeouts(0.0, 0.0, publisher_s=0.01))
    assert "publisher.late" in caplog.text
    is_over.set()
    background.call(shell.close(), 30.0)  # behind the first, which goes on
    background.close()  # nobody else has


@pytest.mark.parametrize(
    ("code", "line"),
    [
        (errno.ENOSPC, r"journal.*: No space left on device; make room there, then --resume"),
        (errno.EROFS, r"journal.*: Read-only file system; mount that file system writable"),
        (errno.EPERM, r"journal.*: Operation not permitted; allow writing there"),
    ],
)
def test_a_journal_that_takes_nothing_is_one_line_with_the_remedy_for_its_cause(
    config: Config, monkeypatch: pytest.MonkeyPatch, code: int, line: str
) -> None:
    open_client(config, NOWHERE).close()
    full = small_disk(monkeypatch, config.run_folder() / "journal", 0, code)
    with full, pytest.raises(UserError, match=line):
        process.begin(config, NOWHERE, None)
    client, _, revival = process.begin(config, NOWHERE, None)
    assert revival.is_first
    client.close()


def test_books_that_the_disk_refuses_are_a_line_and_hide_no_error_of_before(
    begin: TrainerIncarnations, caplog: pytest.LogCaptureFixture
) -> None:
    incarnation = begin(JournalConfig())
    (incarnation.folder / "summary.json.part").symlink_to("/dev/full")
    write_results(incarnation.folder, incarnation.tally, incarnation.pacer)
    assert "results.not_written" in caplog.text
    assert "No space left on device" in caplog.text
