"""A share that cannot be had is told of before anything starts."""

from contextlib import ExitStack

import pytest

from rollmesh.core.errors import AddressError, ConfigError
from rollmesh.core.share import Share
from rollmesh.launch import share as checks
from rollmesh.launch.share import check_share
from rollmesh.scheduler.planning.state import PipelinePhase
from rollmesh.wire.scheduling import RunClaim
from tests.ports import free_ports
from tests.unit.launch.claimed_fleet import fleet


def test_a_pipeline_with_as_many_engines_as_workers_may_begin_and_no_other() -> None:
    with fleet() as address:
        check_share(Share(address, "math"), num_engines=2)
        with pytest.raises(ConfigError, match="3 engines where the scheduler has 2 generation"):
            check_share(Share(address, "math"), num_engines=3)


@pytest.mark.parametrize(
    ("pipeline", "num_engines", "phase", "line"),
    [
        ("nobody", 2, PipelinePhase.ADMITTED, "--pipeline nobody: .*nobody"),
        ("math", 1, PipelinePhase.ADMITTED, "engine.num_embedded, engine.urls: 1 engines where"),
        ("math", 2, PipelinePhase.REGISTERED, "`rollmesh scheduler admit math` first"),
    ],
)
def test_what_cannot_work_is_told_in_one_line(
    pipeline: str, num_engines: int, phase: PipelinePhase, line: str
) -> None:
    with fleet(phase) as address, pytest.raises(ConfigError, match=line):
        check_share(Share(address, pipeline), num_engines)


def test_a_pipeline_that_is_admitted_a_little_later_is_waited_for_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checks, "SAY_AGAIN_S", 0.05)
    said: list[str] = []
    with fleet(num_registered=3) as address:
        check_share(Share(address, "math"), num_engines=2, wait_s=60.0, say=said.append)
    [line] = said
    assert "--pipeline math: it is registered and not admitted" in line
    assert "waiting up to 60 s" in line


def test_a_scheduler_that_comes_up_a_little_later_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checks, "ANSWER_S", 0.1)
    monkeypatch.setattr(checks, "SAY_AGAIN_S", 0.05)
    [port] = free_ports(1)
    said: list[str] = []
    with ExitStack() as stack:

        def start(line: str) -> None:
            said.append(line)
            stack.enter_context(fleet(bind=f"tcp://127.0.0.1:{port}"))

        check_share(Share(f"tcp://127.0.0.1:{port}", "math"), 2, wait_s=60.0, say=start)
    [line] = said
    assert "nobody answers there" in line


def test_nobody_there_is_a_mistake_in_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "ANSWER_S", 0.1)
    monkeypatch.setattr(checks, "SAY_AGAIN_S", 0.1)
    with pytest.raises(AddressError, match="nobody answers there within"):
        check_share(Share("tcp://127.0.0.1:1", "math"), 1)


def test_a_pipeline_that_somebody_drives_without_a_claim_is_not_begun_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two coordinators of one name would have engines of both on the same GPUs."""
    monkeypatch.setattr(checks, "DEAD_S", 0.3)
    monkeypatch.setattr(checks, "SAY_AGAIN_S", 0.1)
    line = "--pipeline math: another run has that name and goes on"
    with fleet(num_driven=1000) as address, pytest.raises(ConfigError, match=line):
        check_share(Share(address, "math"), num_engines=2)


def test_one_whose_coordinator_has_just_died_may_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "SAY_AGAIN_S", 0.1)
    with fleet(num_driven=3) as address:
        check_share(Share(address, "math"), num_engines=2)


def test_one_that_a_run_has_claimed_is_looked_at_by_who_knows_whether_it_lives() -> None:
    with fleet(num_driven=1000, run=RunClaim("dead", "h", 7)) as address:
        check_share(Share(address, "math"), num_engines=2)
