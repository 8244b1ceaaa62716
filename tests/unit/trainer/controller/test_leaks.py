"""Leaks: what should be gone is named by rank, tag and bytes; what may be there is not."""

import numpy as np

from rollmesh.tensors.buffer import FetchBuffer
from rollmesh.tensors.handles import Content, RTensor
from rollmesh.tensors.plane import Plane
from rollmesh.trainer.controller.tensor_runtime import Leak, RankTensors, find_leaks, held_tensors
from rollmesh.wire.ranks import HeldTensors

NOTHING = HeldTensors()


def of_steps(**by_step: int) -> HeldTensors:
    """`s3=8`: eight bytes of step 3; `s_=8`: of none."""
    steps = tuple((-1 if name == "s_" else int(name[1:]), num) for name, num in by_step.items())
    return HeldTensors(len(steps), sum(by_step.values()), 0, steps)


def copied(step: int, num_bytes: int) -> RTensor:
    """A shard of another process."""
    return RTensor(num_bytes, "tcp://127.0.0.1:7", step, "uint8", (num_bytes,), num_bytes)


def fetch(handles: list[RTensor]) -> list[Content]:
    """From there."""
    arrays = [np.frombuffer(bytes(each.num_bytes), np.uint8) for each in handles]
    return [Content("uint8", each.shape, each) for each in arrays]


def test_bytes_of_a_step_that_has_ended_are_a_leak_of_their_rank() -> None:
    held = [
        RankTensors(0, of_steps(s3=8, s4=16, s5=32), NOTHING),
        RankTensors(1, NOTHING, NOTHING),
    ]
    assert list(find_leaks(held, 4, 0)) == [Leak(0, "step 3", 8), Leak(0, "step 4", 16)]


def test_what_no_step_took_is_none() -> None:
    assert list(find_leaks([RankTensors(0, of_steps(s_=8), NOTHING)], 4, 0)) == []


def test_what_is_looked_at_or_copied_while_nobody_works_is_one() -> None:
    held = [RankTensors(1, HeldTensors(0, 0, 64), of_steps(s_=8, s4=16, s5=32))]
    assert list(find_leaks(held, 4, 0)) == [
        Leak(1, "retained", 64),
        Leak(1, "buffered of no step", 8),
        Leak(1, "buffered of step 4", 16),
        Leak(1, "buffered of step 5", 32),
    ]


def test_who_is_at_work_may_look_and_copy_and_may_not_keep_what_has_ended() -> None:
    held = [RankTensors(1, of_steps(s4=8), of_steps(s4=8))]
    assert list(find_leaks(held, 4, num_open=1)) == [Leak(1, "step 4", 8)]


def test_a_process_says_of_which_step_its_copies_are() -> None:
    plane = Plane(buffer=FetchBuffer(64))
    assert plane.buffer is not None
    plane.buffer.get_many([copied(-1, 8), copied(4, 16)], fetch)
    stored, buffered = held_tensors(plane)
    assert stored == NOTHING
    assert buffered == HeldTensors(2, 24, 0, ((-1, 8), (4, 16)))
    told = [Leak(0, "buffered of no step", 8), Leak(0, "buffered of step 4", 16)]
    assert list(find_leaks([RankTensors(0, stored, buffered)], 4, 0)) == told
