"""A train controller's start and end, and calls that fail in tensor-parallel groups.

The groups have four ranks here: two heads with one rank beside each.
"""

import gc
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import psutil
import pytest
import torch

from rollmesh.core.errors import AddressError, CallFailed, ConfigError, RankError, RankGone
from rollmesh.tensors.plane import Plane
from rollmesh.trainer.controller.answers import Reduce
from rollmesh.trainer.controller.controller import RankPlan, RoleCall, TrainController
from rollmesh.trainer.controller.hub import RankHub
from rollmesh.trainer.controller.rank_group import NO_STEP, RankGroupSettings
from rollmesh.trainer.controller.spec import PlaneSpec, RankSpec, Topology
from rollmesh.trainer.controller.tensor_runtime import TensorRuntime
from tests.flow.rank_group import SMALL, plan, serving_runtime

pytestmark = pytest.mark.slow

GONE_S = 60.0
ALL = Reduce(default="sum")


@pytest.fixture(scope="module")
def home() -> Iterator[TensorRuntime]:
    with serving_runtime() as own:
        yield own


@pytest.fixture(scope="module")
def plane(home: TensorRuntime) -> Plane:
    return home.plane


@pytest.fixture(scope="module")
def pairs(home: TensorRuntime) -> Iterator[TrainController]:
    """A controller with two heads and one rank beside each."""
    with TrainController(plan(4, width=2), home) as started:
        yield started


def processes_of(controller: TrainController) -> list[psutil.Process]:
    return [psutil.Process(pid) for pid in controller.pids()]


def pipes(folder: Path) -> tuple[Path, Path]:
    """Pipes by which a role reports that it has begun, and waits for permission to continue."""
    flag, gate = folder / "flag", folder / "gate"
    os.mkfifo(flag)
    os.mkfifo(gate)
    return flag, gate


def have_ended(processes: list[psutil.Process]) -> bool:
    return not psutil.wait_procs(processes, timeout=GONE_S)[1]


def test_ranks_beside_both_heads_compute_on_the_arguments_of_their_own_head(
    plane: Plane, pairs: TrainController
) -> None:
    rows = pairs.take(plane.remotize([torch.full((3,), float(n)) for n in (1, 2, 3, 4)]), 1)
    answer = pairs.call(RoleCall("sums.digest", reduce=ALL), rows, scale=1.0)
    assert answer == (30.0, 30.0), "both of a group the same, all rows once over both groups"
    pairs.call("sums.echo", rows)
    stored = {each.rank: each.stored.num_tensors for each in pairs.clear_batches().processes}
    assert stored == {-1: 4, 0: 2, 1: 0, 2: 2, 3: 0}, "a head answers for its group"
    held = pairs.end_step(1)
    assert [each.rank for each in held.processes] == [-1, 0, 1, 2, 3]
    assert (held.leaks, held.missing) == ((), ())


def test_calls_of_several_threads_run_in_one_order_at_all_ranks(
    plane: Plane, pairs: TrainController
) -> None:
    rows = plane.remotize([torch.ones(2), torch.ones(2)])

    def ask(number: int) -> float:
        if number % 2:
            return float(pairs.call("sums.all_of", float(number))["total"])
        call = RoleCall("sums.digest", reduce=ALL)
        return float(pairs.call(call, rows, scale=float(number))[1])

    with ThreadPoolExecutor(6) as threads:
        answers = list(threads.map(ask, range(24)))
    # Collectives of all ranks and of a pair: out of order they would hang or mix.
    assert answers == [4.0 * n + 6 if n % 2 else 4.0 * n for n in range(24)]
    pairs.clear_batches(rows)


def test_a_call_that_cannot_be_staged_at_one_head_runs_on_no_rank(
    plane: Plane, pairs: TrainController
) -> None:
    good, bad = plane.remotize([torch.ones(2), torch.ones(2)])
    pairs.clear_batches(bad)
    before = pairs.begin("sums.all_of", 1.0)
    failing = pairs.begin(RoleCall("sums.digest", reduce=ALL), [good, bad], scale=1.0)
    after = pairs.begin("sums.all_of", 2.0)
    assert (before.result()["total"], after.result()["total"]) == (10.0, 14.0)
    with pytest.raises(CallFailed, match="cleared"):
        failing.result()
    pairs.clear_batches(good)


