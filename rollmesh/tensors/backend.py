"""What brings shards from their owners: the door that each transport keeps to.

Owns the protocol, and the check of what came. Invariants: what passes the check is, for each
handle and in their order, an array of that type, shape and size; a transport that cannot say what
became of a call raises a TensorError, and never gives less in silence. Kept to by peer.py, which is
ours, and by ray_backend.py; driven by the plane, and by the buffer between.
"""

from collections.abc import Sequence
from typing import Protocol

from rollmesh.core.errors import FetchMismatch
from rollmesh.tensors.handles import Content, RTensor


class Backend(Protocol):
    """Any thread may call, several at once."""

    def fetch(self, owner: str, handles: list[RTensor]) -> list[Content]:
        """The contents of some shards of `owner`, in order and read-only; ShardMissing for the
        first that it does not hold, OwnerGone where it does not answer."""

    def take(self, owner: str, shard_ids: list[int], step: int) -> None:
        """Their owner frees them when `step` ends; as OwnerStore's `take`, and OwnerGone where
        nobody knows."""

    def end_step(self, owner: str, step: int) -> int:
        """Free at `owner` what `step`, or one before it, took; how many it held. OwnerGone where
        nobody knows."""

    def clear(self, owner: str, shard_ids: list[int]) -> int:
        """Free them at their owner; how many it held. OwnerGone where nobody knows."""

    def close(self) -> None:
        """End what is open; what was fetched stays valid."""


def check_fetched(handles: Sequence[RTensor], contents: Sequence[Content]) -> None:
    """FetchMismatch unless these are the contents of `handles`."""
    if len(contents) != len(handles):
        what = f"{len(handles)} shards were asked of {_owners(handles)}, {len(contents)} came"
        raise FetchMismatch(what)
    for handle, content in zip(handles, contents, strict=True):
        is_alike = content.shape == handle.shape and content.dtype == handle.dtype
        if not is_alike or content.data.nbytes != handle.num_bytes:
            came = f"{content.dtype} {list(content.shape)} of {content.data.nbytes} bytes came"
            asked = f"{handle.dtype} {list(handle.shape)} of {handle.num_bytes} bytes"
            what = f"shard {handle.shard_id:#x} of {handle.owner} is {asked}, and {came}"
            raise FetchMismatch(what)
        assert not content.data.flags.writeable, "a shard that others see is read-only"


def _owners(handles: Sequence[RTensor]) -> str:
    return ", ".join(sorted({handle.owner for handle in handles}))
