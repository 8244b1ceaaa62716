"""What is left of results, found by looking through every object of the process.

Owns the walk: the collector's own list, and what those objects hold that has no cycles and which it
does not list. Under the fixture `young_heap` it sees what was made since the test began. Driven by
tests of what must not be held.
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
"""In each body of the test's, as its task's id."""
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
"""What there is of a result on its way, by type."""
SOON_S = 60.0


def leftovers(*more: type) -> list[Any]:
    """The results, their parts and their bodies; and objects of the types `more`."""
    gc.collect()
    kinds = (*CONSUMED, *more)
    return lying_about(
        lambda each: isinstance(each, kinds) or (type(each) is bytes and MARK in each)
    )


def lying_about(is_wanted: Callable[[Any], bool]) -> list[Any]:
    """All objects that are; also garbage that the collector has not found yet."""
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
    """What an object refers to, also where it keeps that from the collector."""
    held = gc.get_referents(each)
    if isinstance(each, msgspec.Struct):
        held += [getattr(each, name) for name in each.__struct_fields__]
    return held


def assert_none_left(*more: type) -> None:
    """Soon: threads end what they are at, while we look and look again."""
    deadline_s = time.monotonic() + SOON_S
    while found := leftovers(*more):
        if time.monotonic() > deadline_s:
            told = "\n".join(holders(each) for each in found[:8])
            pytest.fail(f"{len(found)} objects of results are left:\n{told}")
        del found


def holders(found: Any, depth: int = 4) -> str:
    """By what an object is reached, a few steps back."""
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
    """Whether we look from there."""
    if isinstance(referrer, types.FrameType):
        return bool(referrer.f_code.co_filename == __file__)
    return isinstance(referrer, list | types.GeneratorType)
