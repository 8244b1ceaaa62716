"""What launch asks a fleet's scheduler: may this run begin.

Owns questions and their answers. Invariants: a complaint names the option or setting and what to
do; nothing is changed there by what is checked, and nobody there is a mistake. Driven by checks.py;
claim.py asks through it.
"""

import time

import msgspec

from rollmesh.core.errors import AddressError, ConfigError
from rollmesh.core.ids import new_id
from rollmesh.core.share import Share
from rollmesh.wire.frames import Buffer, Packet
from rollmesh.wire.keys import check_dial, read_keys
from rollmesh.wire.scheduling import (
    ClaimPipeline,
    PipelineSpec,
    ReadScheduler,
    RunClaim,
    SchedulerAnswered,
)
from rollmesh.wire.sockets import Dialer, wait

ANSWER_S = 10.0
SAY_AGAIN_S = 1.0
DEAD_S = 10.0
"""So long a pipeline may seem to be driven whose coordinator was killed."""
NOT_ADMITTED = "registered"
GOES_ON = (
    "another run has that name and goes on; end it first, or register this one under a name of its "
    "own"
)

Question = ReadScheduler | ClaimPipeline


class Standing(msgspec.Struct):
    """What of a pipeline's view matters here."""

    phase: str
    spec: PipelineSpec
    is_driven: bool = False
    run: RunClaim | None = None


class _View(msgspec.Struct):
    pipelines: tuple[Standing, ...] = ()


def check_share(share: Share, num_engines: int) -> None:
    """UserError where the scheduler does not answer, does not let this pipeline ask, counts on
    other engines than the run has, or where somebody drives it whom nobody can ask."""
    name, end_s = f"--pipeline {share.pipeline_id}", time.monotonic() + DEAD_S
    while (pipeline := look(share)).is_driven and pipeline.run is None:
        if time.monotonic() >= end_s:  # for a moment also where it has just died
            raise ConfigError(f"{name}: {GOES_ON}")
        time.sleep(SAY_AGAIN_S)
    if pipeline.phase == NOT_ADMITTED:
        fix = f"`rollmesh scheduler admit {share.pipeline_id}`"
        raise ConfigError(f"{name}: it is registered and not admitted; {fix} first")
    num_workers = len(pipeline.spec.generation) // pipeline.spec.tp
    if num_workers != num_engines:
        raise ConfigError(
            f"engine.num_embedded, engine.urls: {num_engines} engines where the scheduler has "
            f"{num_workers} generation workers for {share.pipeline_id}; make them as many"
        )


def look(share: Share) -> Standing:
    """How it stands there."""
    told = ask(share, ReadScheduler(new_id("read-"), share.pipeline_id), ANSWER_S)
    if not told:
        raise AddressError(
            f"--scheduler {share.scheduler}: nobody answers there within {ANSWER_S:g} s; "
            "`rollmesh scheduler up` starts one"
        )
    answer, body = told
    if not answer.ok:
        raise ConfigError(f"--pipeline {share.pipeline_id}: {answer.error}")
    [pipeline] = msgspec.json.decode(body, type=_View).pipelines
    return pipeline


def ask(
    share: Share, question: Question, patience_s: float
) -> tuple[SchedulerAnswered, Buffer] | None:
    """What is answered, said again until it is; None where nobody answers in time."""
    check_dial(share.scheduler, keys := read_keys())
    dialer = Dialer(share.scheduler, new_id("launch-"), keys)
    try:
        return _answer(dialer, question, time.monotonic() + patience_s)
    finally:
        dialer.close()


def _answer(
    dialer: Dialer, question: Question, end_s: float
) -> tuple[SchedulerAnswered, Buffer] | None:
    while (left_s := end_s - time.monotonic()) > 0:
        dialer.send(Packet(question))
        wait([dialer], None, min(left_s, SAY_AGAIN_S))
        for packet in dialer.receive():
            message = packet.message
            if isinstance(message, SchedulerAnswered) and message.key == question.key:
                return message, packet.body
    return None
