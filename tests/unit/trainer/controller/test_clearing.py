"""A clear that fails is tried again, and then told; nothing is fetched to be freed."""

import concurrent.futures
import contextlib
import logging
from array import array

import pytest
import torch

from rollmesh.core.clock import SystemClock
from rollmesh.core.errors import AddressError, OwnerGone
from rollmesh.tensors.handles import UNTAGGED, Content, RTensor
from rollmesh.tensors.plane import Plane
from rollmesh.tensors.store import OwnerStore, StoreSettings
from rollmesh.trainer.controller.rank_group import TensorReport
from rollmesh.trainer.controller.tensor_runtime import CLEAR_TRIES, clear_everywhere
from rollmesh.wire.ranks import HeldTensors, TensorsTold

RANK_0 = "tcp://127.0.0.1:7000"
ELSEWHERE = "tcp://127.0.0.1:7009"


def handle(number: int, owner: str) -> RTensor:
    return RTensor(number, owner, UNTAGGED, "int32", (1,), 4)


def told_by(rank: int, num_cleared: int = 0, error: str = "") -> TensorsTold:
    return TensorsTold(rank, 1, 0, num_cleared, HeldTensors(), HeldTensors(), error)


class Ranks:
    """Two of them, that answer as they were told to, each time."""

    def __init__(self, *answers: TensorReport) -> None:
        self.asked: list[list[int]] = []
        self._answers = list(answers)

    def owners(self) -> set[str]:
        return {RANK_0}

    def ask(self, ended_step: int, shard_ids: bytes) -> "concurrent.futures.Future[TensorReport]":
        self.asked.append(array("Q", shard_ids).tolist())
        answer: concurrent.futures.Future[TensorReport] = concurrent.futures.Future()
        answer.set_result(self._answers.pop(0))
        return answer


class Way:
    """A backend to owners elsewhere, that fails as often as it was told to."""

    def __init__(self, *errors: Exception) -> None:
        self.cleared: list[tuple[str, list[int]]] = []
        self._errors = list(errors)

    def clear(self, owner: str, shard_ids: list[int]) -> int:
        self.cleared.append((owner, shard_ids))
        if self._errors:
            raise self._errors.pop(0)
        return len(shard_ids)

    def fetch(self, owner: str, handles: list[RTensor]) -> list[Content]:
        raise AssertionError("to be freed nothing is fetched")

    def take(self, owner: str, shard_ids: list[int], step: int) -> None:
        raise AssertionError("nor taken")

    def end_step(self, owner: str, step: int) -> int:
        raise AssertionError("nor ended")

    def close(self) -> None:
        """Nothing is open."""


BOTH = TensorReport(1, (told_by(0, 2), told_by(1)), ())
SILENT = TensorReport(1, (told_by(0, 2),), (1,))
FAILED = TensorReport(1, (told_by(0), told_by(1, 0, "its store is broken")), ())


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]


def test_ids_go_to_all_ranks_alike_and_each_once() -> None:
    ranks, shard = Ranks(BOTH), handle(5, RANK_0)
    assert clear_everywhere(Plane(), ranks, [{"rows": [shard, shard]}, handle(6, RANK_0)]) == 2
    assert ranks.asked == [[5, 6]]


def test_without_targets_nobody_is_asked() -> None:
    ranks = Ranks()
    nothing: list[tuple[object, ...]] = [(), ([],), ({"loss": 1.0},)]
    assert [clear_everywhere(Plane(), ranks, targets) for targets in nothing] == [0, 0, 0]
    assert ranks.asked == []


@pytest.mark.parametrize("failing", [SILENT, FAILED])
def test_who_did_not_confirm_is_asked_again(
    failing: TensorReport, caplog: pytest.LogCaptureFixture
) -> None:
    ranks = Ranks(failing, failing, BOTH)
    clear_everywhere(Plane(), ranks, [handle(5, RANK_0)])
    assert ranks.asked == [[5]] * 3
    assert warnings(caplog) == []


@pytest.mark.parametrize(
    ("failing", "why"), [(SILENT, "it did not answer"), (FAILED, "its store is broken")]
)
def test_who_never_confirms_is_named_and_nothing_is_raised(
    failing: TensorReport, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    ranks = Ranks(*[failing] * CLEAR_TRIES)
    clear_everywhere(Plane(), ranks, [handle(5, RANK_0), handle(6, RANK_0)])
    assert len(ranks.asked) == CLEAR_TRIES
    assert warnings(caplog) == [f"tensors.not_cleared rank=1 num=2 why={why}"]


def test_an_owner_that_is_no_rank_is_asked_itself_and_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    way = Way(OwnerGone(ELSEWHERE, "it hung up"), OwnerGone(ELSEWHERE, "it hung up"))
    ranks = Ranks(TensorReport(1, (told_by(0), told_by(1)), ()))
    assert clear_everywhere(Plane(backend=way), ranks, [handle(5, ELSEWHERE)]) == 1
    assert way.cleared == [(ELSEWHERE, [5])] * 3
    assert ranks.asked == [[5]], "who may have copies"
    assert warnings(caplog) == []


@pytest.mark.parametrize("error", [OwnerGone(ELSEWHERE, "no"), AddressError("needs keys")])
def test_an_owner_that_cannot_be_asked_is_named(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    way, ranks = Way(*[error] * CLEAR_TRIES), Ranks(BOTH)
    clear_everywhere(Plane(backend=way), ranks, [handle(5, ELSEWHERE)])
    (line,) = warnings(caplog)
    assert line.startswith(f"tensors.not_cleared owner={ELSEWHERE} num=1 why=")


def test_what_this_process_owns_is_freed_here() -> None:
    store = OwnerStore(StoreSettings(max_bytes=2**20), SystemClock())
    with contextlib.closing(store):
        plane, ranks = Plane(store), Ranks(TensorReport(1, (told_by(0), told_by(1)), ()))
        stored = plane.remotize([torch.ones(2), torch.ones(3)])
        assert clear_everywhere(plane, ranks, stored[:1]) == 1
        assert store.stats().total_bytes == 12
        assert ranks.asked == [[stored[0].shard_id]], "who may have copies"
