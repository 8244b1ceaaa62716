"""What is left when a step has ended, and should not be.

    step <= ended, at an owner    it was to be freed, and is held
    retained                      it was freed, and somebody still looks at it
    buffered, with no call open   a consumer has a copy that nobody will ask for

What no step took is no leak here: leases and `clear_batches` are for that. Invariant: every rank is
looked at, and one that said nothing is named. Pure; driven by controller.py.
"""

from collections.abc import Iterator, Sequence

import msgspec

from rollmesh.tensors.handles import UNTAGGED
from rollmesh.wire.ranks import HeldTensors


class RankTensors(msgspec.Struct, frozen=True):
    """What one process holds; the controller's own is of rank -1."""

    rank: int
    stored: HeldTensors
    buffered: HeldTensors


class Leak(msgspec.Struct, frozen=True):
    """Bytes that should be gone."""

    rank: int
    tag: str
    """`step 7`, `retained`, `buffered of step 7` or `buffered of no step`."""
    num_bytes: int


def leaks(held: Sequence[RankTensors], ended_step: int, num_open: int) -> Iterator[Leak]:
    """All of them; `num_open` calls are under way."""
    for each in held:
        for step, num_bytes in each.stored.bytes_by_step:
            if UNTAGGED < step <= ended_step and num_bytes:
                yield Leak(each.rank, f"step {step}", num_bytes)
        if num_open:
            continue  # who is at work looks at what he is given, and fetches what comes next
        if each.stored.retained_bytes:
            yield Leak(each.rank, "retained", each.stored.retained_bytes)
        for step, num_bytes in each.buffered.bytes_by_step:
            if num_bytes:
                of_step = "no step" if step == UNTAGGED else f"step {step}"
                yield Leak(each.rank, f"buffered of {of_step}", num_bytes)
