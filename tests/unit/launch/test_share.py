"""A share that cannot be had is told of before anything starts."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest

from rollmesh.core.errors import AddressError, ConfigError
from rollmesh.core.share import Share
from rollmesh.launch import share as checks
from rollmesh.launch.share import check_share, give_back
from rollmesh.scheduler.planning.state import PipelinePhase, State
from rollmesh.scheduler.service.explain import Known, view
from rollmesh.wire.frames import Packet
from rollmesh.wire.messages import AnyMessage
from rollmesh.wire.scheduling import (
    AdmitPipeline,
    KillPipeline,
    PipelineSpec,
    ReadScheduler,
    SchedulerAnswered,
)
from rollmesh.wire.sockets import Hub, wait

SPEC = PipelineSpec(
    pipeline_id="math", clusters={"actor_train": (0, 1)}, generation=(0, 1, 2, 3), tp=2
)


@contextmanager
def fleet(
    phase: PipelinePhase = PipelinePhase.ADMITTED,
    heard: list[AnyMessage] | None = None,
    error: str = "",
    num_driven: int = 0,
) -> Iterator[str]:
    """The address of a scheduler that has one pipeline, and answers as the service does, or what is
    asked of it with this error; what it heard. A run drives the pipeline at so many looks."""
    heard = [] if heard is None else heard
    state = State()
    state.add_pipeline(SPEC).phase = phase
    hub, is_over = Hub("tcp://127.0.0.1:0"), threading.Event()
    looks = iter([frozenset({"math"})] * num_driven)

    def serve() -> None:
        while not is_over.is_set():
            wait([hub], None, 0.05)
            for route, packet in hub.receive():
                heard.append(packet.message)
                match packet.message:
                    case ReadScheduler(key, pipeline_id):
                        known = Known(driven=next(looks, frozenset()))
                        told = view(state, known, pipeline_id)
                        answer = SchedulerAnswered(key, not told.error, told.error)
                        hub.send(route, Packet(answer, body=msgspec.json.encode(told)))
                    case KillPipeline(key) | AdmitPipeline(key):
                        hub.send(route, Packet(SchedulerAnswered(key, not error, error)))

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield hub.address
    finally:
        is_over.set()
        thread.join()
        hub.close()


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


def test_nobody_there_is_a_mistake_in_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "ANSWER_S", 0.1)
    monkeypatch.setattr(checks, "SAY_AGAIN_S", 0.1)
    with pytest.raises(AddressError, match="nobody answers there within"):
        check_share(Share("tcp://127.0.0.1:1", "math"), 1)


def test_a_pipeline_that_another_run_drives_is_not_begun_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two coordinators of one name would have engines of both on the same GPUs."""
    monkeypatch.setattr(checks, "DEAD_S", 0.3)
    monkeypatch.setattr(checks, "SAY_AGAIN_S", 0.1)
    line = "--pipeline math: another run has that name and goes on"
    with fleet(num_driven=1000) as address, pytest.raises(ConfigError, match=line):
        check_share(Share(address, "math"), num_engines=2)


def test_one_whose_last_run_has_just_died_may_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "SAY_AGAIN_S", 0.1)
    with fleet(num_driven=3) as address:
        check_share(Share(address, "math"), num_engines=2)


def test_a_run_that_has_ended_says_that_it_is_dead_and_may_ask_again() -> None:
    heard: list[AnyMessage] = []
    with fleet(heard=heard) as address:
        assert give_back(Share(address, "math")) == ""
    assert [type(each) for each in heard] == [KillPipeline, AdmitPipeline]
    assert {each.pipeline_id for each in heard} == {"math"}  # type: ignore[union-attr]


def test_a_scheduler_that_cannot_be_told_is_no_fault_and_the_remedy_is_named() -> None:
    with fleet(error="it is leaving") as address:
        told = give_back(Share(address, "math"))
    assert "(it is leaving): `rollmesh scheduler kill math` frees its GPUs" in told
