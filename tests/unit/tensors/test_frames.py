"""Frames between owner and consumer: encoding, and sockets on which they arrive whole and in place.
Stalled and malformed peers are disconnected.
"""

import random
import socket
import threading
import tracemalloc
from collections.abc import Iterator
from functools import partial

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmesh.core.errors import WireError
from rollmesh.tensors.framed_socket import DEAD_S, MAX_BUFFERS, FramedSocket
from rollmesh.tensors.frames import (
    LENGTH_BYTES,
    MAX_HEADER_BYTES,
    MAX_IDS,
    NONCE_BYTES,
    Admitted,
    Answer,
    Clear,
    Cleared,
    Fetch,
    FetchElsewhere,
    FetchForPeer,
    Hello,
    KeyProof,
    Lent,
    Missing,
    Refused,
    Request,
    Returned,
    Sent,
    Welcome,
    decode_answer,
    decode_request,
    frame,
    length_of,
    pack_numbers,
    unpack_numbers,
)

ASKS: list[Request] = [
    Hello(1, b"n" * NONCE_BYTES),
    KeyProof(b"proof"),
    Fetch(b"i" * 8, True, b"r" * 8, True),
    FetchForPeer(b"pack", b"r" * 8),
    Clear(b"i" * 8),
    Returned(b"r" * 8),
]
ANSWERS: list[Answer] = [
    Welcome(1, b"n" * NONCE_BYTES, b"proof"),
    Admitted("boot/1/2", "/dev/shm"),
    Lent(["/dev/shm/a"], b"s" * 8, b"o" * 8, b"n" * 8),
    Sent(b"n" * 8),
    FetchElsewhere("tcp://h:1"),
    Cleared(3),
    Missing(2**64 - 1, "cleared"),
    Refused("why"),
]
NUMBERS = st.lists(st.integers(0, 2**64 - 1), max_size=50)


def header_of(framed: bytes) -> bytes:
    assert length_of(framed[:LENGTH_BYTES]) == len(framed) - LENGTH_BYTES
    return framed[LENGTH_BYTES:]


@pytest.mark.parametrize("ask", ASKS)
def test_a_request_survives_encoding_and_is_no_answer(ask: Request) -> None:
    header = header_of(frame(ask))
    assert decode_request(header) == ask
    with pytest.raises(WireError, match="not an answer"):
        decode_answer(header)


@pytest.mark.parametrize("answer", ANSWERS)
def test_an_answer_survives_encoding_and_is_no_request(answer: Answer) -> None:
    header = header_of(frame(answer))
    assert decode_answer(header) == answer
    with pytest.raises(WireError, match="not an ask"):
        decode_request(header)


def test_a_later_peer_may_append_fields() -> None:
    assert decode_answer(msgspec.msgpack.encode(["cleared", 3, "new"])) == Cleared(3)


def test_an_impossible_header_length_is_refused_before_memory_is_allocated() -> None:
    assert length_of(MAX_HEADER_BYTES.to_bytes(4, "little")) == MAX_HEADER_BYTES
    for length in (MAX_HEADER_BYTES + 1, 2**31, 2**32 - 1):
        with pytest.raises(WireError, match=f"a header of {length} bytes"):
            length_of(length.to_bytes(4, "little"))


def test_the_longest_answer_to_the_longest_request_fits_into_a_header() -> None:
    full = pack_numbers([2**64 - 1] * MAX_IDS)
    assert len(frame(Fetch(full, True, full))) < MAX_HEADER_BYTES
    assert len(frame(Lent(["/dev/shm/" + "x" * 200] * 1024, full, full, full))) < MAX_HEADER_BYTES


@given(NUMBERS)
def test_numbers_survive_as_a_column(numbers: list[int]) -> None:
    assert unpack_numbers(pack_numbers(numbers)) == numbers
    assert len(pack_numbers(numbers)) == 8 * len(numbers)


