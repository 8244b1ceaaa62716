"""Clearing: a failure is repeated, then logged; nothing is fetched to be freed.

Leaks: they are named by rank, tag and bytes; tensors in use are none.
"""

import concurrent.futures
import contextlib
import logging
from array import array

import numpy as np
import pytest
import torch

from rollmesh.core.clock import SystemClock
from rollmesh.core.errors import AddressError, OwnerGone
from rollmesh.tensors.fetch_buffer import FetchBuffer
from rollmesh.tensors.handles import UNTAGGED, Content, RTensor
from rollmesh.tensors.plane import Plane
from rollmesh.tensors.store import OwnerStore, StoreSettings
from rollmesh.trainer.controller.rank_group import TensorReport
from rollmesh.trainer.controller.tensor_runtime import (
    CLEAR_TRIES,
    Leak,
    RankTensors,
    clear_everywhere,
    find_leaks,
    held_tensors,
)
from rollmesh.wire.ranks import HeldTensors, TensorsReported

RANK_0 = "tcp://127.0.0.1:7000"
ELSEWHERE = "tcp://127.0.0.1:7009"


def handle(number: int, owner: str) -> RTensor:
    return RTensor(number, owner, UNTAGGED, "int32", (1,), 4)


def reported_by(rank: int, num_cleared: int = 0, error: str = "") -> TensorsReported:
    return TensorsReported(rank, 1, 0, num_cleared, HeldTensors(), HeldTensors(), error)


class Ranks:
    """Two ranks that give the test's answers in turn."""

    def __init__(self, *answers: TensorReport) -> None:
        self.asked: list[list[int]] = []
        self._answers = list(answers)

    def owners(self) -> set[str]:
        return {RANK_0}

    def query_tensors(
        self, ended_step: int, shard_ids: bytes
    ) -> "concurrent.futures.Future[TensorReport]":
        self.asked.append(array("Q", shard_ids).tolist())
        answer: concurrent.futures.Future[TensorReport] = concurrent.futures.Future()
        answer.set_result(self._answers.pop(0))
        return answer


class FlakyBackend:
    """A connection to owners in other processes that fails as often as the test asks."""

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
        """Do nothing."""


BOTH = TensorReport(1, (reported_by(0, 2), reported_by(1)), ())
SILENT = TensorReport(1, (reported_by(0, 2),), (1,))
FAILED = TensorReport(1, (reported_by(0), reported_by(1, 0, "its store is broken")), ())


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]


def test_ids_go_to_all_ranks_alike_and_each_once() -> None:
    ranks, shard = Ranks(BOTH), handle(5, RANK_0)
    assert clear_everywhere(Plane(), ranks, [{"rows": [shard, shard]}, handle(6, RANK_0)]) == 2
    assert ranks.asked == [[5, 6]]


def test_clear_without_shards_contacts_no_owner() -> None:
    ranks = Ranks()
    nothing: list[tuple[object, ...]] = [(), ([],), ({"loss": 1.0},)]
    assert [clear_everywhere(Plane(), ranks, targets) for targets in nothing] == [0, 0, 0]
    assert ranks.asked == []


@pytest.mark.parametrize("failing", [SILENT, FAILED])
def test_an_owner_that_did_not_confirm_is_asked_again(
    failing: TensorReport, caplog: pytest.LogCaptureFixture
) -> None:
    ranks = Ranks(failing, failing, BOTH)
    clear_everywhere(Plane(), ranks, [handle(5, RANK_0)])
    assert ranks.asked == [[5]] * 3
    assert warnings(caplog) == []


