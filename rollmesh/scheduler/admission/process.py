"""The admission process: one loop that takes a question, carries it out, and answers.

- Nothing outlives an answer here, so that kill -9 loses at most the question of that moment, which
  its caller asks again with the same key.
- Whatever is asked, the loop continues.
"""

import os
import select
from pathlib import Path

from rollmesh.core.errors import AddressError, RollmeshError, WireError
from rollmesh.core.logs import Occasional, get_logger, setup
from rollmesh.core.process import Ready, Stop, announce
from rollmesh.scheduler.admission.asking import Answer, Question, ask
from rollmesh.scheduler.admission.desk import Desk, Secrets
from rollmesh.scheduler.admission.door import Caller, Door
from rollmesh.wire.frames import Buffer, Packet
from rollmesh.wire.scheduling import AdmissionMessage, SchedulerAnswered
from rollmesh.wire.sockets import Doorbell

log = get_logger()
_strangers = Occasional()

IDLE_S = 1.0


def run(path: Path, scheduler: str, journal: Path, ready_fd: int | None) -> None:
    """Answer at the unix socket `path`, for that scheduler, until SIGTERM or SIGINT.

    Tokens are in the folder of the scheduler's `journal`. AddressError if another process listens
    at `path`.
    """
    try:
        door = Door(path)
    except AddressError as error:
        raise AddressError(f"admission = {error}") from None
    setup("admission", None)
    bell = Doorbell()
    stop = Stop(bell.ring)

    def ask_scheduler(question: Question, patience_s: float) -> Answer:
        return ask(scheduler, question, patience_s=patience_s)

    desk = Desk(ask_scheduler, Secrets(journal))
    announce(ready_fd, Ready("admission", os.getpid(), str(door.path)))
    log.info("admission.started", address=str(door.path), scheduler=scheduler)
    while not stop.is_asked:
        select.select([door.fileno(), bell.fileno()], [], [], IDLE_S)
        bell.hush()
        turn(door, desk)
    door.close()
    log.info("admission.stopped")


def turn(door: Door, desk: Desk) -> None:
    """Answer the callers that wait."""
    for caller in door.callers():
        _serve(caller, desk)


def _serve(caller: Caller, desk: Desk) -> None:
    try:
        packet = caller.question()
    except WireError as error:
        log.debug("question.malformed", why=str(error))
        return
    question = packet.message
    if not isinstance(question, AdmissionMessage):
        return
    if caller.uid in (0, os.geteuid()):
        answer = _tried(desk, question, packet.body, caller.uid)
    else:
        answer = Answer(ok=False, error=f"user {caller.uid} may not ask admission; ask its user")
    kind = type(question).__name__
    is_member = caller.uid in (0, os.geteuid())
    if is_member or (number := _strangers.number(caller.uid)):
        more = {} if is_member else {"number": number}
        log.info("question.answered", kind=kind, uid=caller.uid, error=answer.error, **more)
    told = SchedulerAnswered(question.key, answer.ok, answer.error)
    caller.answer(Packet(told, body=answer.body))


def _tried(desk: Desk, question: AdmissionMessage, body: Buffer, uid: int) -> Answer:
    try:
        return desk.on(question, body, uid)
    except RollmeshError as error:
        return Answer(ok=False, error=str(error))
    except Exception as error:  # door: one question must not end the process
        log.exception("question.failed", kind=type(question).__name__)
        return Answer(ok=False, error=f"admission failed at it: {error!r}")
