"""The admission process: one loop that takes a question, does it, and answers.

Owns its Hub. Invariants: nothing outlives an answer here, so that kill -9 loses at most what is
being asked at that moment, which its asker says again; a question that is said twice is done
once, for the scheduler knows its key; whatever is asked, the loop goes on. Driven by
`rollmesh scheduler admission`.
"""

import os
from collections.abc import Iterable, Iterator

from rollmesh.core.errors import AddressError, RollmeshError
from rollmesh.core.logs import get_logger, setup
from rollmesh.core.process import Ready, Stop, announce
from rollmesh.scheduler.admission.asking import Answer, Question, ask
from rollmesh.scheduler.admission.desk import Desk
from rollmesh.wire.frames import Buffer, Packet
from rollmesh.wire.keys import read_keys
from rollmesh.wire.scheduling import AdmissionMessage, SchedulerAnswered
from rollmesh.wire.sockets import MAX_ASK_FRAME_BYTES, Doorbell, Hub, wait

log = get_logger()

IDLE_S = 1.0


def run(bind: str, scheduler: str, ready_fd: int | None) -> None:
    """Answer at `bind`, for the scheduler at that address, until SIGTERM or SIGINT.

    AddressError if `bind` is taken, or can be reached by others without keys.
    """
    try:
        hub = Hub(bind, read_keys(), MAX_ASK_FRAME_BYTES)
    except AddressError as error:
        raise AddressError(f"admission = {error}") from None
    setup("admission", None)
    bell = Doorbell()
    stop = Stop(bell.ring)

    def ask_scheduler(question: Question, patience_s: float) -> Answer:
        return ask(scheduler, question, patience_s=patience_s)

    desk = Desk(ask_scheduler)
    announce(ready_fd, Ready("admission", os.getpid(), hub.address))
    log.info("admission.started", address=hub.address, scheduler=scheduler)
    while not stop.is_asked:
        wait([hub], bell, IDLE_S)
        turn(hub, desk)
    hub.close()
    log.info("admission.stopped")


def turn(hub: Hub, desk: Desk) -> None:
    """Answer what has arrived."""
    for route, packet in answered(hub.receive(), desk):
        hub.send(route, packet)


def answered(heard: Iterable[tuple[bytes, Packet]], desk: Desk) -> Iterator[tuple[bytes, Packet]]:
    """To whom what is said: each key is done once, whoever was made to say it again meanwhile."""
    answers: dict[str, Answer] = {}
    for route, packet in heard:
        question = packet.message
        if not isinstance(question, AdmissionMessage):
            continue
        key = question.key
        if key not in answers:
            answers[key] = _tried(desk, question, packet.body)
            kind = type(question).__name__
            log.info("question.answered", kind=kind, error=answers[key].error)
        answer = answers[key]
        yield route, Packet(SchedulerAnswered(key, answer.ok, answer.error), body=answer.body)


def _tried(desk: Desk, question: AdmissionMessage, body: Buffer) -> Answer:
    try:
        return desk.on(question, body)
    except RollmeshError as error:
        return Answer(ok=False, error=str(error))
    except Exception as error:  # door: one question must not end the process
        log.exception("question.failed", kind=type(question).__name__)
        return Answer(ok=False, error=f"admission failed at it: {error!r}")
