"""The publisher machine, composed with the fleet machine and model engines; no sockets."""

import random
from typing import TypeVar

import pytest

from rollmesh.engine.fleet import ContinueEngine, EngineProbed, Fleet, ProbeEngine
from rollmesh.trainer.publisher import (
    CallEngine,
    EngineCalled,
    Probe,
    PublishAsked,
    PublishEnded,
    Publisher,
    PublisherSettings,
    PublishReport,
    UpdatePhase,
    mean_gap,
)
from rollmesh.wire.fleet import EnginePhase, JoinEngine
from rollmesh.wire.machine import Received, Send, Ticked
from rollmesh.wire.messages import AnyMessage

A, B = "http://a", "http://b"


def probe_of(policy_version: int) -> Probe:
    return Probe((1, 2, 3), (-1.0 - policy_version, -2.0 - policy_version))


def target(policy_version: int) -> PublishAsked:
    return PublishAsked(policy_version, f"v{policy_version}", probe_of(policy_version))


class ModelEngine:
    """An engine as the publisher and the fleet see one."""

    def __init__(self) -> None:
        self.label = self.weights = 0
        self.is_up, self.is_paused = True, False
        self.life = 0
        self.broken: UpdatePhase | None = None
        """The step that fails."""
        self.is_idle = False
        """Updates change the label only."""

    def call(self, call: CallEngine) -> EngineCalled:
        if not self.is_up or call.phase is self.broken:
            return EngineCalled(call.url, call.serial, False, "broken")
        match call.phase:
            case UpdatePhase.PAUSING:
                self.is_paused = True
            case UpdatePhase.LOADING:
                assert self.is_paused
                self.label = call.target.policy_version
                self.weights = self.weights if self.is_idle else self.label
            case UpdatePhase.RESUMING | UpdatePhase.UNDOING:
                self.is_paused = False
            case UpdatePhase.SCORING:
                scores = probe_of(self.weights).logprobs
                return EngineCalled(call.url, call.serial, True, "", scores)
        return EngineCalled(call.url, call.serial, True)

    def restart(self) -> None:
        self.label = self.weights = 0
        self.is_paused = False
        self.life += 1

    def probed(self, ask: ProbeEngine | ContinueEngine) -> EngineProbed:
        if self.is_up and isinstance(ask, ContinueEngine):
            self.is_paused = False
        return EngineProbed(
            url=ask.url,
            serial=ask.serial,
            ok=self.is_up,
            incarnation=f"i{self.life}",
            policy_version=self.label,
        )


class Mesh:
    """Publisher, fleet and engines on one clock; messages wait in queues until delivered."""

    def __init__(self, *urls: str, lease_s: float = 10.0) -> None:
        self.publisher = Publisher(PublisherSettings(lease_s=lease_s))
        self.fleet = Fleet()
        self.engines = {url: ModelEngine() for url in urls}
        self.now_s = 0.0
        self.reports: list[PublishReport] = []
        self.calls: list[CallEngine] = []
        self.to_fleet: list[AnyMessage] = [JoinEngine(0, url) for url in urls]
        self.to_publisher: list[AnyMessage] = []
        self.probes: list[ProbeEngine | ContinueEngine] = []
        self.was_called: list[tuple[str, UpdatePhase]] = []

    def publish(self, event: PublishAsked | EngineCalled | Received | Ticked) -> None:
        for action in self.publisher.step(event, self.now_s):
            match action:
                case Send(_, message):
                    self.to_fleet.append(message)
                case CallEngine():
                    self.calls.append(action)
                    self.was_called.append((action.url, action.phase))
                case PublishEnded(report):
                    self.reports.append(report)

    def tend_fleet(self, event: EngineProbed | Received | Ticked) -> None:
        for action in self.fleet.step(event, self.now_s):
            match action:
                case Send(_, message):
                    self.to_publisher.append(message)
                case ProbeEngine() | ContinueEngine():
                    self.probes.append(action)

    def deliver(self, rng: random.Random | None = None) -> None:
        """Hand over everything that waits; with `rng`, lose some and hold some back."""
        for message in take(self.to_fleet, rng):
            self.tend_fleet(Received(b"publisher", message))
        for probe in take(self.probes, None):
            self.tend_fleet(self.engines[probe.url].probed(probe))
        for message in take(self.to_publisher, rng):
            self.publish(Received(b"", message))
        for call in take(self.calls, None):
            self.publish(self.engines[call.url].call(call))

    def run(self, seconds: float, rng: random.Random | None = None) -> None:
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s += 0.05
            self.publish(Ticked())
            self.tend_fleet(Ticked())
            self.deliver(rng)

    def phase(self, url: str = A) -> EnginePhase:
        return next(row.phase for row in self.fleet.table().engines if row.url == url)

    def policy_version(self, url: str = A) -> int:
        return next(row.policy_version for row in self.fleet.table().engines if row.url == url)


