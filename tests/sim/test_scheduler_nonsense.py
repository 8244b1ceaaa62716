"""Well-formed messages that make no sense are refused or ignored.

Any message of the scheduler with any values is sent among valid ones. After each step the machine
still runs, its messages can be encoded, and no plan has failed; a scheduler restored from its rows
runs too.
"""

import enum
import random
import types
import typing
from collections.abc import Callable

import msgspec
import pytest

from rollmesh.scheduler.planning.policies import make_policy
from rollmesh.scheduler.service.scheduler import FleetScheduler
from rollmesh.scheduler.service.state import JournalTables, SchedulerSettings, WriteRows
from rollmesh.wire.frames import Packet, encode
from rollmesh.wire.machine import Received, Send, Ticked
from rollmesh.wire.messages import AnyMessage
from rollmesh.wire.scheduling import (
    GENERATION_CLUSTER,
    AdmitPipeline,
    CoordinatorHello,
    GpuPriority,
    HooksWired,
    JoinNode,
    PipelineSpec,
    RegisterPipeline,
    RequestGpus,
    SchedulingMessage,
    WorkerPhase,
    WorkerTruth,
)

NUM_STEPS = 120
KINDS = typing.get_args(SchedulingMessage)
TEXTS = ["a", "b", "", "x/y", "n0", "n1", "train", GENERATION_CLUSTER, "release", "a/0", "e\n"]
NUMBERS = [-1, 0, 1, 2, 3, 7, 2**31, 2**63 - 1, -(2**63)]
TIMES = [-1.0, 0.0, 1.0, 1e308, float("inf"), float("nan")]
PLAIN: dict[object, Callable[[random.Random], object]] = {
    str: lambda rng: rng.choice(TEXTS),
    int: lambda rng: rng.choice(NUMBERS),
    float: lambda rng: rng.choice(TIMES),
    bool: lambda rng: rng.random() < 0.5,
    type(None): lambda _: None,
}
SPECS = [
    PipelineSpec(pipeline_id=name, clusters={"train": (0, 1)}, generation=(0, 1, 2, 3))
    for name in "ab"
]


def any_value(kind: typing.Any, rng: random.Random) -> typing.Any:
    """Return a message of this type with any values."""
    if plain := PLAIN.get(kind):
        return plain(rng)
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple:
        return tuple(any_value(inner[0], rng) for _ in range(rng.choice([0, 1, 2, 4])))
    if origin is dict:
        return {any_value(inner[0], rng): any_value(inner[1], rng) for _ in range(rng.randrange(3))}
    if origin in (typing.Union, types.UnionType):
        return any_value(rng.choice(inner), rng)
    if issubclass(kind, enum.Enum):
        return rng.choice(list(kind))
    hints = typing.get_type_hints(kind)
    return kind(**{f.name: any_value(hints[f.name], rng) for f in msgspec.structs.fields(kind)})


def true_message(rng: random.Random) -> AnyMessage:
    """Return valid messages of a fleet of four GPUs and two pipelines."""
    name, key = rng.choice("ab"), str(rng.random())
    asleep = tuple(WorkerTruth(rank, WorkerPhase.ASLEEP, 0) for rank in range(4))
    messages: list[AnyMessage] = [
        JoinNode(key, "n0", 4, (), beats=False),
        RegisterPipeline(key, rng.choice(SPECS)),
        AdmitPipeline(key, name),
        HooksWired(name),
        CoordinatorHello(name, asleep, 1.0),
        RequestGpus(rng.choice(TEXTS), name, "train", GpuPriority.ACTOR_TRAINING),
        RequestGpus(key, name, GENERATION_CLUSTER, GpuPriority.GENERATION, 0, 16),
    ]
    return rng.choice(messages)


@pytest.mark.parametrize("seed", range(30))
def test_messages_that_make_no_sense_break_nothing(seed: int) -> None:
    rng, kept, now_s = random.Random(seed), JournalTables(), 100.0
    scheduler = FleetScheduler(SchedulerSettings(), make_policy("fair"), None, "s0")
    for number in range(NUM_STEPS):
        now_s += rng.choice([0.0, 0.1, 1.0, 5.0, 20.0])
        message = true_message(rng) if rng.random() < 0.5 else any_value(rng.choice(KINDS), rng)
        event = Ticked() if rng.random() < 0.2 else Received(rng.choice([b"x", b"y"]), message)
        for action in scheduler.step(event, now_s):
            if isinstance(action, WriteRows):
                kept.keep(action.rows)
            elif isinstance(action, Send):
                encode(Packet(action.message, "s", action.body))
        assert not list(scheduler.state.problems), scheduler.state.problems
        if number % 40 == 39:
            tables = {table: dict(rows) for table, rows in kept.tables.items()}
            scheduler = FleetScheduler(
                SchedulerSettings(), make_policy("fair"), JournalTables(tables), f"s{number}"
            )
