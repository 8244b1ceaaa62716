"""Pipelines on one fleet, with what people do to it as well: and a full disk, and clocks that jump.

People unregister who works, withdraw what they wait for, drain a node and think better of it, and
say a verb anew that was killed. A seed that ever failed is kept.
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
    """What the simulation finds, if anything."""
    try:
        simulate(seed, WILD, SchedulerParts(scheduler=kind))
    except AssertionError as error:
        return str(error)
    return ""
