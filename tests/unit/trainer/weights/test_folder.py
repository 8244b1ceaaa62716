"""Policy versions: assigned once, published one at a time, pruned; refusals are reported and end
the run."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from rollmesh.core.clock import SystemClock
from rollmesh.core.errors import EngineUnavailable, ModelError, PublishError
from rollmesh.engine.shared_memory import SharedSegment
from rollmesh.trainer.reports.records import RunRecords
from rollmesh.trainer.weights.folder import BackgroundLoop, Refusal, RefusalMonitor, WeightVersions
from rollmesh.trainer.weights.publisher import PublishReport
from rollmesh.trainer.weights.verdicts import Probe

PROBE = Probe((1, 2), (-1.0,))
PATIENCE_S = 60.0


@pytest.fixture
def background() -> Iterator[BackgroundLoop]:
    loop = BackgroundLoop("test")
    yield loop
    loop.close()


async def bring(
    policy_version: int, _folder: Path, _probe: Probe, _parts: tuple[SharedSegment, ...]
) -> PublishReport:
    return PublishReport(
        policy_version=policy_version, updated=("e",), failed=(), wall_s=0.0, gap_s=0.0
    )


def publish(weights: WeightVersions, step: int) -> Path:
    folder = weights.next_folder()
    folder.mkdir(parents=True)
    weights.publish(step, folder, (), bring, PROBE)
    assert weights.settled(PATIENCE_S) == step
    return folder


def test_versions_count_up_and_settle_once(tmp_path: Path, background: BackgroundLoop) -> None:
    weights = WeightVersions(tmp_path, background)
    assert publish(weights, step=0).name == "v000001"
    assert weights.settled() is None
    assert publish(weights, step=1).name == "v000002"
    assert weights.policy_version == 2


def test_old_folders_are_removed_and_the_newest_stay(
    tmp_path: Path, background: BackgroundLoop
) -> None:
    weights = WeightVersions(tmp_path, background)
    folders = [publish(weights, step) for step in range(4)]
    assert [folder.is_dir() for folder in folders] == [False, False, True, True]


def test_newest_folder_is_the_one_with_the_highest_number(
    tmp_path: Path, background: BackgroundLoop
) -> None:
    weights = WeightVersions(tmp_path, background)
    weights.policy_version = 999_998
    folders = [publish(weights, step) for step in range(3)]
    assert [folder.name for folder in folders] == ["v999999", "v1000000", "v1000001"]
    assert [folder.is_dir() for folder in folders] == [False, True, True]


def test_folder_is_kept_while_an_engine_reads_it(
    tmp_path: Path, background: BackgroundLoop
) -> None:
    read: set[Path] = {tmp_path / "v000001"}
    weights = WeightVersions(tmp_path, background, read.__contains__)
    folders = [publish(weights, step) for step in range(4)]
    assert [folder.is_dir() for folder in folders] == [True, False, True, True]
    read.clear()
    publish(weights, step=4)
    assert not folders[0].exists()


def test_only_partial_folders_of_a_killed_trainer_are_removed_at_the_next_start(
    tmp_path: Path, background: BackgroundLoop
) -> None:
    for name in ("v000003", "v000004", "v000005.part", "v000002.old", "notes"):
        (tmp_path / name).mkdir()
    WeightVersions(tmp_path, background)
    assert {path.name for path in tmp_path.iterdir()} == {"v000003", "v000004", "notes"}


def test_weights_that_cannot_be_written_end_the_run(
    tmp_path: Path, background: BackgroundLoop
) -> None:
    async def fails(*_: object) -> PublishReport:
        raise ModelError("v000001: cannot be written: no space left on device")

    weights = WeightVersions(tmp_path, background)
    weights.publish(1, weights.next_folder(), (), fails, PROBE)
    with pytest.raises(ModelError, match="no space"):
        weights.settled(PATIENCE_S)


def test_training_continues_during_a_publication(
    tmp_path: Path, background: BackgroundLoop
) -> None:
    gate = threading.Event()

    async def slow(
        policy_version: int, folder: Path, probe: Probe, parts: tuple[SharedSegment, ...]
    ) -> PublishReport:
        await asyncio.to_thread(gate.wait, PATIENCE_S)
        return await bring(policy_version, folder, probe, parts)

    weights = WeightVersions(tmp_path, background)
    weights.publish(1, weights.next_folder(), (), slow, PROBE)
    assert weights.is_publishing
    assert weights.settled(0.0) is None
    gate.set()
    assert weights.settled(PATIENCE_S) == 1
    assert not weights.is_publishing


def test_a_failed_publication_leaves_room_for_the_next(
    tmp_path: Path, background: BackgroundLoop
) -> None:
    async def fails(*_: object) -> PublishReport:
        raise EngineUnavailable("no engine")

    weights = WeightVersions(tmp_path, background)
    weights.publish(1, weights.next_folder(), (), fails, PROBE)
    assert weights.settled(PATIENCE_S) is None
    assert not weights.is_publishing
    assert refusal_of(weights) == Refusal(1, 1, "no engine")
    assert publish(weights, step=2).name == "v000002"
    assert refusal_of(weights) is None


def refusal_of(weights: WeightVersions) -> Refusal | None:
    return weights.refusal


async def refused(
    policy_version: int, _folder: Path, _probe: Probe, _parts: tuple[SharedSegment, ...]
) -> PublishReport:
    return PublishReport(
        policy_version=policy_version, updated=(), failed=("e: why",), wall_s=0.0, gap_s=0.0
    )


def test_publication_that_no_engine_accepts_counts_only_once_one_does(
    tmp_path: Path, background: BackgroundLoop
) -> None:
    weights = WeightVersions(tmp_path, background)
    weights.publish(5, weights.next_folder(), (), refused, PROBE)
    assert weights.settled(PATIENCE_S) is None
    assert refusal_of(weights) == Refusal(1, 5, "e: why")
    assert weights.settled() is None
    weights.fleet.accepted_version = 1
    assert [weights.settled() for _ in range(2)] == [5, None]
    assert refusal_of(weights) is None


REFUSAL = Refusal(7, 6, "http://a: scoring: its log-probs differ by 0.251")
AT_ONCE_S = 1e-9
NEVER_S = 1e9


@pytest.fixture
def records(tmp_path: Path) -> Iterator[RunRecords]:
    records = RunRecords(tmp_path, SystemClock())
    yield records
    records.close()


def rows(records: RunRecords) -> list[dict[str, Any]]:
    lines = (records.folder / "metrics.jsonl").read_bytes().splitlines()
    return [msgspec.json.decode(line) for line in lines]


def test_each_refusal_and_its_end_are_logged_and_recorded_once(records: RunRecords) -> None:
    refusals = RefusalMonitor(records, NEVER_S)
    with capture_logs() as logs:
        for refusal in (None, REFUSAL, REFUSAL, None, None):
            refusals.observe(refusal, all_asleep=False)
    assert [(row["policy_version"], row["refused"]) for row in rows(records)] == [
        (7, REFUSAL.reason),
        (7, ""),
    ]
    [entry] = logs
    assert (entry["log_level"], entry["error"]) == ("error", f"no engine serves: {REFUSAL.reason}")


def test_run_ends_if_no_engine_accepts_for_too_long(records: RunRecords) -> None:
    refusals = RefusalMonitor(records, AT_ONCE_S)
    refusals.observe(None, all_asleep=False)
    refusals.observe(REFUSAL, all_asleep=True)
    with pytest.raises(PublishError) as ended:
        refusals.observe(REFUSAL, all_asleep=False)
    assert "publish.accept_timeout_s = 1e-09" in str(ended.value)
    assert REFUSAL.reason in str(ended.value)


def test_newer_refused_publications_do_not_restart_the_timeout(
    records: RunRecords,
) -> None:
    refusals = RefusalMonitor(records, AT_ONCE_S)
    refusals.observe(REFUSAL, all_asleep=True)
    with pytest.raises(PublishError, match="version 8"):
        refusals.observe(Refusal(8, 7, "why"), all_asleep=False)


def test_sleeping_fleet_is_not_a_refusal(records: RunRecords) -> None:
    refusals = RefusalMonitor(records, AT_ONCE_S)
    for _ in range(3):
        refusals.observe(REFUSAL, all_asleep=True)
    assert len(rows(records)) == 1
