"""A claimed run's processes end, all of them, and no others do."""

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from rollmesh.core.errors import ConfigError, UserError
from rollmesh.scheduler.admission.killing import end
from tests.unit.scheduler.admission.claimed_run import ClaimedRun, claimed_run

US = os.getuid()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[ClaimedRun]:
    with claimed_run(tmp_path) as run:
        yield run


def rewrite(run: ClaimedRun, **fields: object) -> None:
    told = msgspec.json.decode(run.record.read_bytes()) | fields
    run.record.write_bytes(msgspec.json.encode(told))


def test_the_launch_and_all_that_carries_its_mark_end_and_nothing_else(run: ClaimedRun) -> None:
    role, agent = run.start(f"{run.mark}/router.1"), run.start(f"{run.mark}/worker.2/agent.1")
    neighbour, other = run.start(f"{run.mark}0/router.1"), run.start("")
    assert end(run.claim, "math", US) == 3
    assert [each.wait() for each in (run.launch, role, agent)] == [-9] * 3
    assert (neighbour.poll(), other.poll()) == (None, None)


def test_a_pid_that_is_another_process_by_now_is_left(run: ClaimedRun) -> None:
    rewrite(run, life="1")
    role = run.start(f"{run.mark}/router.1")
    assert end(run.claim, "math", US) == 1
    assert role.wait() == -9
    assert run.launch.poll() is None


def test_a_run_that_has_ended_already_is_no_fault(run: ClaimedRun) -> None:
    run.launch.kill()
    run.launch.wait()
    assert end(run.claim, "math", US) == 0


@pytest.mark.parametrize("pid", [-1, 0, 1, 2**64, "7"])
def test_a_record_with_a_pid_of_no_launch_is_refused_in_one_line(
    pid: object, run: ClaimedRun
) -> None:
    rewrite(run, pid=pid)
    with pytest.raises(ConfigError, match="is not one of a claimed run; end it by hand"):
        end(run.claim, "math", US)
    assert run.launch.poll() is None


def test_the_record_of_another_pipelines_run_is_refused(run: ClaimedRun) -> None:
    with pytest.raises(ConfigError, match="is that of another run; end it by hand"):
        end(run.claim, "code", US)
    assert run.launch.poll() is None


def test_another_users_run_is_not_ended(run: ClaimedRun) -> None:
    with pytest.raises(UserError, match=rf"is of user {US}: user 65534 may not end it"):
        end(run.claim, "math", 65534)
    assert run.launch.poll() is None


def test_admission_does_not_end_itself(run: ClaimedRun) -> None:
    rewrite(run, pid=os.getpid())
    with pytest.raises(UserError, match="not of a run of this machine"):
        end(run.claim, "math", US)


def test_processes_of_another_machine_are_not_ended(run: ClaimedRun) -> None:
    elsewhere = msgspec.structs.replace(run.claim, host="another-machine", place="x/1/0")
    with pytest.raises(UserError, match=r"is on another-machine.*--dead"):
        end(elsewhere, "math", US)
    assert run.launch.poll() is None
