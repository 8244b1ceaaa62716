"""What launch says to a fleet's scheduler: may this run begin, and later, all of it is gone.

Owns questions and their answers. Invariants: a complaint names the option or setting and what to
do; before a run begins nothing is changed at the scheduler, and nobody there is a mistake; once it
has begun it waits for a scheduler that is gone. GPUs are given back only when nothing of ours can
be on them any more. Driven by checks.py and run.py.
"""

import time
from collections.abc import Sequence

import msgspec

from rollmesh.core.errors import AddressError, ConfigError
from rollmesh.core.ids import new_id
from rollmesh.core.share import Share
from rollmesh.wire.frames import Buffer, Packet
from rollmesh.wire.keys import check_dial, read_keys
from rollmesh.wire.scheduling import (
    AdmitPipeline,
    KillPipeline,
    PipelineSpec,
    ReadScheduler,
    SchedulerAnswered,
)
from rollmesh.wire.sockets import Dialer, wait

ANSWER_S = 10.0
SAY_AGAIN_S = 1.0
DEAD_S = 10.0
"""So long a run that was killed may seem to go on."""
LAST_S = 3.0
"""So long a run that has ended waits to be heard."""
NOT_ADMITTED = "registered"

Question = ReadScheduler | KillPipeline | AdmitPipeline


class _Pipeline(msgspec.Struct):
    """What of a pipeline's view matters here."""

    phase: str
    spec: PipelineSpec
    is_driven: bool = False


class _View(msgspec.Struct):
    pipelines: tuple[_Pipeline, ...] = ()


def check_share(share: Share, num_engines: int) -> None:
    """UserError where the scheduler does not answer, does not let this pipeline ask, counts on
    other engines than the run has, or where another run goes on under its name."""
    name, end_s = f"--pipeline {share.pipeline_id}", time.monotonic() + DEAD_S
    while (pipeline := _looked_at(share)).is_driven:  # for a moment also where that has just died
        if time.monotonic() >= end_s:
            raise ConfigError(
                f"{name}: another run has that name and goes on; end it first, or register this "
                "one under a name of its own"
            )
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


def _looked_at(share: Share) -> _Pipeline:
    """How it stands there."""
    told = _ask(share, [ReadScheduler(new_id("read-"), share.pipeline_id)], ANSWER_S)
    if not told:
        raise AddressError(
            f"--scheduler {share.scheduler}: nobody answers there within {ANSWER_S:g} s; "
            "`rollmesh scheduler up` starts one"
        )
    [(answer, body)] = told
    if not answer.ok:
        raise ConfigError(f"--pipeline {share.pipeline_id}: {answer.error}")
    [pipeline] = msgspec.json.decode(body, type=_View).pipelines
    return pipeline


def give_back(share: Share) -> str:
    """All processes of the run are dead: what its part was is free, and its next life may ask. What
    to do where the scheduler did not hear of it; else ''."""
    told = _ask(
        share,
        [
            KillPipeline(new_id("dead-"), share.pipeline_id),
            AdmitPipeline(new_id("again-"), share.pipeline_id),
        ],
        LAST_S,
    )
    if len(told) == 2 and all(answer.ok for answer, _ in told):
        return ""
    why = next((answer.error for answer, _ in told if answer.error), "it does not answer")
    return (
        f"{share.scheduler} could not be told that {share.pipeline_id} has ended ({why}): "
        f"`rollmesh scheduler kill {share.pipeline_id}` frees its GPUs"
    )


def _ask(
    share: Share, questions: Sequence[Question], patience_s: float
) -> list[tuple[SchedulerAnswered, Buffer]]:
    """What is answered to each, in order, as far as it is in time."""
    check_dial(share.scheduler, keys := read_keys())
    dialer = Dialer(share.scheduler, new_id("launch-"), keys)
    end_s = time.monotonic() + patience_s
    answers = []
    try:
        for question in questions:
            answer = _answer(dialer, question, end_s)
            if answer is None:
                break
            answers.append(answer)
    finally:
        dialer.close()
    return answers


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
