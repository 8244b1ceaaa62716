"""Shards freed wherever they are: at this process, at all ranks, at owners that are neither.

Ids travel, never handles, so nothing is fetched to be freed. Invariants: all ranks are told the
same, whether they own, hold copies or neither; what was not confirmed is asked again, TRIES times
in all, and then told in a warning that says where, never raised and never passed over. Driven by
controller.py.
"""

import concurrent.futures
from array import array
from collections.abc import Iterator
from typing import Any, Protocol

from rollmesh.core.errors import AddressError, TensorError
from rollmesh.core.logs import get_logger
from rollmesh.tensors.compat import collect_shards
from rollmesh.tensors.plane import Plane
from rollmesh.trainer.controller.crew import NO_STEP, Told

log = get_logger()

TRIES = 3


class Ranks(Protocol):
    """What is asked of a hub."""

    def owners(self) -> set[str]:
        """Where ranks serve their tensors."""

    def ask(self, ended_step: int, shard_ids: bytes) -> "concurrent.futures.Future[Told]":
        """All ranks free what is named, and say so."""


def clear_everywhere(plane: Plane, hub: Ranks, targets: Any) -> int:
    """Free the shards of `targets`; how many their owners held. Without any, nobody is asked."""
    of_owner = collect_shards(targets)
    if not of_owner:
        return 0
    shard_ids = [each for ids in of_owner.values() for each in ids]
    num_cleared = plane.clear(shard_ids)
    own = plane.store.owner if plane.store is not None else ""
    for owner in of_owner.keys() - hub.owners() - {own}:
        num_cleared += _clear_at(plane, owner, of_owner[owner])
    unconfirmed: list[tuple[int, str]] = []
    for _ in range(TRIES):
        told = _ask(hub, shard_ids)
        num_cleared += sum(each.num_cleared for each in told.told)
        unconfirmed = list(_unconfirmed(told))
        if not unconfirmed:
            break
    for rank, why in unconfirmed:
        log.warning("tensors.not_cleared", rank=rank, num=len(shard_ids), why=why)
    return num_cleared


def _ask(hub: Ranks, shard_ids: list[int]) -> Told:
    return hub.ask(NO_STEP, array("Q", shard_ids).tobytes()).result()


def _clear_at(plane: Plane, owner: str, shard_ids: list[int]) -> int:
    """At an owner that is no rank of ours."""
    why = ""
    for _ in range(TRIES):
        try:
            return plane.clear_at(owner, shard_ids)
        except (TensorError, AddressError) as error:
            why = str(error)
    log.warning("tensors.not_cleared", owner=owner, num=len(shard_ids), why=why)
    return 0


def _unconfirmed(told: Told) -> Iterator[tuple[int, str]]:
    """Ranks that may still hold something, and why."""
    yield from ((rank, "it did not answer") for rank in told.missing)
    yield from ((each.rank, each.error) for each in told.told if each.error)
