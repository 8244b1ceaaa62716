"""Policy versions are minted once, published one at a time, and their folders pruned."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollmesh.core.errors import EngineUnavailable
from rollmesh.trainer.publisher import Probe, PublishReport
from rollmesh.trainer.weights import BackgroundLoop, Weights

PROBE = Probe((1, 2), (-1.0,))
PATIENCE_S = 10.0


@pytest.fixture
def background() -> Iterator[BackgroundLoop]:
    loop = BackgroundLoop("test")
    yield loop
    loop.close()


async def bring(policy_version: int, _folder: Path, _probe: Probe) -> PublishReport:
    return PublishReport(
        policy_version=policy_version, updated=("e",), failed=(), wall_s=0.0, gap_s=0.0
    )


def publish(weights: Weights, step: int) -> Path:
    folder = weights.next_folder()
    folder.mkdir(parents=True)
    weights.publish(step, folder, bring, PROBE)
    assert weights.settled(PATIENCE_S) == step
    return folder


def test_versions_count_up_and_settle_once(tmp_path: Path, background: BackgroundLoop) -> None:
    weights = Weights(tmp_path, 3, background)
    assert publish(weights, step=0).name == "v000001"
    assert weights.settled() is None
    assert publish(weights, step=1).name == "v000002"
    assert weights.policy_version == 2


def test_old_folders_go_and_the_newest_stay(tmp_path: Path, background: BackgroundLoop) -> None:
    weights = Weights(tmp_path, 2, background)
    folders = [publish(weights, step) for step in range(4)]
    assert [folder.is_dir() for folder in folders] == [False, False, True, True]


def test_training_goes_on_while_a_publication_runs(
    tmp_path: Path, background: BackgroundLoop
) -> None:
    gate = threading.Event()

    async def slow(policy_version: int, folder: Path, probe: Probe) -> PublishReport:
        await asyncio.to_thread(gate.wait, PATIENCE_S)
        return await bring(policy_version, folder, probe)

    weights = Weights(tmp_path, 2, background)
    weights.publish(1, weights.next_folder(), slow, PROBE)
    assert weights.is_publishing
    assert weights.settled(0.0) is None
    gate.set()
    assert weights.settled(PATIENCE_S) == 1
    assert not weights.is_publishing


def test_a_failed_publication_leaves_room_for_the_next(
    tmp_path: Path, background: BackgroundLoop
) -> None:
    async def fails(_version: int, _folder: Path, _probe: Probe) -> PublishReport:
        raise EngineUnavailable("no engine")

    weights = Weights(tmp_path, 2, background)
    weights.publish(1, weights.next_folder(), fails, PROBE)
    assert weights.settled(PATIENCE_S) is None
    assert not weights.is_publishing
    assert publish(weights, step=2).name == "v000002"
