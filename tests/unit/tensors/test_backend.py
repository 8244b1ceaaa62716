"""A backend's answer matches the request, or the error names the difference."""

import numpy as np
import pytest

from rollmesh.core.errors import FetchMismatch
from rollmesh.tensors.fetch_buffer import check_fetched
from rollmesh.tensors.handles import Content, RTensor
from tests.unit.tensors.fetches import OWNER, content, handle, handles


def read_only(num_bytes: int) -> np.ndarray:
    data = np.zeros(num_bytes, np.uint8)
    data.flags.writeable = False
    return data


def test_contents_of_their_handles_pass() -> None:
    wanted = [handle(1), handle(2, num_bytes=0), handle(1)]
    check_fetched(wanted, [content(each) for each in wanted])
    with pytest.raises(FetchMismatch):
        check_fetched(wanted, [content(each) for each in reversed(wanted)][1:])


@pytest.mark.parametrize("num_given", [0, 1, 3])
def test_another_number_is_a_mismatch_that_names_both(num_given: int) -> None:
    given = [content(each) for each in handles(1, 2, 3)[:num_given]]
    with pytest.raises(FetchMismatch) as caught:
        check_fetched(handles(1, 2), given)
    assert str(caught.value) == f"2 shards were asked of {OWNER}, {num_given} came"


@pytest.mark.parametrize(
    ("given", "came"),
    [
        (Content("float32", (2, 3), read_only(23)), "float32 [2, 3] of 23 bytes"),
        (Content("float32", (3, 2), read_only(24)), "float32 [3, 2] of 24 bytes"),
        (Content("int32", (2, 3), read_only(24)), "int32 [2, 3] of 24 bytes"),
    ],
)
def test_another_size_shape_or_type_is_a_mismatch_that_names_the_shard(
    given: Content, came: str
) -> None:
    wanted = RTensor(0xAB << 32 | 5, OWNER, 3, "float32", (2, 3), 24)
    with pytest.raises(FetchMismatch) as caught:
        check_fetched([wanted], [given])
    asked = "float32 [2, 3] of 24 bytes"
    assert str(caught.value) == f"shard 0xab00000005 of {OWNER} is {asked}, and {came} came"


def test_a_backend_that_hands_out_what_can_be_written_is_our_mistake() -> None:
    shard = handle(1)
    writable = Content(shard.dtype, shard.shape, np.zeros(shard.num_bytes, np.uint8))
    with pytest.raises(AssertionError, match="read-only"):
        check_fetched([shard], [writable])
