"""The trainer process: its device, its warnings, its first report, and its exit."""

import errno
import os
import threading
from pathlib import Path

import msgspec
import pytest
import torch

from rollmesh.core.config import Config, EngineConfig, JournalConfig, RunConfig, TrainerConfig
from rollmesh.core.errors import ConfigError, UserError
from rollmesh.core.process import Ready
from rollmesh.serve.client.journal_entries import StateSaved
from rollmesh.trainer import process
from rollmesh.trainer.checkpoints.recovery import open_client
from rollmesh.trainer.process import (
    CloseTimeouts,
    close_publisher,
    settings_warnings,
    write_results,
)
from rollmesh.trainer.publish import PublishShell
from rollmesh.trainer.ranks import resolve_device
from rollmesh.trainer.weights.folder import BackgroundLoop
from tests.disks import small_disk
from tests.unit.trainer.trainer_incarnations import TrainerIncarnations

NOWHERE = "tcp://127.0.0.1:1"


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(run=RunConfig(name="run", folder=str(tmp_path)))


def test_process_is_ready_before_it_verifies_checkpoints(config: Config) -> None:
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
def test_unwritable_journal_is_one_line_with_the_remedy_for_its_cause(
    config: Config, monkeypatch: pytest.MonkeyPatch, code: int, line: str
) -> None:
    open_client(config, NOWHERE).close()
    full = small_disk(monkeypatch, config.run_folder() / "journal", 0, code)
    with full, pytest.raises(UserError, match=line):
        process.begin(config, NOWHERE, None)
    client, _, revival = process.begin(config, NOWHERE, None)
    assert revival.is_first
    client.close()


def test_results_that_a_full_disk_refuses_are_one_line_and_hide_no_earlier_error(
    begin: TrainerIncarnations, caplog: pytest.LogCaptureFixture
) -> None:
    incarnation = begin(JournalConfig())
    (incarnation.folder / "summary.json.part").symlink_to("/dev/full")
    write_results(incarnation.folder, incarnation.tally, incarnation.pacer)
    assert "results.not_written" in caplog.text
    assert "No space left on device" in caplog.text


def test_existing_device_is_returned() -> None:
    assert resolve_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "is_there", "line"),
    [
        ("cuda", False, 'device = "cuda": torch finds no GPU'),
        ("cuda:1", False, 'device = "cuda:1": torch finds no GPU'),
        ("gpu", True, 'device = "gpu": Expected one of cpu, cuda'),
        ("", True, 'device = "": '),
    ],
)
def test_missing_device_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, is_there: bool, line: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: is_there)
    with pytest.raises(ConfigError) as caught:
        resolve_device(name)
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("num_gpus", "num_ranks", "device"),
    [(0, 1, "cpu"), (1, 1, "cuda"), (1, 2, "cpu"), (2, 2, "cuda")],
)
def test_auto_is_cuda_where_each_rank_has_a_gpu(
    monkeypatch: pytest.MonkeyPatch, num_gpus: int, num_ranks: int, device: str
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    assert TrainerConfig().device == "auto"
    assert resolve_device("auto", num_ranks) == torch.device(device)


def warned(num_parameters: int, device: str, **trainer: object) -> list[str]:
    """Return the events of the warnings for a model of this size."""
    config = Config(
        trainer=TrainerConfig(**trainer),  # type: ignore[arg-type] # spelled out by the tests
        engine=EngineConfig(urls=("http://a",)),
    )
    return [each.event for each in settings_warnings(config, torch.device(device), num_parameters)]


def test_a_large_model_with_a_high_learning_rate_is_warned_about() -> None:
    assert warned(100_000_000, "cuda", learning_rate=1e-4) == ["trainer.high_rate"]
    assert warned(99_000_000, "cuda", learning_rate=1e-3) == []
    assert warned(100_000_000, "cuda", learning_rate=9e-5) == []
    assert warned(100_000_000, "cuda", learning_rate=1e-3, lora_rank=8) == []
    assert warned(10**9, "cuda") == [], "the default rate suits a pretrained model"


def test_a_large_model_on_a_cpu_is_warned_about() -> None:
    assert warned(10**9, "cpu") == ["trainer.on_cpu"]
    assert warned(10**5, "cpu") == []
    embedded = settings_warnings(Config(), torch.device("cuda"), 10**9)
    assert [each.event for each in embedded] == ["engine.on_cpu"]
    assert "engine.urls" in embedded[0].fix