def test_a_column_that_does_not_divide_is_refused() -> None:
    with pytest.raises(WireError, match="a column of 9 bytes"):
        unpack_numbers(bytes(9))


@given(st.binary(max_size=200))
def test_random_bytes_never_raise_anything_but_a_wire_error(header: bytes) -> None:
    for decode in (decode_request, decode_answer):
        try:
            assert isinstance(decode(header), Request | Answer)
        except WireError:
            continue


@given(st.data())
def test_a_damaged_header_is_a_message_or_a_wire_error(data: st.DataObject) -> None:
    framed = bytearray(frame(data.draw(st.sampled_from([*ASKS, *ANSWERS]))))
    at = data.draw(st.integers(LENGTH_BYTES, len(framed) - 1))
    framed[at] = data.draw(st.integers(0, 255))
    cut = bytes(framed[LENGTH_BYTES : data.draw(st.integers(LENGTH_BYTES, len(framed)))])
    for decode in (decode_request, decode_answer):
        try:
            assert isinstance(decode(cut), Request | Answer)
        except WireError:
            continue


def test_deep_nesting_is_refused() -> None:
    deep = b"\x92\xa5hello" + b"\x91" * 10**5
    with pytest.raises(WireError, match="not an ask"):
        decode_request(deep)


HELLO = frame(Refused("hello"))


