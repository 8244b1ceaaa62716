"""Under faults, every pipeline on a shared fleet completes its steps, and nothing is left.

A seed that ever failed is added to KEPT_SEEDS with what it found.
"""

import collections
from typing import Any

import msgspec
import pytest

from rollmesh.scheduler.planning.planner import SchedulingPolicy
from rollmesh.scheduler.service.demands import DemandTracker
from rollmesh.scheduler.service.intents import Intents
from rollmesh.scheduler.service.scheduler import FleetScheduler
from rollmesh.scheduler.service.state import SchedulerSettings, TicketRecord
from rollmesh.scheduler.service.tickets import TicketQueue
from rollmesh.serve.coordinator.claims import ClaimAction, Claims
from rollmesh.serve.coordinator.machine import Coordinator
from rollmesh.testing.scheduler_sim.faults import FleetFaults
from rollmesh.testing.scheduler_sim.fleet import simulate
from rollmesh.testing.scheduler_sim.plans import Boundary, FleetDraw, PipelinePlan, draw
from rollmesh.testing.scheduler_sim.scheduler import SETTINGS, SchedulerParts, quick
from rollmesh.wire.scheduling import (
    GpuPriority,
    PipelineSpec,
    ReportProgress,
    SchedulerHello,
    TicketMoved,
    TicketState,
)

NUM_SEEDS = 100
SEEDS_PER_TEST = 25
KEPT_SEEDS = {
    216: "two that are not preemptible kept engines for which they had no demand, and both waited",
    456: "a late report of a coordinator whose pipeline was killed was believed",
}
DELAYS = FleetFaults(slow=0.5)
"""Any message may take long, and overtake others or be overtaken."""
DEATHS = FleetFaults(slow=0.1, drop=0.05, lost=0.03, cut=0.02, killed_after_write=0.005)
"""Trainers die for good, or are silent for longer than the patience."""


SWITCH_S = 2.5
"""Upper bound of a sleep and a wake in this simulation."""
FAULTS = {
    "drop",
    "duplicate",
    "slow",
    "call_error",
    "freeze",
    "crash",
    "killed",
    "lost",
    "cut",
    "set_back",
    "silent",
    "node_lost",
    "engine_hang",
    "engine_crash",
    "killed_before_write",
    "killed_after_write",
    "scheduler_silent",
    "scheduler_heard",
    "ask_refused",
}
TRANSITIONS = {
    "worker: asleep > waking",
    "worker: waking > awake",
    "worker: awake > sleeping",
    "worker: sleeping > asleep",
    "worker: waking > lost",
    "worker: awake > lost",
    "worker: lost > asleep",
    "pipeline: - > registered",
    "pipeline: registered > admitted",
    "pipeline: admitted > quarantined",
    "pipeline: quarantined > admitted",
    "pipeline: admitted > -",
}


class ForgetsState(FleetScheduler):
    """The fault: each incarnation behaves like the first one (W13)."""

    def __init__(
        self,
        settings: SchedulerSettings,
        policy: SchedulingPolicy,
        _revived: object,
        incarnation: str,
    ) -> None:
        super().__init__(settings, policy, None, incarnation)


class DemandsWithoutWaiting(DemandTracker):
    """The fault: a pipeline that has lost all its engines has to request again (B-13)."""

    def on_report(self, report: ReportProgress) -> None:
        super().on_report(report)
        pipeline = self._state.fleet.pipelines.get(report.pipeline_id)
        if pipeline and pipeline.demand and pipeline.waiting_s is not None:
            self.close(pipeline)


class ForgetsWaiting(FleetScheduler):
    DEMANDS = DemandsWithoutWaiting


class IntentsIgnoringOccupants(Intents):
    """The fault: planned moves are carried out at once, whatever is still running."""

    def drive(self) -> None:
        standing, self._state.occupants = self._state.occupants, {}
        super().drive()
        self._state.occupants = {**standing, **self._state.occupants}


class IgnoresOccupants(FleetScheduler):
    INTENTS = IntentsIgnoringOccupants


