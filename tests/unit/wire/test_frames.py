"""Frames and bodies decode to what was encoded, and anything else is a WireError."""

import math
from array import array

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmesh.core.errors import WireError
from rollmesh.core.ids import GroupId
from rollmesh.core.types import GroupRecord, SamplingPolicy, Task
from rollmesh.wire.frames import (
    MAX_ASK_BYTES,
    MAX_PART_BYTES,
    PROTOCOL,
    Packet,
    decode,
    decode_ask,
    decode_record,
    encode,
    encode_ask,
    encode_record,
)
from rollmesh.wire.messages import ClientLeft, GroupAcked, GroupAsk, GroupFinished, WorkerLeft

ACKED = GroupAcked(GroupId("r1", 2), 1, False)


def header(*parts: object) -> bytes:
    return msgspec.msgpack.encode(parts)


def test_a_packet_decodes_to_itself() -> None:
    ids, logprobs = array("i", [1, -2, 3]), array("f", [0.5])
    message = GroupFinished(GroupId("r1", 2), 1, "w0", True)
    packet = Packet(message, "i1", b"record", (ids.tobytes(), memoryview(logprobs).cast("B")))
    arrived = decode([bytes(frame) for frame in encode(packet)])
    assert (arrived.message, arrived.router, arrived.body) == (message, "i1", b"record")
    assert [array("i", arrived.buffers[0]), array("f", arrived.buffers[1])] == [ids, logprobs]


def test_body_and_buffers_are_not_copied_when_sent() -> None:
    body, buffer = bytearray(b"body"), memoryview(bytes(8))
    frames = encode(Packet(ACKED, body=body, buffers=(buffer,)))
    assert frames[1] is body
    assert frames[2] is buffer


def test_a_long_body_is_split_into_frames_that_every_hub_accepts() -> None:
    body, ids = bytes(range(256)) * 2**15 + b"end", bytes(64 * 2**20)
    frames = encode(Packet(ACKED, "i1", body, (ids, b"short")))
    assert max(map(len, frames)) == MAX_PART_BYTES
    arrived = decode([bytes(frame) for frame in frames])
    assert (arrived.message, arrived.router, arrived.body) == (ACKED, "i1", body)
    assert arrived.buffers == (ids, b"short")


@pytest.mark.parametrize("num_parts", [[0, 2], [-1, 3], [3], [1], [2**62, 1]])
def test_a_wrong_frame_count_is_refused(num_parts: list[int]) -> None:
    with pytest.raises(WireError, match="2 frames where its header counts"):
        decode([header(PROTOCOL, "", ["client_left", "c"], num_parts), b"", b""])


@pytest.mark.parametrize(
    ("frames", "error"),
    [
        ([], "0 frames"),
        ([b""], "1 frames"),
        ([b"", b""], "not a header"),
        ([header(PROTOCOL + 1, "", ["client_hello", "c"]), b""], "protocol 2, this process 1"),
        ([header(PROTOCOL, "", ["no_such_kind", "c"]), b""], "not a header"),
        ([header(PROTOCOL, "", ["client_hello", 7]), b""], "not a header"),
        ([header(PROTOCOL, "", ["client_hello"]), b""], "not a header"),
        ([header(PROTOCOL, "", {}), b""], "not a header"),
        ([b"\x93\x01\xa1\x80\x90", b""], "not a header: 'utf-8'"),
        ([b"\x93\x01\xa0" + b"\x91" * 10**5, b""], "not a header: "),
        (
            [b"\x95\x01\xa0\x92\xabclient_left\xa0\x90" + b"\x91" * 10**5, b""],
            "not a header: .*recursion",
        ),
    ],
)
def test_an_invalid_packet_is_refused_in_one_line(frames: list[bytes], error: str) -> None:
    with pytest.raises(WireError, match=error) as caught:
        decode(frames)
    assert "\n" not in str(caught.value)


def test_a_later_peer_may_append_fields() -> None:
    packet = decode([header(PROTOCOL, "i1", ["client_left", "c", "new", 1]), b""])
    assert packet.message == ClientLeft("c")


@given(st.lists(st.binary(max_size=200), max_size=5))
def test_random_bytes_never_raise_anything_but_a_wire_error(frames: list[bytes]) -> None:
    try:
        packet = decode(frames)
    except WireError:
        return
    assert isinstance(packet, Packet)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=3),
        max_leaves=20,
    )
)
def test_any_value_as_a_message_is_a_packet_or_a_wire_error(value: object) -> None:
    try:
        packet = decode([header(PROTOCOL, "", value), b""])
    except WireError:
        return
    assert isinstance(packet, Packet)


@given(st.data())
def test_a_damaged_header_is_a_packet_or_a_wire_error(data: st.DataObject) -> None:
    good = bytearray(encode(Packet(GroupFinished(GroupId("r1", 2), 1, "w0", True), "i1"))[0])
    at = data.draw(st.integers(0, len(good) - 1))
    good[at] = data.draw(st.integers(0, 255))
    try:
        packet = decode([bytes(good[: data.draw(st.integers(0, len(good)))]), b""])
    except WireError:
        return
    assert isinstance(packet, Packet)


@pytest.mark.parametrize("started_s", [math.inf, -math.inf, math.nan, 1e300])
def test_a_time_that_is_not_finite_does_not_decode(started_s: float) -> None:
    left = WorkerLeft("w0", "drained", 7, started_s)
    with pytest.raises(WireError, match="not a header"):
        decode([bytes(frame) for frame in encode(Packet(left))])


def test_an_ask_decodes_to_itself() -> None:
    ask = GroupAsk(task=Task(id="t", data={"n": 1}), sampling=SamplingPolicy(), seed=2**63 - 1)
    assert decode_ask(encode_ask(ask)) == ask


def test_a_record_decodes_to_itself() -> None:
    record = GroupRecord(task=Task(id="t"), reason="none", is_eval=True)
    assert decode_record(encode_record(record)) == record


@given(st.binary(max_size=64))
def test_garbage_is_a_wire_error(body: bytes) -> None:
    for decode_body in (decode_ask, decode_record):
        with pytest.raises(WireError):
            decode_body(body)


def test_a_task_that_exceeds_the_limit_is_refused_by_the_client() -> None:
    task = Task(id="t", data={"text": "x" * MAX_ASK_BYTES})
    with pytest.raises(WireError, match="task 't' has"):
        encode_ask(GroupAsk(task=task, sampling=SamplingPolicy(), seed=0))


@pytest.mark.parametrize("value", [2**70, object(), {1: {2j: 3}}])
def test_a_task_that_cannot_be_encoded_is_named_by_the_client(value: object) -> None:
    task = Task(id="t", data={"n": value})
    with pytest.raises(WireError, match="task 't' cannot be encoded"):
        encode_ask(GroupAsk(task=task, sampling=SamplingPolicy(), seed=0))
