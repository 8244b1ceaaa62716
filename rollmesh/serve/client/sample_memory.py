"""The memory under a sample's arrays: one piece for each sample, wherever the taker wants it.

    token_ids int32 [T] | logprobs float32 [T] | policy_versions int32 [T] | loss_mask bool [T]

Owns that layout, which is the same in plain memory, in shared memory, and at a rank that fetched
the piece. Invariant: who lays samples gives each its piece, has them all filled once, and then
nobody writes there any more. Driven by samples.py; the trainer's rooms lay them elsewhere.
Shapes: T is the number of tokens of one sample.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from rollmesh.tensors.handles import RTensor

Int32s = npt.NDArray[np.int32]
Float32s = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]

BYTES_PER_TOKEN = 13


class SampleArrays(NamedTuple):
    """Of one sample; each [T]."""

    token_ids: Int32s
    logprobs: Float32s
    policy_versions: Int32s
    loss_mask: Bools


class Laid(NamedTuple):
    """One sample's arrays, filled."""

    arrays: SampleArrays
    handle: RTensor | None = None
    """Of the piece, where other processes may fetch it."""


Fill = Callable[[Sequence[SampleArrays]], None]
"""Writes all elements of all of them."""


class Lay(Protocol):
    """A way to memory."""

    def __call__(self, lengths: Sequence[int], fill: Fill) -> list[Laid]:
        """The arrays of samples of these lengths, which `fill` has filled; where that raises, none
        is left behind."""


def arrays_in(memory: npt.NDArray[np.uint8]) -> SampleArrays:
    """The arrays that lie in a piece, uint8 [13 * T]: views, writable where it is."""
    num_tokens = len(memory) // BYTES_PER_TOKEN
    words = memory[: 12 * num_tokens].reshape(3, 4 * num_tokens)
    token_ids, logprobs, policy_versions = words
    return SampleArrays(
        token_ids.view(np.int32),
        logprobs.view(np.float32),
        policy_versions.view(np.int32),
        memory[12 * num_tokens :].view(np.bool_),
    )


def lay_plainly(lengths: Sequence[int], fill: Fill) -> list[Laid]:
    """In memory of this process alone."""
    arrays = [arrays_in(np.empty(BYTES_PER_TOKEN * each, np.uint8)) for each in lengths]
    fill(arrays)
    return [Laid(each) for each in arrays]
