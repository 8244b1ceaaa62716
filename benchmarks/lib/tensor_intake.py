"""Case of the tensor benchmark: a batch on its way from the intake to a step.

    intake.small    512 samples of 5,120 tokens, 33 MiB
    intake.big      1,024 samples of 23,600 tokens, 300 MiB

- `cut_ms` is spread over a batch's arrivals, `step_ms` delays every rank. With shared memory the
  intake writes samples there and the step takes their handles; without, the step copies them.
- `cpu` is of the thread that does it, the least of all laps. Both arms take turns with the same
  groups, and the data of the step is compared with that of the intake.
"""

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.lib.tensor_mesh import PartyError, TensorBench
from rollmesh.core.clock import SystemClock
from rollmesh.core.ids import GroupId
from rollmesh.core.types import (
    Branch,
    GroupRecord,
    NodeRow,
    Outcome,
    RolloutRecord,
    SamplingParams,
    Task,
    VersionRun,
)
from rollmesh.serve.client.arrivals import Finished
from rollmesh.serve.client.samples import BYTES_PER_TOKEN, Lay, Sample, lay_plainly
from rollmesh.tensors.handles import RTensor, pack
from rollmesh.tensors.store import OwnerStore, StoreSettings
from rollmesh.trainer.pacing.ready_queue import StoreAllocator, copy_samples, cut_group

SIZES = {"small": (512, 5_120), "big": (1_024, 23_600)}
"""Number of samples, and tokens of each."""
GROUP_SIZE = 16
BRANCHES: tuple[Branch, ...] = ("main",)
NUM_TURNS = 8
"""Turns of a rollout: half of its tokens are context, half are sampled."""


class Costs(NamedTuple):
    """Costs of one batch."""

    cut_s: float
    cut_cpu_s: float
    step_s: float
    step_cpu_s: float


def intake(bench: TensorBench) -> None:
    """Measure both batches."""
    for name, (num_samples, num_tokens) in SIZES.items():
        groups = [_group(seq, num_tokens) for seq in range(num_samples // GROUP_SIZE)]
        num_bytes = BYTES_PER_TOKEN * num_samples * num_tokens
        store = OwnerStore(StoreSettings(max_bytes=2 * num_bytes), SystemClock())
        try:
            _compare(bench, name, groups, store)
        finally:
            store.close()


def _compare(bench: TensorBench, name: str, groups: Sequence[Finished], store: OwnerStore) -> None:
    room = StoreAllocator(store)
    arms: dict[str, tuple[Lay, Callable[[list[Sample]], list[Sample]]]] = {
        "room": (room.allocate, lambda samples: samples),
        "plain": (lay_plainly, lambda samples: copy_samples(samples, room.allocate)),
    }
    laps: dict[str, list[Costs]] = {arm: [] for arm in arms}
    for step in range(3 if bench.is_quick else 9):
        for turn, (arm, (lay, bring)) in enumerate(arms.items()):
            laps[arm].append(_lap(groups, store, lay, bring, step * len(arms) + turn))
    for arm, costs in laps.items():
        _, *warm = costs  # the first lap allocates pages
        bench.note(f"intake.{name}.{arm}", {
            "cut_ms": 1e3 * median(each.cut_s for each in warm),
            "cut_cpu_ms": 1e3 * min(each.cut_cpu_s for each in warm),
            "step_ms": 1e3 * median(each.step_s for each in warm),
            "step_cpu_ms": 1e3 * min(each.step_cpu_s for each in warm),
        })  # fmt: skip


def _lap(
    groups: Sequence[Finished],
    store: OwnerStore,
    lay: Lay,
    bring: Callable[[list[Sample]], list[Sample]],
    step: int,
) -> Costs:
    began = _now()
    cut = [cut_group(each, BRANCHES, lay).all_samples() for each in groups]
    was_cut = _now()
    inside = bring([sample for samples in cut for sample in samples])
    handles = [sample.handle for sample in inside if sample.handle is not None]
    store.take([each.shard_id for each in handles], step)
    pack([each.tagged(step) for each in handles])
    was_handed_over = _now()
    _check(groups, handles, store)
    del cut, inside
    store.end_step(step)
    if store.stats().num_tensors or store.stats().retained_bytes:
        raise PartyError(f"of step {step} something is left: {store.stats()}")
    return Costs(*(was_cut - began), *(was_handed_over - was_cut))


def _now() -> NDArray[np.float64]:
    """Wall-clock time, and CPU time of this thread."""
    return np.array([time.perf_counter(), time.thread_time()])


def _check(groups: Sequence[Finished], handles: Sequence[RTensor], store: OwnerStore) -> None:
    """Check that each shard holds the token ids of its sample."""
    received = np.concatenate([each.token_ids.reshape(GROUP_SIZE, -1) for each in groups])
    for handle, token_ids in zip(handles, received, strict=True):
        stored = store.read(handle.shard_id).data[: token_ids.nbytes]
        if not np.array_equal(stored.view(np.int32), token_ids):
            raise PartyError(f"shard {handle.shard_id:#x} differs from the intake's sample")


def _group(seq: int, num_tokens: int) -> Finished:
    """A group as a worker sends it: siblings of several turns."""
    rng = np.random.default_rng(seq)
    part = num_tokens // (2 * NUM_TURNS)
    rest: dict[str, Any] = {"params": SamplingParams(max_tokens=part), "finish_reason": "stop"}
    nodes = [
        NodeRow(at - 1, part, at % 2 == 1, (VersionRun(0, part),) if at % 2 else (), **rest)
        for at in range(2 * NUM_TURNS)
    ]
    rollouts = [
        RolloutRecord(
            index=index,
            outcome=Outcome.COMPLETED,
            reward=float(index % 2),
            nodes=nodes,
            num_tokens=num_tokens,
            num_logprobs=part * NUM_TURNS,
        )
        for index in range(GROUP_SIZE)
    ]
    return Finished(
        group_id=GroupId("bench", seq),
        attempt=1,
        worker_id="w",
        record=GroupRecord(task=Task(id="t"), rollouts=rollouts),
        token_ids=rng.integers(0, 150_000, GROUP_SIZE * num_tokens, np.int32),
        logprobs=-rng.random(GROUP_SIZE * part * NUM_TURNS, np.float32),
        position=seq,
    )
