"""The train controller with real ranks: rows there and back, typed errors, nothing left over."""

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import torch

from rollmesh.core.errors import CallFailed, RankGone
from rollmesh.tensors.handles import RTensor, unpack
from rollmesh.tensors.plane import Plane
from rollmesh.trainer.controller.answers import Reduce
from rollmesh.trainer.controller.controller import RoleCall, TensorUsage, TrainController
from rollmesh.trainer.controller.dispatch import DispatchRule
from rollmesh.trainer.controller.tensor_runtime import TensorRuntime
from tests.flow.rank_group import plan, serving_runtime

pytestmark = pytest.mark.slow

GONE_S = 60.0
DOUBLE = RoleCall(
    "sums.double",
    rule=DispatchRule(uneven="pad"),
    reduce=Reduce(rules={"total": "sum", "num_rows": "sum"}),
)


def of_step(step: int) -> RoleCall:
    """A call, with results tagged with `step`."""
    return msgspec.structs.replace(DOUBLE, step=step)


@pytest.fixture(scope="module")
def home() -> Iterator[TensorRuntime]:
    with serving_runtime() as own:
        yield own


@pytest.fixture(scope="module")
def plane(home: TensorRuntime) -> Plane:
    return home.plane


@pytest.fixture(scope="module")
def controller(home: TensorRuntime) -> Iterator[TrainController]:
    """Two heads."""
    with TrainController(plan(2), home) as started:
        yield started


def rows(plane: Plane, *lengths: int, dtype: torch.dtype = torch.float32) -> list[dict[str, Any]]:
    """Row n, as a handle, is the number n repeated `lengths[n]` times."""
    tensors = [{"x": torch.full((length,), n, dtype=dtype)} for n, length in enumerate(lengths)]
    stored: list[dict[str, Any]] = plane.remotize(tensors)
    return stored


def shared_memory(process: psutil.Process) -> set[Path]:
    """Its own shared-memory files that it has mapped."""
    mapped = {Path(each.path) for each in process.memory_maps()}
    return {path for path in mapped if path.name.startswith("rollmesh-")}


def total_bytes(held: TensorUsage) -> dict[int, int]:
    """Bytes stored, retained or buffered, by process."""
    return {
        each.rank: each.stored.total_bytes + each.stored.retained_bytes + each.buffered.total_bytes
        for each in held.processes
    }


