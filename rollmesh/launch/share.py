"""What is asked of a fleet's scheduler before a run begins that has a part in it.

Owns one question and its answer. Invariants: a complaint names the option or setting and what to
do; nothing is changed at the scheduler. Once a run has begun it waits for a scheduler that is gone;
before, nobody there is a mistake. Driven by checks.py.
"""

import time

import msgspec

from rollmesh.core.errors import AddressError, ConfigError
from rollmesh.core.ids import new_id
from rollmesh.core.share import Share
from rollmesh.wire.frames import Buffer, Packet
from rollmesh.wire.keys import check_dial, read_keys
from rollmesh.wire.scheduling import PipelineSpec, ReadScheduler, SchedulerAnswered
from rollmesh.wire.sockets import Dialer, wait

ANSWER_S = 10.0
SAY_AGAIN_S = 1.0
NOT_ADMITTED = "registered"


class _Pipeline(msgspec.Struct):
    """What of a pipeline's view matters here."""

    phase: str
    spec: PipelineSpec


class _View(msgspec.Struct):
    pipelines: tuple[_Pipeline, ...] = ()


def check_share(share: Share, num_engines: int) -> None:
    """UserError where the scheduler does not answer, does not let this pipeline ask, or counts on
    other engines than the run has."""
    check_dial(share.scheduler, keys := read_keys())
    dialer = Dialer(share.scheduler, new_id("check-"), keys)
    try:
        answer, body = _ask(dialer, share)
    finally:
        dialer.close()
    name = f"--pipeline {share.pipeline_id}"
    if not answer.ok:
        raise ConfigError(f"{name}: {answer.error}")
    [pipeline] = msgspec.json.decode(body, type=_View).pipelines
    if pipeline.phase == NOT_ADMITTED:
        fix = f"`rollmesh scheduler admit {share.pipeline_id}`"
        raise ConfigError(f"{name}: it is registered and not admitted; {fix} first")
    num_workers = len(pipeline.spec.generation) // pipeline.spec.tp
    if num_workers != num_engines:
        raise ConfigError(
            f"engine.num_embedded, engine.urls: {num_engines} engines where the scheduler has "
            f"{num_workers} generation workers for {share.pipeline_id}; make them as many"
        )


def _ask(dialer: Dialer, share: Share) -> tuple[SchedulerAnswered, Buffer]:
    question, end_s = ReadScheduler(new_id("read-"), share.pipeline_id), time.monotonic() + ANSWER_S
    while time.monotonic() < end_s:
        dialer.send(Packet(question))
        wait([dialer], None, SAY_AGAIN_S)
        for packet in dialer.receive():
            if isinstance(packet.message, SchedulerAnswered):
                return packet.message, packet.body
    raise AddressError(
        f"--scheduler {share.scheduler}: nobody answers there within {ANSWER_S:g} s; "
        "`rollmesh scheduler up` starts one"
    )
