"""Bodies: what the ends agree on, and one clear error for anything else."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmesh.core.errors import WireError
from rollmesh.core.types import GroupRecord, SamplingPolicy, Task
from rollmesh.wire.bodies import (
    MAX_ASK_BYTES,
    decode_ask,
    decode_record,
    encode_ask,
    encode_record,
)
from rollmesh.wire.messages import GroupAsk


def test_ask_comes_back_as_it_was() -> None:
    ask = GroupAsk(task=Task(id="t", data={"n": 1}), sampling=SamplingPolicy(), seed=2**63 - 1)
    assert decode_ask(encode_ask(ask)) == ask


def test_record_comes_back_as_it_was() -> None:
    record = GroupRecord(task=Task(id="t"), reason="none", is_eval=True)
    assert decode_record(encode_record(record)) == record


@given(st.binary(max_size=64))
def test_garbage_is_a_wire_error(body: bytes) -> None:
    for decode in (decode_ask, decode_record):
        with pytest.raises(WireError):
            decode(body)


def test_a_task_that_no_router_would_take_is_refused_where_it_is_asked_for() -> None:
    task = Task(id="t", data={"text": "x" * MAX_ASK_BYTES})
    with pytest.raises(WireError, match="task 't' has"):
        encode_ask(GroupAsk(task=task, sampling=SamplingPolicy(), seed=0))


@pytest.mark.parametrize("value", [2**70, object(), {1: {2j: 3}}])
def test_a_task_that_cannot_travel_is_named_where_it_is_asked_for(value: object) -> None:
    task = Task(id="t", data={"n": value})
    with pytest.raises(WireError, match="task 't' cannot travel"):
        encode_ask(GroupAsk(task=task, sampling=SamplingPolicy(), seed=0))
