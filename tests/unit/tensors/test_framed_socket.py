"""Frames arrive whole and in place, however the kernel cuts them; stalled or lying peers are cut
off.
"""

import random
import socket
import threading
import tracemalloc
from collections.abc import Iterator
from functools import partial

import pytest

from rollmesh.core.errors import WireError
from rollmesh.tensors.framed_socket import MAX_BUFFERS, FramedSocket
from rollmesh.tensors.frames import Refused, decode_answer, frame
from rollmesh.wire.sockets import DEAD_S

HELLO = frame(Refused("hello"))


@pytest.fixture
def ends() -> Iterator[tuple[FramedSocket, FramedSocket]]:
    """Both ends of a TCP connection on loopback."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        near = socket.create_connection(listening.getsockname())
        far, _ = listening.accept()
    lines = FramedSocket(near, patience_s=0.05), FramedSocket(far, patience_s=5.0)
    yield lines
    for line in lines:
        line.close()


def raw(line: FramedSocket) -> socket.socket:
    return line._socket  # noqa: SLF001 - a vandal's end has no frames


def sent_by(line: FramedSocket, header: bytes, buffers: list[memoryview]) -> threading.Thread:
    thread = threading.Thread(target=line.send, args=(header, buffers))
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
    came = [bytearray(size) for size in sizes]
    far.fill([memoryview(each) for each in came])
    thread.join()
    assert came == sent
    assert far.num_received == len(HELLO) + sum(sizes)


def test_buffers_of_other_sizes_than_they_were_sent_in_are_filled(
    ends: tuple[FramedSocket, FramedSocket],
) -> None:
    near, far = ends
    near.send(b"", [memoryview(bytes(range(100)))])
    came = [bytearray(size) for size in (1, 0, 33, 66)]
    far.fill([memoryview(each) for each in came])
    assert b"".join(came) == bytes(range(100))


@pytest.mark.parametrize("length", [2**23 + 1, 2**31, 2**32 - 1])
def test_no_memory_is_taken_for_a_length_that_is_merely_claimed(
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
def test_a_request_is_heard_to_its_end_however_it_comes(
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


def test_a_machine_that_lost_power_is_noticed_and_a_process_that_was_stopped_is_not_taken_for_dead(
    ends: tuple[FramedSocket, FramedSocket],
) -> None:
    for line in ends:
        option = partial(raw(line).getsockopt, socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        gives_up = partial(raw(line).getsockopt, socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
        assert (option(), gives_up()) == (1, DEAD_S * 1000)
        line.share_machine()
        assert (option(), gives_up()) == (0, 0)


def test_a_cut_wakes_waiters_at_both_ends(ends: tuple[FramedSocket, FramedSocket]) -> None:
    near, far = ends
    heard: list[bool] = []
    threads = [
        threading.Thread(target=lambda end=end: heard.append(end.wait_for_frame())) for end in ends
    ]
    for thread in threads:
        thread.start()
    near.cut()
    for thread in threads:
        thread.join()
    assert heard == [False, False]
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
