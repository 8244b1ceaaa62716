"""Pipelines on one fleet with operators' actions, a full disk, and clocks that jump.

Operators unregister working pipelines, withdraw requests, drain a node and undo it, and repeat a
command that was killed. A seed that ever failed is kept.
"""

import collections

from rollmesh.scheduler.service.registry import PipelineRegistry
from rollmesh.scheduler.service.scheduler import FleetScheduler
from rollmesh.testing.scheduler_sim.faults import WILD
from rollmesh.testing.scheduler_sim.fleet import simulate
from rollmesh.testing.scheduler_sim.scheduler import SchedulerParts

KEPT_SEEDS = (3013, 3061, 3111)
SEEDS = (*range(20), *KEPT_SEEDS)
OPERATOR_ACTIONS = {"left", "withdrawn", "drained", "verb_killed", "held_up", "jump", "disk_full"}


class DrainsForever(PipelineRegistry):
    """The fault: a node that was drained is not used again."""

    def _on_drain(self, name: str, *, is_drained: bool) -> str:
        del is_drained
        return super()._on_drain(name, is_drained=True)


class LosesNodes(FleetScheduler):
    REGISTRY = DrainsForever


def test_after_any_operator_actions_all_work_ends_and_no_gpu_has_two_users() -> None:
    seen = collections.Counter[str]()
    for seed in SEEDS:
        seen.update(simulate(seed, WILD).faults)
    assert sorted(OPERATOR_ACTIONS - seen.keys()) == []


def test_a_scheduler_that_does_not_undo_a_drain_is_found() -> None:
    assert any("is at work" in outcome(seed, LosesNodes) for seed in range(10))


def outcome(seed: int, kind: type[FleetScheduler]) -> str:
    """Return the fault that the simulation finds, or ''."""
    try:
        simulate(seed, WILD, SchedulerParts(scheduler=kind))
    except AssertionError as error:
        return str(error)
    return ""