class TicketsGrantedAtOnce(TicketQueue):
    """The fault: clear GPUs go to the requester at once, dead or alive."""

    def _offer(self, ticket: TicketRecord) -> None:
        self._grant(ticket)


class TicketsOfferedForever(TicketQueue):
    """The fault: GPUs offered to a dead requester are kept for it."""

    def _expire(self, ticket: TicketRecord) -> None:
        if ticket.state is not TicketState.OFFERED:
            super()._expire(ticket)


class GrantsTheDead(FleetScheduler):
    TICKETS = TicketsGrantedAtOnce


class WaitsForTheDead(FleetScheduler):
    TICKETS = TicketsOfferedForever


class BelievesOffers(Claims):
    """The fault: it computes on GPUs that are only offered."""

    def _on_moved(self, waiting: Any, moved: TicketMoved) -> list[ClaimAction]:
        if moved.state is TicketState.OFFERED:
            moved = msgspec.structs.replace(moved, state=TicketState.GRANTED)
        return super()._on_moved(waiting, moved)


def boundary(num: int, how: Boundary, *, num_steps: int = 5, trains_s: float = 1.0) -> FleetDraw:
    """Return pipelines whose training needs every GPU on which any of them generates."""
    gpus = (0, 1, 2, 3)
    phases = (("actor_train", GpuPriority.ACTOR_TRAINING, trains_s),)
    plans = tuple(
        PipelinePlan(
            spec=PipelineSpec(
                pipeline_id=f"p{index}", clusters={"actor_train": gpus}, generation=gpus
            ),
            num_steps=num_steps,
            phases=phases,
            boundary=how,
        )
        for index in range(num)
    )
    return FleetDraw(policy="fair", num_nodes=1, plans=plans)


class KeepsItsClock(Coordinator):
    """The fault: a process with an earlier clock counts as an earlier process."""

    def _on_scheduler(self, hello: SchedulerHello) -> None:
        super()._on_scheduler(msgspec.structs.replace(hello, newest_s=0.0))


@pytest.fixture(scope="module")
def seen() -> collections.Counter[str]:
    """Faults and transitions of all seeds; filled by the tests before the last one."""
    return collections.Counter()


@pytest.mark.slow
@pytest.mark.parametrize("how", Boundary)
@pytest.mark.parametrize(("num", "seeds"), [(2, (0, 1, 2)), (5, (3,)), (8, (4,))])
def test_an_engine_is_awake_before_the_first_dispatch_after_each_rollout_boundary(
    num: int, seeds: tuple[int, ...], how: Boundary
) -> None:
    for seed in seeds:
        report = simulate(seed, faults=DELAYS, shape=boundary(num, how))
        assert report.num_dispatched == report.num_steps == num * 5
        assert report.num_granted_asleep == 0


@pytest.mark.parametrize("how", Boundary)
def test_a_pipeline_that_ends_early_does_not_block_the_other(how: Boundary) -> None:
    for seed in range(2):
        shape = boundary(2, how)
        first, other = shape.plans
        short = PipelinePlan(
            spec=first.spec, num_steps=2, phases=first.phases, boundary=how, leaves=bool(seed % 2)
        )
        ended = FleetDraw(policy="fair", num_nodes=1, plans=(short, other))
        report = simulate(seed, faults=DELAYS, shape=ended)
        assert report.num_steps == 2 + 5


@pytest.mark.parametrize("broken", [ForgetsState, ForgetsWaiting, IgnoresOccupants])
def test_a_broken_scheduler_is_found(broken: type[FleetScheduler]) -> None:
    assert any(breaks(seed, broken) for seed in range(10))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("broken", "is_found"),
    [(GrantsTheDead, True), (WaitsForTheDead, True), (FleetScheduler, False)],
)
def test_a_trainer_that_died_while_waiting_retains_no_gpus(
    broken: type[FleetScheduler], is_found: bool
) -> None:
    """Its GPUs are free shortly after `patience_s` from its last message: fleet.py checks that."""
    shape = boundary(5, Boundary.CLEARS, num_steps=3, trains_s=6.0)
    seeds = (37, 43, 55, *range(12))  # the first three seeds show the first fault
    outcomes = (outcome(seed, SchedulerParts(scheduler=broken), shape) for seed in seeds)
    assert any("is dead" in each for each in outcomes) is is_found