@pytest.mark.parametrize(
    ("failing", "why"), [(SILENT, "it did not answer"), (FAILED, "its store is broken")]
)
def test_an_owner_that_never_confirms_is_named_and_nothing_is_raised(
    failing: TensorReport, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    ranks = Ranks(*[failing] * CLEAR_TRIES)
    clear_everywhere(Plane(), ranks, [handle(5, RANK_0), handle(6, RANK_0)])
    assert len(ranks.asked) == CLEAR_TRIES
    assert warnings(caplog) == [f"tensors.not_cleared rank=1 num=2 why={why}"]


def test_owner_outside_the_ranks_is_contacted_directly_and_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    way = FlakyBackend(OwnerGone(ELSEWHERE, "it hung up"), OwnerGone(ELSEWHERE, "it hung up"))
    ranks = Ranks(TensorReport(1, (reported_by(0), reported_by(1)), ()))
    assert clear_everywhere(Plane(backend=way), ranks, [handle(5, ELSEWHERE)]) == 1
    assert way.cleared == [(ELSEWHERE, [5])] * 3
    assert ranks.asked == [[5]], "who may have copies"
    assert warnings(caplog) == []


@pytest.mark.parametrize("error", [OwnerGone(ELSEWHERE, "no"), AddressError("needs keys")])
def test_unreachable_owner_is_named(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    way, ranks = FlakyBackend(*[error] * CLEAR_TRIES), Ranks(BOTH)
    clear_everywhere(Plane(backend=way), ranks, [handle(5, ELSEWHERE)])
    (line,) = warnings(caplog)
    assert line.startswith(f"tensors.not_cleared owner={ELSEWHERE} num=1 why=")


def test_shards_of_this_process_are_freed_here() -> None:
    store = OwnerStore(StoreSettings(max_bytes=2**20), SystemClock())
    with contextlib.closing(store):
        plane, ranks = Plane(store), Ranks(TensorReport(1, (reported_by(0), reported_by(1)), ()))
        stored = plane.remotize([torch.ones(2), torch.ones(3)])
        assert clear_everywhere(plane, ranks, stored[:1]) == 1
        assert store.stats().total_bytes == 12
        assert ranks.asked == [[stored[0].shard_id]], "who may have copies"


NOTHING = HeldTensors()


def of_steps(**by_step: int) -> HeldTensors:
    """Bytes by step: `s3=8` is eight bytes of step 3, `s_=8` eight bytes outside steps."""
    steps = tuple((-1 if name == "s_" else int(name[1:]), num) for name, num in by_step.items())
    return HeldTensors(len(steps), sum(by_step.values()), 0, steps)


def copied(step: int, num_bytes: int) -> RTensor:
    """A shard of another process."""
    return RTensor(num_bytes, "tcp://127.0.0.1:7", step, "uint8", (num_bytes,), num_bytes)


def fetch(handles: list[RTensor]) -> list[Content]:
    """Fetch shards of the other process."""
    arrays = [np.frombuffer(bytes(each.num_bytes), np.uint8) for each in handles]
    return [Content("uint8", each.shape, each) for each in arrays]


def test_bytes_of_a_step_that_has_ended_are_a_leak_of_their_rank() -> None:
    held = [
        RankTensors(0, of_steps(s3=8, s4=16, s5=32), NOTHING),
        RankTensors(1, NOTHING, NOTHING),
    ]
    assert list(find_leaks(held, 4, 0)) == [Leak(0, "step 3", 8), Leak(0, "step 4", 16)]


def test_shards_outside_steps_are_no_leak() -> None:
    assert list(find_leaks([RankTensors(0, of_steps(s_=8), NOTHING)], 4, 0)) == []


def test_arrays_viewed_or_copied_outside_a_call_are_leaks() -> None:
    held = [RankTensors(1, HeldTensors(0, 0, 64), of_steps(s_=8, s4=16, s5=32))]
    assert list(find_leaks(held, 4, 0)) == [
        Leak(1, "retained", 64),
        Leak(1, "buffered of no step", 8),
        Leak(1, "buffered of step 4", 16),
        Leak(1, "buffered of step 5", 32),
    ]


def test_a_running_call_may_view_and_copy_but_not_keep_ended_steps() -> None:
    held = [RankTensors(1, of_steps(s4=8), of_steps(s4=8))]
    assert list(find_leaks(held, 4, num_open=1)) == [Leak(1, "step 4", 8)]


def test_process_reports_the_step_of_each_copy() -> None:
    plane = Plane(buffer=FetchBuffer(64))
    assert plane.buffer is not None
    plane.buffer.get_many([copied(-1, 8), copied(4, 16)], fetch)
    stored, buffered = held_tensors(plane)
    assert stored == NOTHING
    assert buffered == HeldTensors(2, 24, 0, ((-1, 8), (4, 16)))
    expected = [Leak(0, "buffered of no step", 8), Leak(0, "buffered of step 4", 16)]
    assert list(find_leaks([RankTensors(0, stored, buffered)], 4, 0)) == expected
