"""Find remains of results in every object of the process.

The walk covers the collector's own list, and objects without cycles that it does not list. Under
the fixture `young_heap` it sees objects that were made since the test began.
"""

import gc
import time
import types
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from rollmesh.core.types import GroupRecord, NodeRow, RolloutRecord
from rollmesh.serve.client import arrivals
from rollmesh.serve.client.arrivals import Keep
from rollmesh.serve.client.samples import Cut, Sample
from rollmesh.wire.messages import GroupFinished

MARK = b"what a result's body holds"
"""The task's id in each body of the test."""
CONSUMED = (
    GroupRecord,
    RolloutRecord,
    NodeRow,
    GroupFinished,
    Keep,
    arrivals.RawResult,
    arrivals.StoredResult,
    arrivals.Finished,
    arrivals.Dropped,
    Sample,
    Cut,
)
"""Objects of a result in transit, by type."""
SOON_S = 60.0


def leftovers(*more: type) -> list[Any]:
    """The results, their parts and their bodies; and objects of the types `more`."""
    gc.collect()
    kinds = (*CONSUMED, *more)
    return all_objects(
        lambda each: isinstance(each, kinds) or (type(each) is bytes and MARK in each)
    )


def all_objects(is_wanted: Callable[[Any], bool]) -> list[Any]:
    """All existing objects, including garbage that the collector has not found yet."""
    found, seen = [], set[int]()
    waiting = gc.get_objects()
    for each in waiting:
        if is_wanted(each):
            found.append(each)
        others = [other for other in held_by(each) if not gc.is_tracked(other)]
        waiting += [other for other in others if id(other) not in seen]
        seen.update(map(id, others))
    return found


def held_by(each: Any) -> list[Any]:
    """Objects that an object refers to, including references that it hides from the collector."""
    held = gc.get_referents(each)
    if isinstance(each, msgspec.Struct):
        held += [getattr(each, name) for name in each.__struct_fields__]
    return held


def assert_none_left(*more: type) -> None:
    """Check repeatedly for a while, since threads end their work meanwhile."""
    deadline_s = time.monotonic() + SOON_S
    while found := leftovers(*more):
        if time.monotonic() > deadline_s:
            chains = "\n".join(holders(each) for each in found[:8])
            pytest.fail(f"{len(found)} objects of results are left:\n{chains}")
        del found


def holders(found: Any, depth: int = 4) -> str:
    """The chain of references to an object, a few steps back."""
    steps = [type(found).__qualname__]
    for _ in range(depth):
        others = [each for each in gc.get_referrers(found) if not is_ours(each)]
        if not others:
            break
        found = others[0]
        steps.append(
            f"frame of {found.f_code.co_qualname}"
            if isinstance(found, types.FrameType)
            else f"{type(found).__qualname__} {str(found)[:80]}"
        )
    return " < ".join(steps)


def is_ours(referrer: Any) -> bool:
    """Whether the referrer belongs to this search."""
    if isinstance(referrer, types.FrameType):
        return bool(referrer.f_code.co_filename == __file__)
    return isinstance(referrer, list | types.GeneratorType)
