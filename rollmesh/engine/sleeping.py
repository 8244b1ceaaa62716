"""The rules of sleep: engines whose memory is given up, since their GPUs may be somebody else's.

    READY, JOINING, FENCED, unknown --Sleep--> ASLEEP --Sleep, by whoever--> ASLEEP, leased anew
    ASLEEP --Wake--> JOINING;  ASLEEP --lease lapsed--> ASLEEP, and says so

Invariants: only a Wake ends a sleep. A lapsed lease means that nobody knows whose the GPUs are, and
that is no reason to serve on them. An engine may sleep before it has ever answered. One that is
being updated is its publisher's until that is done. Driven by fleet.py.
"""

from rollmesh.engine.member import Member
from rollmesh.wire.fleet import EnginePhase, SleepEngine

ASLEEP = "its GPUs are not its own now"
LAPSED = "asleep until it is woken: who put it to sleep is gone"


def put_to_sleep(engine: Member, route: bytes, ask: SleepEngine, now_s: float) -> str:
    """The reason where it is refused, else ''."""
    if engine.row.phase is EnginePhase.UPDATING:
        return f"{ask.url} is being updated; ask again when that is done"
    engine.set(EnginePhase.ASLEEP, ASLEEP)
    engine.holder = route
    engine.until_s = now_s + ask.lease_s
    engine.probe_serial = None
    engine.num_failed_probes = 0
    engine.faults_s.clear()
    return ""


def sleep_on(engine: Member, now_s: float) -> None:
    """Time has passed over an engine that sleeps."""
    if now_s >= engine.until_s:
        engine.holder = b""
        engine.set(EnginePhase.ASLEEP, LAPSED)
