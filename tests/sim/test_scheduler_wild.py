"""Pipelines on one fleet, with operators' actions as well, a full disk, and clocks that jump.

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
WHAT_PEOPLE_DO = {"left", "withdrawn", "drained", "verb_killed", "held_up", "jump", "disk_full"}


class DrainsForGood(PipelineRegistry):
    """The fault: a node that was drained is not used again."""

    def _on_drain(self, name: str, *, is_drained: bool) -> str:
        del is_drained
        return super()._on_drain(name, is_drained=True)


class LosesNodes(FleetScheduler):
    REGISTRY = DrainsForGood


def test_whatever_people_do_all_comes_to_rest_and_no_gpu_has_two_users() -> None:
    seen = collections.Counter[str]()
    for seed in SEEDS:
        seen.update(simulate(seed, WILD).faults)
    assert sorted(WHAT_PEOPLE_DO - seen.keys()) == []


def test_a_scheduler_that_does_not_undo_what_people_do_is_found() -> None:
    assert any("is at work" in outcome(seed, LosesNodes) for seed in range(10))


def outcome(seed: int, kind: type[FleetScheduler]) -> str:
    """The fault that the simulation finds, if any."""
    try:
        simulate(seed, WILD, SchedulerParts(scheduler=kind))
    except AssertionError as error:
        return str(error)
    return ""
