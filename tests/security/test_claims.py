"""A claim of a stranger ends no process of another run: marks stay in files of their owner."""

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from rollmesh.core.config import LaunchConfig
from rollmesh.core.errors import ConfigError
from rollmesh.core.orphans import new_mark
from rollmesh.core.share import CLAIMS_FOLDER, Share
from rollmesh.launch.pipeline import claim_name, new_claim
from rollmesh.wire.messages import AnyMessage
from rollmesh.wire.scheduling import RunClaim
from tests.security.strangers import STRANGER, as_root
from tests.unit.launch.claimed_fleet import fleet
from tests.unit.scheduler.admission.claimed_run import ClaimedRun, claimed_run


@pytest.fixture
def other(tmp_path: Path) -> Iterator[ClaimedRun]:
    """A run of the same user under another name: its launch has just died, one of its processes
    still runs.
    """
    with claimed_run(tmp_path, "code") as run:
        run.start(f"{run.mark}/engine.1")
        run.launch.kill()
        run.launch.wait()
        yield run


def next_run(claim: RunClaim, runs: Path) -> None:
    """`rollmesh up` takes the name `math`, which the scheduler reports as claimed by `claim`."""
    with fleet(run=claim) as address:
        share = Share(address, "math")
        claim_name(
            share, new_claim(share, new_mark("test"), runs, owns_engines=True), LaunchConfig()
        )


def is_running(run: ClaimedRun) -> bool:
    return all(each.poll() is None for each in run.marked)


def test_a_claim_that_names_another_runs_mark_ends_none_of_its_processes(
    other: ClaimedRun, tmp_path: Path
) -> None:
    """A stranger has claimed `math` with the mark of root's other run."""
    forged = msgspec.structs.replace(other.claim, run_id=other.mark, record="", started_ticks="1")
    with pytest.raises(ConfigError, match=r"--pipeline math: .*its record '' cannot be read"):
        next_run(forged, tmp_path)
    assert is_running(other)


def test_a_claim_that_names_another_runs_record_ends_none_of_its_processes(
    other: ClaimedRun, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="is that of another run"):
        next_run(other.claim, tmp_path)
    assert is_running(other)


@as_root
def test_a_record_that_a_stranger_wrote_ends_nothing(other: ClaimedRun, tmp_path: Path) -> None:
    forged_record = msgspec.structs.replace(other.claimed, pipeline_id="math", run_id="run-forged")
    record = tmp_path / "forged.json"
    record.write_bytes(msgspec.json.encode(forged_record))
    record.chmod(0o600)
    os.chown(record, STRANGER, STRANGER)
    forged = msgspec.structs.replace(other.claim, run_id="run-forged", record=str(record))
    with pytest.raises(ConfigError, match="belongs to another user; once none"):
        next_run(forged, tmp_path)
    assert is_running(other)
    assert record.exists()


def test_the_mark_of_a_run_is_in_a_file_of_its_owner_and_in_no_message(tmp_path: Path) -> None:
    received: list[AnyMessage] = []
    with fleet(received=received) as address:
        share, mark = Share(address, "math"), new_mark("test")
        claim_name(
            share, run := new_claim(share, mark, tmp_path, owns_engines=True), LaunchConfig()
        )
    assert mark not in repr(received)
    assert mark in Path(run.record).read_text()
    assert Path(run.record).stat().st_mode & 0o777 == 0o600
    assert (tmp_path / CLAIMS_FOLDER).stat().st_mode & 0o777 == 0o700
