"""The book stays true through seeded chaos, and is empty when all has ended."""

import functools
from collections import Counter

import pytest

from rollmesh.core.ids import GroupId
from rollmesh.wire.frames import Packet, encode
from rollmesh.wire.machine import Received, Ticked
from tests.unit.serve.router.chaos import NUM_GROUPS, Town
from tests.unit.serve.router.vandals import CLIENTS, WORKERS, Vandal

SEEDS = range(40)
VANDAL_SEEDS = range(150)
NUM_EVENTS = 300


@functools.cache
def lived(seed: int) -> Town:
    """A minute of chaos, then two of calm."""
    town = Town(seed)
    town.run(chaos_s=60.0, calm_s=120.0)
    return town


@pytest.mark.parametrize("seed", SEEDS)
def test_every_ask_ends_once_whatever_is_lost_doubled_late_or_dead(seed: int) -> None:
    town = lived(seed)
    assert town.num_asked == NUM_GROUPS
    assert town.open == {}
    assert set(town.ends.values()) == {1}
    assert town.group_scheduler.table.groups == {}
    assert not any(
        GroupId("r1", seq) in town.group_scheduler.table.tombstones for seq in range(NUM_GROUPS)
    )
    assert sum(worker.load for worker in town.group_scheduler.membership.workers) == 0


def test_the_chaos_reaches_every_corner() -> None:
    num: Counter[str] = Counter()
    for seed in SEEDS:
        town = lived(seed)
        num.update(town.group_scheduler.table.num)
        num["lives"] += town.num_restarts
    corners = ("workers_lost", "workers_revived", "requeues", "returns", "claims", "lives")
    assert not [corner for corner in corners if not num[corner]]


def test_whatever_a_peer_says_the_tables_hold() -> None:
    num: Counter[str] = Counter()
    for seed in VANDAL_SEEDS:
        vandal, town = Vandal(seed), Town(seed)
        for _ in range(NUM_EVENTS):
            event: Received | Ticked = Ticked()
            if vandal.rng.random() < 0.25:
                town.now_s += vandal.rng.choice((0.5, 0.5, 0.5, 1.0, 4.0, 30.0))
            else:
                route = vandal.rng.choice((*WORKERS, *CLIENTS, "other")).encode()
                event = Received(route, vandal.message(), b"task")
            for send in town.group_scheduler.step(event, town.now_s):
                encode(Packet(send.message, "i1", send.body))
            town.check()
        num.update(town.group_scheduler.table.num)
    corners = ("workers_lost", "workers_revived", "requeues", "returns", "claims", "refusals")
    assert not [corner for corner in corners if not num[corner]]