T = TypeVar("T")


def take(queue: list[T], rng: random.Random | None) -> list[T]:
    taken = [each for each in queue if rng is None or rng.random() > 0.2]
    queue.clear()
    return taken


def test_publication_takes_each_engine_through_the_steps_in_order() -> None:
    mesh = Mesh(A, B)
    mesh.run(1.0)
    mesh.publish(target(1))
    mesh.run(1.0)
    [report] = mesh.reports
    assert report.policy_version == 1
    assert set(report.updated) == {A, B}
    assert report.failed == ()
    assert [phase.value for url, phase in mesh.was_called if url == A] == [
        "pausing",
        "flushing",
        "loading",
        "resuming",
        "scoring",
    ]
    assert (mesh.phase(), mesh.policy_version()) == (EnginePhase.READY, 1)
    assert not mesh.engines[A].is_paused
    assert mesh.publisher.phases() == {}


def test_an_engine_that_a_new_router_does_not_know_is_brought_up_again() -> None:
    mesh = Mesh(A)
    mesh.run(1.0)
    mesh.publish(target(1))
    mesh.run(1.0)
    mesh.fleet = Fleet()
    mesh.run(2.0)  # its table is read, and A is not in it
    mesh.was_called.clear()
    mesh.to_fleet.append(JoinEngine(0, A))
    mesh.run(3.0)
    assert (A, UpdatePhase.LOADING) in mesh.was_called
    assert mesh.phase() is EnginePhase.READY


@pytest.mark.parametrize("left_at", [1, 30])
def test_an_engine_that_another_run_left_at_an_equal_or_higher_number_is_updated(
    left_at: int,
) -> None:
    mesh = Mesh(A)
    mesh.engines[A].label = mesh.engines[A].weights = left_at
    mesh.run(1.0)
    mesh.publish(PublishAsked(1, "v1", probe_of(1)))
    mesh.run(2.0)
    assert mesh.reports[0].updated == (A,)
    assert UpdatePhase.LOADING in [phase for _, phase in mesh.was_called]
    assert mesh.engines[A].label == 1


def test_an_engine_that_was_updated_is_left_alone() -> None:
    mesh = Mesh(A)
    mesh.run(1.0)
    mesh.publish(target(1))
    mesh.run(2.0)
    mesh.was_called.clear()
    mesh.run(5.0)
    assert mesh.was_called == []


def test_empty_fleet_ends_a_publication_at_once_and_serves_who_comes_later() -> None:
    mesh = Mesh()
    mesh.publish(target(1))
    mesh.run(1.0)
    assert mesh.reports[0].updated == ()
    mesh.engines[A] = ModelEngine()
    mesh.to_fleet.append(JoinEngine(0, A))
    mesh.run(3.0)
    assert (mesh.phase(), mesh.policy_version()) == (EnginePhase.READY, 1)


@pytest.mark.parametrize("step", ["pausing", "flushing", "loading", "resuming", "scoring"])
def test_engine_that_fails_a_step_is_fenced_resumed_and_tried_again(step: str) -> None:
    mesh = Mesh(A, B)
    mesh.run(1.0)
    mesh.engines[A].broken = UpdatePhase(step)
    mesh.publish(target(1))
    mesh.run(1.0)
    [report] = mesh.reports
    assert report.updated == (B,)
    assert [text.startswith(f"{A}: {step}: broken") for text in report.failed] == [True]
    assert mesh.phase() is not EnginePhase.READY
    assert not mesh.engines[A].is_paused
    mesh.engines[A].broken = None
    mesh.run(5.0)
    assert (mesh.phase(), mesh.policy_version()) == (EnginePhase.READY, 1)


def test_update_that_changed_nothing_is_found_out_by_the_probe() -> None:
    mesh = Mesh(A)
    mesh.run(1.0)
    mesh.engines[A].is_idle = True
    mesh.publish(target(1))
    mesh.run(1.0)
    assert "differ from the trainer's" in mesh.reports[0].failed[0]
    assert mesh.phase() is not EnginePhase.READY


def test_small_step_that_the_tolerance_hides_is_found_out_by_the_last_probe() -> None:
    small = [
        PublishAsked(1, "v1", Probe((1, 2), (-1.0,))),
        PublishAsked(2, "v2", Probe((1, 2), (-1.01,))),
    ]
    publisher = Publisher()
    for ask in small:
        publisher.step(ask, 0.0)
    judge = publisher._judge  # noqa: SLF001 - the verdict on scores, without the way there
    assert "version before" in judge((-1.0,), small[1])
    assert judge((-1.01,), small[1]) == ""
    assert "differ" in judge((float("nan"),), small[1])
    assert "scored 2 tokens" in judge((-1.0, -1.0), small[1])