def test_arguments_are_fetched_while_an_earlier_call_runs(
    plane: Plane, pairs: TrainController, tmp_path: Path
) -> None:
    flag, gate = pipes(tmp_path)
    running = pairs.begin("sums.wait_for", 0, str(flag), str(gate))
    assert flag.read_bytes() == b"here"
    rows = pairs.take(plane.remotize([torch.ones(2), torch.ones(2)]), 2)
    waiting = pairs.begin(RoleCall("sums.digest", reduce=ALL), rows, scale=1.0)
    heads = (1, 3)  # after the arguments of this process's own ranks, 0 and 2
    while not all(pairs.clear_batches().processes[at].buffered.num_tensors for at in heads):
        """Its step thread waits for the test, so the fetch runs concurrently."""
    gate.write_bytes(b"go on")
    running.result()
    assert waiting.result() == (4.0, 4.0)
    assert pairs.end_step(2).leaks == ()


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_a_rank_that_raises_in_a_group_is_named_and_the_next_call_runs(
    pairs: TrainController, rank: int
) -> None:
    with pytest.raises(CallFailed, match=f"sums.fail_at failed at rank {rank}: ValueError"):
        pairs.call("sums.fail_at", rank)
    assert pairs.call("sums.all_of", 0.0) == {"total": 6.0}


def test_a_call_that_fails_while_it_looks_at_its_rows_leaves_nothing(
    plane: Plane, pairs: TrainController
) -> None:
    rows = pairs.take(plane.remotize([torch.ones(8), torch.ones(8)]), 3)
    with pytest.raises(CallFailed, match="rank 0 has 1 rows"):
        pairs.call("sums.fail_on", rows)
    held = pairs.end_step(3)
    assert (held.leaks, held.missing) == ((), ())
    assert {each.stored.retained_bytes for each in held.processes} == {0}


@pytest.mark.parametrize("rank", [1, 2])
def test_a_rank_that_is_killed_beside_a_head_ends_the_call_and_all_ranks(
    home: TensorRuntime, tmp_path: Path, rank: int
) -> None:
    flag = tmp_path / "flag"
    os.mkfifo(flag)
    with TrainController(plan(4, width=2), home) as controller:
        processes = processes_of(controller)
        begun = controller.begin("sums.leave_alone", rank, str(flag))
        assert flag.read_bytes() == b"here"
        processes[rank].kill()
        with pytest.raises(RankGone, match=f"rank {rank} is gone: killed by signal 9"):
            begun.result()
        assert have_ended(processes)


def test_a_controller_closes_once_and_answers_no_later_call(home: TensorRuntime) -> None:
    controller = TrainController(plan(1), home)
    controller.start()
    processes = processes_of(controller)
    for _ in range(2):
        controller.close()
    assert have_ended(processes)
    with pytest.raises(RankError, match="the controller is closed"):
        controller.call("sums.all_of", 1.0)
    held = controller.end_step(9)
    assert (held.missing, held.leaks) == ((0,), ())


def test_a_rank_that_cannot_clear_reports_why_and_handles_the_next_query() -> None:
    def alone(address: str) -> list[RankSpec]:
        one = RankSpec(controller=address, rank=0, topology=Topology(1), roles={}, plane=SMALL)
        return [one]

    hub = RankHub("tcp://127.0.0.1:0", None, RankGroupSettings(beat_s=0.1), alone)
    hub.start()
    hub.formed.result()
    for ids, error in ((b"no ids", "6 bytes are not a list of ids"), (b"", "")):
        held = hub.query_tensors(NO_STEP, ids).result()
        assert [(each.rank, each.error) for each in held.reports] == [(0, error)]
    hub.close("done")