@pytest.fixture
def ends() -> Iterator[tuple[FramedSocket, FramedSocket]]:
    """Both ends of a TCP connection on loopback."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        near = socket.create_connection(listening.getsockname())
        far, _ = listening.accept()
    sockets = FramedSocket(near, patience_s=0.05), FramedSocket(far, patience_s=5.0)
    yield sockets
    for framed in sockets:
        framed.close()


def raw(framed: FramedSocket) -> socket.socket:
    return framed._socket  # noqa: SLF001 - malformed bytes bypass the frames


def sent_by(framed: FramedSocket, header: bytes, buffers: list[memoryview]) -> threading.Thread:
    thread = threading.Thread(target=framed.send, args=(header, buffers))
    thread.start()
    return thread


@pytest.mark.parametrize(
    "sizes",
    [
        [],
        [0],
        [1, 0, 7],
        [2**24],
        [16] * (3 * MAX_BUFFERS),
        [0] * (MAX_BUFFERS + 1) + [5],
        [2**20 + 1] * 20,
    ],
)
def test_buffers_arrive_in_their_places(
    ends: tuple[FramedSocket, FramedSocket], sizes: list[int]
) -> None:
    near, far = ends
    near.patience_s = 5.0
    rng = random.Random(1)
    sent = [rng.randbytes(size) for size in sizes]
    thread = sent_by(near, HELLO, [memoryview(each) for each in sent])
    assert decode_answer(far.receive()) == Refused("hello")
    received = [bytearray(size) for size in sizes]
    far.fill([memoryview(each) for each in received])
    thread.join()
    assert received == sent
    assert far.num_received == len(HELLO) + sum(sizes)


def test_received_buffers_may_have_other_sizes_than_the_sent_ones(
    ends: tuple[FramedSocket, FramedSocket],
) -> None:
    near, far = ends
    near.send(b"", [memoryview(bytes(range(100)))])
    received = [bytearray(size) for size in (1, 0, 33, 66)]
    far.fill([memoryview(each) for each in received])
    assert b"".join(received) == bytes(range(100))


@pytest.mark.parametrize("length", [2**23 + 1, 2**31, 2**32 - 1])
def test_a_claimed_length_allocates_no_memory(
    ends: tuple[FramedSocket, FramedSocket], length: int
) -> None:
    near, far = ends
    raw(near).sendall(length.to_bytes(4, "little") + b"x" * 100)
    tracemalloc.start()
    with pytest.raises(WireError, match="a header of"):
        far.receive()
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 2**20


@pytest.mark.parametrize("content", [b"", b"\x05", b"\x05\0\0\0", b"\x05\0\0\0half"])
def test_a_disconnect_within_a_frame_differs_from_a_clean_end(
    ends: tuple[FramedSocket, FramedSocket], content: bytes
) -> None:
    near, far = ends
    raw(near).sendall(content)
    near.cut()
    assert far.wait_for_frame() is bool(content)
    with pytest.raises(ConnectionResetError, match="hung up"):
        far.receive()


@pytest.mark.parametrize("content", [b"", b"\x05", b"\x05\0\0\0half"])
def test_a_peer_that_stops_within_a_frame_is_given_up(
    ends: tuple[FramedSocket, FramedSocket], content: bytes
) -> None:
    near, far = ends
    raw(far).sendall(content)
    with pytest.raises(TimeoutError):
        near.receive()


def test_a_peer_that_drips_is_given_up_at_its_deadline(
    ends: tuple[FramedSocket, FramedSocket],
) -> None:
    near, far = ends
    far.allow(0.1)
    stop = threading.Event()

    def drip() -> None:
        raw(near).send((1000).to_bytes(4, "little"))
        while not stop.wait(0.005):
            raw(near).send(b"x")

    thread = threading.Thread(target=drip)
    thread.start()
    with pytest.raises(TimeoutError):
        far.receive()
    stop.set()
    thread.join()


def test_a_peer_that_does_not_read_is_given_up(ends: tuple[FramedSocket, FramedSocket]) -> None:
    near, _ = ends
    with pytest.raises(TimeoutError):
        near.send(HELLO, [memoryview(bytes(2**20))] * 64)


@pytest.mark.parametrize("piece", [1, 7, 1000])
def test_a_request_is_read_to_its_end_in_pieces_of_any_size(
    ends: tuple[FramedSocket, FramedSocket], piece: int
) -> None:
    near, far = ends
    content = b"GET / HTTP/1.1" + b"x" * 50 + b"\r\n\r\n"
    for at in range(0, len(content), piece):
        raw(near).sendall(content[at : at + piece])
    raw(near).sendall(b"and more")
    assert far.receive_until(b"\r\n\r\n", len(content)) == content


@pytest.mark.parametrize("num_bytes", [100, 101, 1000])
def test_a_request_without_end_is_read_as_far_as_allowed(
    ends: tuple[FramedSocket, FramedSocket], num_bytes: int
) -> None:
    near, far = ends
    raw(near).sendall(b"x" * num_bytes)
    with pytest.raises(WireError, match="no end within 100 bytes"):
        far.receive_until(b"\r\n\r\n", 100)
    assert far.num_received == 100


def test_keepalive_detects_a_dead_machine_and_is_off_within_one_machine(
    ends: tuple[FramedSocket, FramedSocket],
) -> None:
    for framed in ends:
        option = partial(raw(framed).getsockopt, socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        gives_up = partial(raw(framed).getsockopt, socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
        assert (option(), gives_up()) == (1, DEAD_S * 1000)
        framed.share_machine()
        assert (option(), gives_up()) == (0, 0)


def test_a_cut_wakes_waiters_at_both_ends(ends: tuple[FramedSocket, FramedSocket]) -> None:
    near, far = ends
    frames: list[bool] = []
    threads = [
        threading.Thread(target=lambda end=end: frames.append(end.wait_for_frame())) for end in ends
    ]
    for thread in threads:
        thread.start()
    near.cut()
    for thread in threads:
        thread.join()
    assert frames == [False, False]
    far.cut()
    near.cut()


def test_the_end_is_awaited_past_remaining_messages(
    ends: tuple[FramedSocket, FramedSocket],
) -> None:
    near, far = ends
    far.stop_sending()
    assert near.wait_for_frame() is False
    ended = threading.Thread(target=far.wait_for_end)
    ended.start()
    raw(near).sendall(b"x" * 1000)
    assert ended.is_alive()
    near.close()
    ended.join(60.0)
    assert not ended.is_alive()