def test_dead_engine_does_not_hold_up_the_others() -> None:
    mesh = Mesh(A, B)
    mesh.engines[A].is_up = False
    mesh.run(1.0)
    mesh.publish(target(1))
    mesh.run(2.0)
    assert mesh.reports[0].updated == (B,)
    assert mesh.reports[0].failed


def test_engine_that_restarts_later_is_brought_up_again() -> None:
    mesh = Mesh(A)
    mesh.run(1.0)
    mesh.publish(target(1))
    mesh.run(1.0)
    mesh.engines[A].restart()
    mesh.run(5.0)
    assert (mesh.phase(), mesh.policy_version()) == (EnginePhase.READY, 1)
    assert mesh.engines[A].weights == 1


def test_call_that_hangs_is_given_up_before_the_lease_ends() -> None:
    mesh = Mesh(A, lease_s=4.0)
    mesh.run(1.0)
    mesh.publish(target(1))
    mesh.deliver()
    mesh.deliver()
    mesh.calls.clear()
    mesh.run(5.0)
    assert "took too long" in mesh.reports[0].failed[0]
    assert not mesh.engines[A].is_paused


@pytest.mark.parametrize("num_calls", range(5))
def test_publisher_killed_at_any_step_wedges_nobody(num_calls: int) -> None:
    mesh = Mesh(A, lease_s=3.0)
    mesh.run(1.0)
    mesh.publish(target(1))
    while len(mesh.was_called) <= num_calls:
        mesh.deliver()
    mesh.publisher = Publisher(PublisherSettings(lease_s=3.0))
    for queue in (mesh.to_fleet, mesh.to_publisher, mesh.calls):
        queue.clear()
    mesh.run(5.0)
    assert not mesh.engines[A].is_paused
    assert mesh.phase() in (EnginePhase.READY, EnginePhase.JOINING)
    assert mesh.phase() is EnginePhase.JOINING or mesh.engines[A].weights == mesh.policy_version()
    mesh.publish(target(2))
    mesh.run(2.0)
    assert (mesh.phase(), mesh.policy_version()) == (EnginePhase.READY, 2)


def test_newer_target_replaces_one_that_is_on_its_way() -> None:
    mesh = Mesh(A)
    mesh.run(1.0)
    mesh.publish(target(1))
    mesh.deliver()
    mesh.publish(target(2))
    mesh.publish(target(1))
    mesh.run(5.0)
    assert [report.policy_version for report in mesh.reports] == [1, 2]
    assert mesh.reports[1].updated == (A,)
    assert mesh.engines[A].weights == 2


def test_router_that_lost_its_table_is_asked_again() -> None:
    mesh = Mesh(A)
    mesh.run(1.0)
    mesh.publish(target(1))
    mesh.deliver()
    mesh.fleet = Fleet()
    mesh.to_fleet.append(JoinEngine(0, A))
    mesh.run(15.0)
    assert (mesh.phase(), mesh.policy_version()) == (EnginePhase.READY, 1)
    assert mesh.reports


def test_mean_gap_is_the_mean_of_absolute_differences() -> None:
    assert mean_gap((1.0, -1.0), (0.0, 1.0)) == 1.5


@pytest.mark.parametrize("seed", range(60))
def test_random_losses_and_crashes_end_with_every_engine_at_the_newest_version(seed: int) -> None:
    rng = random.Random(seed)
    mesh = Mesh(A, B, lease_s=3.0)
    mesh.deliver()
    policy_version = 0
    for _ in range(12):
        engine = mesh.engines[rng.choice([A, B])]
        act = rng.randrange(5)
        if act == 0:
            engine.restart()
            engine.is_up = not engine.is_up
        elif act == 1:
            engine.broken = rng.choice([None, *UpdatePhase])
        elif act == 2:
            engine.is_idle = not engine.is_idle
        else:
            policy_version += 1
            mesh.publish(target(policy_version))
        mesh.run(rng.choice([0.1, 1.0, 4.0]), rng)
    policy_version += 1
    mesh.publish(target(policy_version))
    for engine in mesh.engines.values():
        engine.is_up, engine.broken, engine.is_idle = True, None, False
    mesh.run(20.0)
    assert [report.policy_version for report in mesh.reports] == list(range(1, policy_version + 1))
    for url, engine in mesh.engines.items():
        assert (mesh.phase(url), mesh.policy_version(url)) == (EnginePhase.READY, policy_version)
        assert engine.weights == policy_version
        assert not engine.is_paused