@pytest.mark.parametrize(("broken", "is_found"), [(BelievesOffers, True), (Claims, False)])
def test_computing_on_offered_gpus_overlaps_another_trainer(
    broken: type[Claims], is_found: bool
) -> None:
    """A trainer was silent for long while another received its grant and sends nothing more."""
    shape = boundary(2, Boundary.CLEARS, num_steps=2, trains_s=2 * SETTINGS.patience_s)
    outcomes = [outcome(seed, SchedulerParts(claims=broken), shape) for seed in range(4)]
    assert any("is used by" in each for each in outcomes) is is_found, outcomes


@pytest.mark.parametrize(
    ("parts", "is_found"),
    [(SchedulerParts(coordinator=KeepsItsClock), True), (SchedulerParts(), False)],
    ids=["keeps its clock", "receives others"],
)
def test_a_clock_that_went_back_silences_no_process(parts: SchedulerParts, is_found: bool) -> None:
    """The next incarnation has an earlier clock, and its state is still the newest."""
    assert any(is_stuck(seed, parts) for seed in range(6)) is is_found


def is_stuck(seed: int, parts: SchedulerParts) -> bool:
    """Return whether any pipeline does not finish."""
    faults = FleetFaults(crash=0.05, set_back=0.5)
    return "is at work" in outcome(seed, parts, boundary(2, Boundary.CLEARS, num_steps=20), faults)


def outcome(
    seed: int, parts: SchedulerParts, shape: FleetDraw, faults: FleetFaults = DEATHS
) -> str:
    """Return the fault that the simulation finds, or ''."""
    try:
        simulate(seed, faults, parts, shape)
    except AssertionError as error:
        return str(error)
    return ""


def breaks(seed: int, kind: type[FleetScheduler]) -> bool:
    try:
        simulate(seed, parts=SchedulerParts(scheduler=kind))
    except AssertionError:
        return True
    return False


def test_no_request_waits_longer_than_the_bound_on_a_perfect_network() -> None:
    """A request is reserved after a time; then it waits for at most two turns of all others,
    with a switch before each.
    """
    reserve_s = quick("fair").reserve_after_s
    for seed in range(20):
        shape = msgspec.structs.replace(draw(seed), policy="fair")
        held_s = sum(seconds for plan in shape.plans for _, _, seconds in plan.phases)
        bound_s = reserve_s + 2 * (held_s + SWITCH_S * len(shape.plans))
        report = simulate(seed, faults=FleetFaults(), shape=shape)
        assert max(report.waits_s.values()) <= bound_s, f"seed {seed}: {report.waits_s}"


def test_a_perfect_network_refuses_no_request_and_restarts_nothing() -> None:
    for seed in range(10):
        report = simulate(seed, faults=FleetFaults())
        assert report.num_incarnations == 1
        assert report.faults["waits_long"] == 0
        assert report.transitions["pipeline: admitted > quarantined"] == 0


def test_same_seed_gives_the_same_run() -> None:
    assert simulate(seed=7) == simulate(seed=7)


@pytest.mark.parametrize("seed", KEPT_SEEDS)
def test_a_kept_seed_completes(seed: int) -> None:
    assert simulate(seed).num_steps > 0


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, NUM_SEEDS, SEEDS_PER_TEST))
def test_every_pipeline_completes_its_steps_under_faults(
    first: int, seen: collections.Counter[str]
) -> None:
    for seed in range(first, first + SEEDS_PER_TEST):
        report = simulate(seed)
        assert report.num_dispatched >= report.num_steps
        seen.update(report.faults)
        seen.update(report.transitions.keys())


@pytest.mark.slow  # needs all seeds
def test_every_fault_and_every_transition_occurred(seen: collections.Counter[str]) -> None:
    assert sorted((FAULTS | TRANSITIONS) - seen.keys()) == []