def test_a_controller_that_never_started_can_be_closed(home: TensorRuntime) -> None:
    controller = TrainController(plan(1), home)
    controller.close()
    with pytest.raises(RankError, match="the controller is closed"):
        controller.start()


def test_a_close_during_a_call_fails_the_call_at_once(home: TensorRuntime, tmp_path: Path) -> None:
    flag, gate = pipes(tmp_path)
    controller = TrainController(plan(1), home)
    controller.start()
    processes = processes_of(controller)
    waiting = controller.begin("sums.wait_for", 0, str(flag), str(gate))
    assert flag.read_bytes() == b"here"
    closing = threading.Thread(target=controller.close)
    closing.start()
    with pytest.raises(RankError, match="the controller has ended"):
        waiting.result()
    gate.write_bytes(b"go on")
    closing.join(GONE_S)
    assert not closing.is_alive()
    assert have_ended(processes)


def test_a_garbage_collected_controller_ends_its_ranks(home: TensorRuntime) -> None:
    controller = TrainController(plan(1), home)
    controller.start()
    processes = processes_of(controller)
    begun = controller.begin("sums.all_of", 2.0)
    del controller
    gc.collect()
    assert begun.result() == {"total": 2.0}, "the pending call still has its result"
    del begun
    gc.collect()
    assert have_ended(processes)


def test_output_of_a_role_goes_to_the_run_folder(
    home: TensorRuntime, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with_folder = msgspec.structs.replace(plan(1), folder=str(tmp_path))
    with TrainController(with_folder, home) as controller:
        controller.call("sums.log", "so far, so good")
    assert (tmp_path / "logs/rank-0.out").read_text() == "so far, so good\n"
    assert "so far" not in capfd.readouterr().out


def failing_start(rank_plan: RankPlan, home: TensorRuntime) -> str:
    """Return the line of the error with which the start fails."""
    with pytest.raises(RankGone) as caught, TrainController(rank_plan, home):
        raise AssertionError("it has begun")
    return str(caught.value)


@pytest.mark.parametrize(
    ("make", "error"),
    [
        ("no_such_package:Actor", "ModuleNotFoundError: No module named 'no_such_package'"),
        ("tests.flow.rank_roles:Actor", "'tests.flow.rank_roles:Actor' is not a callable"),
    ],
)
def test_a_role_that_cannot_be_imported_is_a_one_line_error(
    home: TensorRuntime, make: str, error: str
) -> None:
    line = failing_start(plan(1, make=make), home)
    assert line.startswith(f"rank 0 is gone: {error}")
    assert "\n" not in line


def test_an_address_in_use_is_a_one_line_error(home: TensorRuntime) -> None:
    bind = home.address
    line = failing_start(msgspec.structs.replace(plan(1), plane=PlaneSpec(bind=bind)), home)
    taken = f"{bind.removeprefix('tcp://')}: cannot listen there: address already in use"
    assert line.startswith(f"rank 0 is gone: {taken}")


def test_a_missing_device_is_a_one_line_error(home: TensorRuntime) -> None:
    with_gpus = msgspec.structs.replace(plan(1000), device="cuda")
    with pytest.raises(ConfigError, match=r"rank \d+ of this host has no GPU: torch finds \d+;"):
        TrainController(with_gpus, home)


def test_an_invalid_plan_is_refused_before_any_process_starts(home: TensorRuntime) -> None:
    for num_ranks, width in ((0, 1), (4, 3), (2, 0)):
        with pytest.raises(ConfigError, match=f"{num_ranks} ranks do not divide into groups"):
            plan(num_ranks, width)
    open_plane = msgspec.structs.replace(plan(1), plane=PlaneSpec(bind="tcp://0.0.0.0:0"))
    with pytest.raises(AddressError, match=r"0\.0\.0\.0"):
        TrainController(open_plane, home)


def test_rows_released_shortly_after_a_call_are_no_leak(
    plane: Plane, pairs: TrainController
) -> None:
    rows = pairs.take(plane.remotize([torch.ones(8), torch.ones(8)]), 90)
    pairs.call("sums.keep_briefly", rows)
    assert pairs.end_step(90).leaks == ()
