"""The names that AReaL's users know, over ours.

    collect_shards, flatten_shard_ids           what a batch holds
    clear_node, clear_fetch_buffer              free it
    storage_stats, fetch_buffer_stats           see that it is free

Owns nothing: each function is a line over the process's plane. Ids travel here, never handles, so
that freeing a batch does not fetch it. What differs from there is said with each. Driven by
training loops that were written against those names.
"""

from collections.abc import Sequence

from rollmesh.tensors.handles import RTensor
from rollmesh.tensors.nested import collect
from rollmesh.tensors.plane import current


def collect_shards(nested: object) -> dict[str, list[int]]:
    """The ids of all shards that `nested` has handles of, by their owners; each once."""
    of_owner: dict[str, dict[int, None]] = {}
    for handle in collect(nested, RTensor):
        of_owner.setdefault(handle.owner, {})[handle.shard_id] = None
    return {owner: list(ids) for owner, ids in of_owner.items()}


def flatten_shard_ids(nested: object) -> list[int]:
    """The same without the owners: flat, in order, each once."""
    return list({handle.shard_id: None for handle in collect(nested, RTensor)})


def clear_node(owner: str, shard_ids: Sequence[int]) -> int:
    """Free shards of `owner`, after the copies here; how many it held. Unlike there a failure is
    raised, as OwnerGone, and not swallowed."""
    return current().clear_at(owner, shard_ids)


def clear_fetch_buffer(shard_ids: Sequence[int] | None = None) -> int:
    """Drop these copies, none for [] and all for None; how many there were."""
    return current().evict(shard_ids)


def storage_stats() -> dict[str, int]:
    """`num_tensors` and `total_bytes` of what this process owns. Unlike there, the bytes are those
    that are held, also of a slice."""
    storage = current().stats().storage
    return _sizes(storage.num_tensors, storage.total_bytes) if storage else _sizes(0, 0)


def fetch_buffer_stats() -> dict[str, int]:
    """`num_tensors` and `total_bytes` of the copies in this process; there, a count alone."""
    buffer = current().stats().buffer
    return _sizes(buffer.num_tensors, buffer.total_bytes) if buffer else _sizes(0, 0)


def _sizes(num_tensors: int, total_bytes: int) -> dict[str, int]:
    return {"num_tensors": num_tensors, "total_bytes": total_bytes}
