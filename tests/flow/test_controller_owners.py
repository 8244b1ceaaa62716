"""A step's batch takes shards of any owner, and the step's end frees them at their owner."""

import logging
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest
import torch

from rollmesh.core.errors import CallFailed, OwnerGone, ShardMissing, TensorError
from rollmesh.tensors.handles import UNTAGGED, RTensor, unpack
from rollmesh.tensors.plane import Plane
from rollmesh.trainer.controller.controller import RoleCall, TensorUsage, TrainController
from rollmesh.trainer.controller.tensor_runtime import TensorRuntime
from tests.flow.rank_group import plan, serving_runtime


@pytest.fixture(scope="module")
def home() -> Iterator[TensorRuntime]:
    with serving_runtime() as own:
        yield own


@pytest.fixture(scope="module")
def plane(home: TensorRuntime) -> Plane:
    return home.plane


@pytest.fixture(scope="module")
def controller(home: TensorRuntime) -> Iterator[TrainController]:
    with TrainController(plan(2), home) as started:
        yield started


@contextmanager
def other_owner() -> Iterator[tuple["subprocess.Popen[bytes]", list[RTensor]]]:
    """A process that is neither rank nor controller, and its handles."""
    argv = [sys.executable, "-m", "tests.flow.rank_group", "owner"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        try:
            yield owner, unpack(bytes.fromhex(owner.stdout.readline().decode()))
        finally:
            owner.kill()


def tags(held: TensorUsage) -> set[int]:
    """Tags of all stored shards."""
    return {step for each in held.processes for step, _ in each.stored.bytes_by_step}


def bytes_of_ranks(held: TensorUsage) -> int:
    """Bytes that ranks own."""
    return sum(each.stored.total_bytes for each in held.processes if each.rank >= 0)


def test_results_of_ranks_are_taken_at_the_ranks(plane: Plane, controller: TrainController) -> None:
    rows = plane.remotize([torch.ones(4), torch.ones(4)])
    answer = controller.call(RoleCall("sums.echo", UNTAGGED), rows)
    assert tags(controller.clear_batches()) == {UNTAGGED}
    taken = controller.take([rows, answer], step=1)
    assert {each.step for each in (*taken[0], taken[1][0]["new"])} == {1}
    assert tags(controller.clear_batches()) == {1}
    held = controller.end_step(1)
    assert (tags(held), held.leaks) == (set(), ())


def test_shards_of_another_process_are_freed_there_when_the_step_ends(
    plane: Plane, controller: TrainController
) -> None:
    with other_owner() as (_, handles):
        taken = controller.take(handles[:1], step=2)
        controller.end_step(2)
        with pytest.raises(ShardMissing, match="cleared"):
            plane.localize(taken)
        assert torch.equal(plane.localize(handles[1]), torch.ones(3)), "it was not taken"
        with pytest.raises(TensorError, match="step 2 has ended"):
            controller.take(handles[1], step=2)


def test_a_missing_shard_cannot_be_taken_whichever_process_owned_it(
    plane: Plane, controller: TrainController
) -> None:
    with other_owner() as (owner, handles):
        plane.clear_at(handles[0].owner, [handles[0].shard_id])
        with pytest.raises(ShardMissing, match="cleared"):
            controller.take(handles, step=3)
        owner.kill()
        owner.wait()
        with pytest.raises(OwnerGone):
            controller.take(handles[1], step=3)


def test_an_owner_that_misses_the_end_of_a_step_is_named_and_blocks_nothing(
    controller: TrainController, caplog: pytest.LogCaptureFixture
) -> None:
    with other_owner() as (owner, handles):
        controller.take(handles, step=4)
        owner.kill()
        owner.wait()
    with caplog.at_level(logging.WARNING):
        held = [controller.end_step(step) for step in range(4, 9)]
    assert [each.missing for each in held] == [()] * 5
    prefix = f"tensors.not_ended owner={handles[0].owner} step="
    messages = [each.getMessage() for each in caplog.records]
    steps = [each.removeprefix(prefix)[:1] for each in messages if each.startswith(prefix)]
    assert steps == ["4", "5", "6"], "and then it is given up"


def test_arguments_that_a_rank_returns_are_not_stored_again(
    plane: Plane, controller: TrainController
) -> None:
    rows = controller.take(plane.remotize([torch.ones(4), torch.zeros(4)]), step=10)
    answer = controller.call(RoleCall("sums.echo", 10), rows)
    assert [each["same"] for each in answer] == rows
    assert bytes_of_ranks(controller.clear_batches()) == 2 * 16, "what was computed, and no more"
    assert controller.end_step(10).leaks == ()


def test_a_returned_argument_is_stored_again_if_it_outlives_the_argument(
    plane: Plane, controller: TrainController
) -> None:
    rows = plane.remotize([torch.ones(4), torch.zeros(4)])
    of_step = controller.call(RoleCall("sums.echo", 11), rows)
    controller.end_step(11)
    assert torch.equal(plane.localize(rows[0]), torch.ones(4)), "the argument was not taken"
    assert not {each["same"].shard_id for each in of_step} & {each.shard_id for each in rows}
    taken = controller.take(rows, step=12)
    kept = controller.call(RoleCall("sums.echo", UNTAGGED), taken)
    controller.end_step(12)
    assert torch.equal(plane.localize(kept[0]["same"]), torch.ones(4))
    assert tags(controller.clear_batches(kept)) == set()


def test_a_result_has_the_newest_step_of_its_arguments_by_default(
    plane: Plane, controller: TrainController
) -> None:
    old = controller.take(plane.remotize(torch.ones(2)), step=20)
    rows = controller.take(plane.remotize([torch.ones(4), torch.zeros(4)]), step=21)
    answer = controller.call("sums.echo", rows, row_weights=(old,))
    assert {each["new"].step for each in answer} == {21}
    held = controller.end_step(21)
    assert (tags(held), held.leaks) == (set(), ())
    plain = controller.call("sums.echo", plane.remotize([torch.ones(1), torch.ones(1)]))
    assert {each["new"].step for each in plain} == {UNTAGGED}
    controller.clear_batches(plain, controller.call("sums.echo", [e["new"] for e in plain]))


@pytest.mark.slow
def test_a_rank_that_missed_the_end_of_a_step_is_named_and_frees_at_its_next_message(
    home: TensorRuntime, caplog: pytest.LogCaptureFixture
) -> None:
    with TrainController(plan(2, report_timeout_s=0.5), home) as controller:
        rows = controller.take(home.plane.remotize([torch.ones(4), torch.ones(4)]), step=30)
        controller.call("sums.echo", rows)
        late = psutil.Process(controller.pids()[1])
        late.suspend()
        with caplog.at_level(logging.WARNING):
            assert controller.end_step(30).missing == (1,)
        assert "tensors.unreported rank=1" in caplog.text
        late.resume()
        controller.call("sums.all_of", 1.0)  # the call's message names the step too
        held = controller.clear_batches()
        assert (tags(held) & {30}, held.leaks, held.missing) == (set(), (), ())
        with pytest.raises(CallFailed, match="step 30 has ended"):
            controller.call(RoleCall("sums.echo", 30), home.plane.remotize([torch.ones(4)] * 2))


def test_shards_of_a_running_controller_have_no_lease() -> None:
    with serving_runtime(lease_s=0.0) as home, TrainController(plan(1), home) as controller:
        rows = home.plane.remotize([torch.ones(4)])
        assert controller.clear_batches().processes[0].stored.num_tensors == 1
        assert controller.call("sums.echo", rows)[0]["new"].num_bytes == 16
