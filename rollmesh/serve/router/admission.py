"""What an ask may say: the limits that hold for each one by itself.

Invariant: whatever a peer says, what is made of it here is within reason, or refused for good; what
is refused for now is the ledger's to say. Driven by ledger.py.
"""

from rollmesh.wire.frames import Buffer
from rollmesh.wire.messages import AskGroup

MAX_SAMPLES = 4096
"""Rollouts of a group: its worker begins all and its sink gets all as one message."""
MAX_QUEUED_BYTES = 512 * 2**20
"""Bodies of waiting asks; past it asks are refused."""


def excused_in(ask: AskGroup) -> int:
    """Attempts that do not count, as far as the client knows."""
    return min(max(ask.excused, 0), max(ask.attempts, 0))


def mistake_in(ask: AskGroup, body: Buffer) -> str:
    """What no router would take; '' if there is nothing."""
    if not 1 <= ask.num_samples <= MAX_SAMPLES:
        few, most = "num_samples must be at least 1", f"and at most {MAX_SAMPLES}"
        return f"{few} {most}, not {ask.num_samples}"
    if not ask.client_id:
        return "it names no client"
    return f"{len(body)} bytes; at most {MAX_QUEUED_BYTES}" if len(body) > MAX_QUEUED_BYTES else ""
