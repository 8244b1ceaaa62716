"""Questions of launch to a fleet's scheduler: whether this run may begin.

- A check changes nothing at the scheduler.
- A scheduler that is not there yet, or has not admitted the pipeline yet, is waited for.
"""

import time
from collections.abc import Callable

import msgspec

from rollmesh.core.errors import AddressError, ConfigError, UserError
from rollmesh.core.ids import new_id
from rollmesh.core.share import Share
from rollmesh.wire.frames import Buffer, Packet
from rollmesh.wire.keys import Role, check_dial, read_scheduler_keys
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


def check_share(
    share: Share, num_engines: int, wait_s: float = 0.0, say: Callable[[str], object] = str
) -> None:
    """Raise UserError if this run cannot begin on the fleet.

    That is so when the scheduler does not answer, or does not admit the pipeline, for `wait_s`
    (`say` gets one line about the wait), counts other engines than the run has, or when another
    process already drives the pipeline.
    """
    name = f"--pipeline {share.pipeline_id}"
    admitted(share, wait_s, say)
    end_s = time.monotonic() + DEAD_S
    while (pipeline := look(share)).is_driven and pipeline.run is None:
        if time.monotonic() >= end_s:  # for a moment also where it has just died
            raise ConfigError(f"{name}: {GOES_ON}")
        time.sleep(SAY_AGAIN_S)
    num_workers = len(pipeline.spec.generation) // pipeline.spec.tp
    if num_workers != num_engines:
        raise ConfigError(
            f"engine.num_embedded, engine.urls: {num_engines} engines where the scheduler has "
            f"{num_workers} generation workers for {share.pipeline_id}; make them as many"
        )


def admitted(share: Share, wait_s: float, say: Callable[[str], object]) -> None:
    """Return once the pipeline is admitted; raise UserError if it is not within `wait_s`."""
    check_dial(share.scheduler, read_scheduler_keys(role=Role.CLIENT))
    end_s, has_said = time.monotonic() + wait_s, False
    while True:
        try:
            return _check_admitted(share)
        except UserError as error:
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                raise
            if not has_said:
                has_said = True
                say(f"{error}; waiting up to {left_s:.0f} s for that")
        time.sleep(SAY_AGAIN_S)


def _check_admitted(share: Share) -> None:
    if look(share).phase == NOT_ADMITTED:
        fix = f"`rollmesh scheduler admit {share.pipeline_id}`"
        raise ConfigError(
            f"--pipeline {share.pipeline_id}: it is registered and not admitted; {fix} first"
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
    check_dial(share.scheduler, keys := read_scheduler_keys(role=Role.CLIENT))
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
