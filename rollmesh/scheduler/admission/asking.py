"""One question to a process that answers by its key: asked again until it has answered.

Owns a Dialer for as long as the question stands. Invariants: every ask here has a key, so that
saying it again is harmless; who does not answer in time is an AddressError that names where.
Driven by the admission process, which asks the scheduler, and by the verbs, which ask both.
"""

import time

import msgspec

from rollmesh.core.errors import AddressError
from rollmesh.core.ids import new_id
from rollmesh.wire.frames import Buffer, Packet
from rollmesh.wire.keys import Role, check_dial, read_scheduler_keys
from rollmesh.wire.scheduling import (
    AdmissionMessage,
    DrainNode,
    JoinNode,
    ReadScheduler,
    SchedulerAnswered,
    UndrainNode,
)
from rollmesh.wire.sockets import Dialer, wait

SAY_AGAIN_S = 0.5
PATIENCE_S = 15.0
"""Longer than the admission process has for the scheduler."""

Question = AdmissionMessage | JoinNode | DrainNode | UndrainNode | ReadScheduler


class Answer(msgspec.Struct, frozen=True):
    """What came of it."""

    ok: bool
    error: str = ""
    body: Buffer = b""


def ask(
    address: str, question: Question, body: Buffer = b"", patience_s: float = PATIENCE_S
) -> Answer:
    """The answer of who serves at `address`; AddressError if there is none in time."""
    keys = read_scheduler_keys(role=Role.OPERATOR)
    check_dial(address, keys)
    dialer = Dialer(address, new_id("ask"), keys)
    try:
        end_s = time.monotonic() + patience_s
        while time.monotonic() < end_s:
            dialer.send(Packet(question, body=body))
            again_s = min(end_s, time.monotonic() + SAY_AGAIN_S)
            while (left_s := again_s - time.monotonic()) > 0:
                wait([dialer], None, left_s)
                for packet in dialer.receive():
                    match packet.message:
                        case SchedulerAnswered(key, ok, error) if key == question.key:
                            return Answer(ok, error, packet.body)
    finally:
        dialer.close()
    raise AddressError(
        f"{address}: nobody answers there within {patience_s:g} s; "
        "does it run, has its disk space, are its address and our keys right?"
    )
