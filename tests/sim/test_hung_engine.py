"""An engine that hangs for a minute delays few pipelines, on a fleet with a healthy network.

Pipeline `ill` has an engine on each GPU of a node; `first` trains on the GPU of the hung engine,
three others train on the others.
"""

import msgspec

from rollmesh.testing.scheduler_sim.faults import FleetFaults
from rollmesh.testing.scheduler_sim.fleet import SharedFleet
from rollmesh.testing.scheduler_sim.plans import Boundary, FleetDraw, PipelinePlan
from rollmesh.testing.scheduler_sim.scheduler import SETTINGS, SchedulerParts
from rollmesh.wire.scheduling import GpuPriority, PipelineSpec

HANGS_AT_S, THAWS_AT_S = 15.0, 75.0
SWITCH_S = 2.5
"""Upper bound of a sleep and a wake in this simulation."""
BOUND_S = SETTINGS.turn_s + SWITCH_S
NUM_SEEDS = 4
NUM_STEPS = 12
UNTURNED = msgspec.structs.replace(SETTINGS, turn_s=SETTINGS.resize_deadline_s)
"""The fault: the next resize waits until the one before has ended (W4)."""


def trainer(gpu: int) -> PipelinePlan:
    """Return a pipeline that trains repeatedly, and generates on a GPU of its own."""
    phases = (("actor_train", GpuPriority.ACTOR_TRAINING, 0.3),)
    name = "first" if gpu == 0 else f"other-{gpu}"
    spec = PipelineSpec(pipeline_id=name, clusters={"actor_train": (gpu,)}, generation=(4 + gpu,))
    return PipelinePlan(spec=spec, num_steps=NUM_STEPS, num_rollouts=2, median_s=1.0, phases=phases)


def longest_waits_s(seed: int, parts: SchedulerParts) -> tuple[float, float]:
    """Return the longest waits for a cluster: that of `first`, and that of the others."""
    spec = PipelineSpec(pipeline_id="ill", clusters={}, generation=(0, 1, 2, 3))
    ill = PipelinePlan(spec=spec, num_steps=8, num_rollouts=64, boundary=Boundary.SIGNALS)
    shape = FleetDraw(policy="fair", num_nodes=2, plans=(ill, *map(trainer, range(4))))
    fleet = SharedFleet(seed, FleetFaults(), shape, parts)
    engine = fleet.tenancies[0].engines[0]
    fleet.kernel.after(HANGS_AT_S, lambda: engine.freeze(THAWS_AT_S))
    fleet.run(THAWS_AT_S + 5.0)
    assert [each.tenant.num_done for each in fleet.tenancies] == [8, *[NUM_STEPS] * 4]
    first, *others = (each.tenant.waits_s["actor_train"] for each in fleet.tenancies[1:])
    return first, max(others)


def test_requests_for_other_engines_wait_at_most_one_turn() -> None:
    for seed in range(NUM_SEEDS):
        first, others = longest_waits_s(seed, SchedulerParts())
        assert others <= BOUND_S, f"seed {seed}"
        assert first > SETTINGS.resize_deadline_s, f"seed {seed}: it did not hang"


def test_without_turns_requests_for_other_engines_wait_longer() -> None:
    waits = [longest_waits_s(seed, SchedulerParts(settings=UNTURNED)) for seed in range(NUM_SEEDS)]
    assert max(others for _, others in waits) > BOUND_S