def tensor_log(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    """Log messages about tensors."""
    records = [each for each in caplog.records if each.levelno == level]
    return [each.getMessage() for each in records if each.getMessage().startswith("tensors.")]


def test_rows_return_in_order_and_the_numbers_of_every_head_count(
    plane: Plane, controller: TrainController
) -> None:
    batch = controller.take(rows(plane, 5, 1, 4, 2, 3, dtype=torch.bfloat16), step=1)
    answer = controller.call(of_step(1), batch)
    assert (answer["total"], answer["num_rows"]) == (0 + 1 + 8 + 6 + 12, 5)
    assert all(isinstance(each, RTensor) and each.step == 1 for each in answer["twice"])
    assert len({each.owner for each in answer["twice"]}) == 2
    expected = [torch.full((num,), 2.0 * n).bfloat16() for n, num in enumerate((5, 1, 4, 2, 3))]
    assert all(map(torch.equal, plane.localize(answer["twice"]), expected))
    controller.end_step(1)


def test_when_a_step_ends_nothing_of_it_is_left_anywhere(
    plane: Plane, controller: TrainController
) -> None:
    batch = controller.take(rows(plane, 3, 3), step=2)
    answer = controller.call(of_step(2), batch)
    before = total_bytes(controller.clear_batches())
    assert all(before.values()), "each process holds something, as owner or consumer"
    held = controller.end_step(2)
    assert total_bytes(held) == {-1: 0, 0: 0, 1: 0}
    assert (held.leaks, held.missing) == ((), ())
    assert answer["num_rows"] == 2


def test_rows_that_a_role_keeps_are_reported_as_a_leak_of_its_rank(
    plane: Plane, controller: TrainController, caplog: pytest.LogCaptureFixture
) -> None:
    batch = [row["x"] for row in rows(plane, 8, 8)]
    twice = controller.call(of_step(3), [{"x": each} for each in batch])["twice"]
    controller.call("sums.keep", twice)
    with caplog.at_level(logging.INFO):
        held = controller.end_step(3)
    # A rank keeps rows of its own store that it returned itself.
    assert {(leak.rank, leak.tag) for leak in held.leaks} <= {(0, "retained"), (1, "retained")}
    assert held.leaks
    assert tensor_log(caplog, logging.WARNING) == [
        f"tensors.leaked rank={each.rank} tag={each.tag} bytes={each.num_bytes}"
        for each in held.leaks
    ]
    caplog.clear()
    controller.call("sums.forget")
    with caplog.at_level(logging.INFO):
        held = controller.clear_batches(batch)
    assert tensor_log(caplog, logging.WARNING) == []
    assert held.num_cleared == 2
    assert held.leaks == ()
    assert total_bytes(held) == {-1: 0, 0: 0, 1: 0}


def test_a_shard_that_is_gone_fails_its_call_before_any_rank_has_run_it(
    plane: Plane, controller: TrainController
) -> None:
    batch = rows(plane, 4, 4)
    controller.clear_batches(batch[1])
    with pytest.raises(CallFailed, match=r"sums.double failed at rank \d: .*cleared"):
        controller.call(DOUBLE, batch)
    assert controller.call("sums.all_of", 1.0) == {"total": 3.0}
    controller.clear_batches(batch)


def test_an_owner_that_was_killed_fails_its_call_by_name_and_no_other(
    plane: Plane, controller: TrainController
) -> None:
    argv = [sys.executable, "-m", "tests.flow.rank_group", "owner"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        handles = unpack(bytes.fromhex(owner.stdout.readline().decode()))
        batch = [{"x": each} for each in handles]
        assert controller.call(DOUBLE, batch)["num_rows"] == 2
        controller.end_step(4)  # so that no process has a copy
        owner.kill()
    with pytest.raises(
        CallFailed, match=f"sums.double failed at rank .: {handles[0].owner} is gone"
    ):
        controller.call(DOUBLE, batch)
    assert controller.call("sums.all_of", 1.0) == {"total": 3.0}
    held = controller.clear_batches(batch)
    assert (held.num_cleared, held.leaks) == (0, ())


def test_a_method_that_raises_at_one_rank_is_a_typed_error_and_ranks_continue(
    controller: TrainController,
) -> None:
    with pytest.raises(CallFailed) as caught:
        controller.call("sums.fail_at", 1)
    assert str(caught.value) == "sums.fail_at failed at rank 1: ValueError: rank 1 was to fail"
    assert controller.call("sums.all_of", 2.0) == {"total": 5.0}


@pytest.mark.parametrize(
    ("method", "args", "error"),
    [
        ("sums.nothing", (), "no sums.nothing here: sums"),
        ("critic.train", (), "no critic.train here: sums"),
        ("sums._private", (), "no sums._private here"),
        ("sums.all_of", (1, 2, 3), "sums.all_of: too many positional arguments"),
    ],
)
def test_a_wrong_call_is_named_and_runs_on_no_rank(
    controller: TrainController, method: str, args: tuple[Any, ...], error: str
) -> None:
    with pytest.raises(CallFailed, match=error):
        controller.call(method, *args)


def test_calls_that_begin_together_run_in_order(plane: Plane, controller: TrainController) -> None:
    batch = rows(plane, 2, 2)
    begun = [controller.begin(DOUBLE, batch), controller.begin("sums.all_of", 1.0)]
    assert [each.result()["total"] for each in begun] == [2.0, 3.0]
    controller.clear_batches(batch, begun[0].result())


def test_a_role_gets_its_settings(controller: TrainController) -> None:
    assert controller.call("sums.setting", "colour") == "blue"


def test_ranks_listen_on_loopback_only(controller: TrainController) -> None:
    controller.call("sums.all_of", 1.0)  # so that collectives listen there too
    listening = [
        each.laddr.ip
        for pid in controller.pids()
        for each in psutil.Process(pid).net_connections("tcp")
        if each.status == psutil.CONN_LISTEN
    ]
    assert len(listening) >= 3, "two stores of tensors, and the store in which ranks meet"
    assert set(listening) == {"127.0.0.1"}


def test_ranks_beside_a_head_compute_on_its_arguments(home: TensorRuntime, plane: Plane) -> None:
    tensors = [torch.arange(5, dtype=torch.bfloat16), torch.ones(0), torch.tensor(3.5)]
    handles = plane.remotize(tensors)
    with TrainController(plan(2, width=2), home) as controller:
        assert controller.call("sums.digest", handles, scale=2.0) == (27.0, 27.0)
        held = controller.clear_batches(handles)
    assert total_bytes(held) == {-1: 0, 0: 0, 1: 0}


def test_a_rank_that_is_killed_in_a_call_ends_it_and_all_ranks(
    home: TensorRuntime, tmp_path: Path
) -> None:
    with TrainController(plan(2), home) as controller:
        processes = [psutil.Process(pid) for pid in controller.pids()]
        assert all(map(shared_memory, processes))
        memory = [path for each in processes for path in shared_memory(each)]
        flag = tmp_path / "flag"
        os.mkfifo(flag)
        begun = controller.begin("sums.leave_alone", 1, str(flag))
        assert flag.read_bytes() == b"here"
        processes[1].kill()
        with pytest.raises(RankGone, match="rank 1 is gone: killed by signal 9"):
            begun.result()
        _, alive = psutil.wait_procs(processes, timeout=GONE_S)
        assert not alive
        with pytest.raises(RankGone):
            controller.call("sums.all_of", 1.0)
        assert controller.clear_batches().missing == (0, 1)
    assert not [path for path in memory if path.exists()]


def test_a_rank_stuck_in_a_collective_is_not_waited_for(home: TensorRuntime) -> None:
    with (
        TrainController(plan(2), home) as controller,
        pytest.raises(
            RankGone, match=r"rank 0 is gone: it did not return from sums.fail_and_leave"
        ),
    ):
        controller.call("sums.fail_and_leave_alone", 1)


def test_a_role_that_cannot_be_made_fails_the_start_with_its_reason(home: TensorRuntime) -> None:
    broken = TrainController(plan(1, make="tests.flow.rank_roles:Broken"), home)
    with pytest.raises(RankGone, match="RuntimeError: rank 0 has no such model"):
        broken.start()


def test_ranks_end_when_their_controller_is_killed() -> None:
    argv = [sys.executable, "-m", "tests.flow.rank_group"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as program:
        assert program.stdout is not None
        ranks = [psutil.Process(int(pid)) for pid in program.stdout.readline().split()]
        assert len(ranks) == 2
        os.kill(program.pid, signal.SIGKILL)
        _, alive = psutil.wait_procs(ranks, timeout=GONE_S)
    assert not alive
