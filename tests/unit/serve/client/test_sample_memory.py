"""A piece of memory holds a sample's four arrays, side by side, whatever its length."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rollmesh.serve.client.samples import (
    BYTES_PER_TOKEN,
    SampleArrays,
    arrays_in,
    lay_plainly,
)

DTYPES = SampleArrays(np.int32, np.float32, np.int32, np.bool_)  # type: ignore[arg-type]


@given(num_tokens=st.integers(0, 100), offset=st.integers(0, 4))
def test_every_byte_of_a_piece_is_of_one_array(num_tokens: int, offset: int) -> None:
    memory = np.zeros(BYTES_PER_TOKEN * num_tokens + 64 * offset, np.uint8)[64 * offset :]
    for array, dtype in zip(arrays_in(memory), DTYPES, strict=True):
        assert (array.dtype, array.shape) == (np.dtype(dtype), (num_tokens,))
        array.view(np.uint8)[:] += 1
    assert memory.tolist() == [1] * len(memory)


def test_who_may_only_look_at_a_piece_may_only_look_at_its_arrays() -> None:
    memory = np.zeros(BYTES_PER_TOKEN * 4, np.uint8)
    memory.flags.writeable = False
    assert not any(array.flags.writeable for array in arrays_in(memory))


def test_plain_memory_is_no_other_samples() -> None:
    def fill(arrays: list[SampleArrays]) -> None:
        for number, each in enumerate(arrays):
            for array in each:
                array[:] = number

    laid = lay_plainly([3, 0, 5], fill)  # type: ignore[arg-type]
    assert [each.handle for each in laid] == [None] * 3
    assert [each.arrays.token_ids.tolist() for each in laid] == [[0] * 3, [], [2] * 5]
    assert [each.arrays.loss_mask.tolist() for each in laid] == [[False] * 3, [], [True] * 5]
