"""Sent or lent shards arrive in place; an answer that no owner can have meant is a typed error."""

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from rollmesh.core.errors import (
    AddressError,
    FetchMismatch,
    MissReason,
    ShardMissing,
    TensorError,
    WireError,
)
from rollmesh.tensors.connection import ConnectionState, OwnerConnection, connect
from rollmesh.tensors.framed_socket import FramedSocket
from rollmesh.tensors.frames import (
    Admitted,
    Answer,
    Clear,
    Cleared,
    Fetch,
    Lent,
    Missing,
    Refused,
    Returned,
    Sent,
    decode_request,
    frame,
    pack_numbers,
    unpack_numbers,
)
from rollmesh.tensors.handshake import memory_id
from rollmesh.tensors.receive_buffer import ReceiveBuffer
from tests.unit.tensors.owners import content_of, handles_of, is_closed_since, opened, scripted

SIZES = [64, 0, 1000]
SEGMENT = bytes(range(256)) * 8


def ignore() -> None:
    """Ignore the ends of loans."""


def receive_request(framed: FramedSocket) -> Fetch | Clear | Returned:
    ask = decode_request(framed.receive())
    assert isinstance(ask, Fetch | Clear | Returned)
    return ask


@contextmanager
def connected(
    script: Callable[[FramedSocket], None], admitted: Admitted | None = None
) -> Iterator[tuple[str, OwnerConnection]]:
    """A connection to a scripted owner, closed after it."""
    with scripted(script, admitted) as owner:
        connection = connect(owner, None, ReceiveBuffer(), "", ignore)
        try:
            yield owner, connection
        finally:
            connection.retire()


def sender(*sizes: int) -> Callable[[FramedSocket], None]:
    """Answer a fetch by content_of(0), content_of(1)... of `sizes`."""

    def script(framed: FramedSocket) -> None:
        ask = receive_request(framed)
        assert isinstance(ask, Fetch)
        assert not ask.is_by_memory
        arrays = [content_of(seed, size).data for seed, size in enumerate(sizes)]
        framed.send(frame(Sent(pack_numbers(sizes))), [array.data for array in arrays])

    return script


class Lender:
    """An owner whose memory is one segment in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "segment"
        self.path.write_bytes(SEGMENT)
        self.admitted = Admitted(memory_id(str(folder)), str(folder))
        self.returned_ids: list[int] = []

    def lend(self, framed: FramedSocket, offsets: list[int], sizes: list[int]) -> None:
        """Answer one fetch by these places."""
        ask = receive_request(framed)
        assert isinstance(ask, Fetch)
        self.returned_ids += unpack_numbers(ask.returned)
        segments = pack_numbers([0] * len(sizes))
        framed.send(
            frame(Lent([str(self.path)], segments, pack_numbers(offsets), pack_numbers(sizes)))
        )


@pytest.fixture
def lender(tmp_path: Path) -> Lender:
    return Lender(tmp_path)


def test_sent_bytes_are_in_their_own_read_only_arrays() -> None:
    with connected(sender(*SIZES)) as (owner, connection):
        contents = connection.fetch(handles_of(owner, SIZES))
        assert connection.state is ConnectionState.READY
    for seed, (content, size) in enumerate(zip(contents, SIZES, strict=True)):
        assert (content.dtype, content.shape) == ("uint8", (size,))
        assert bytes(content.data) == bytes(content_of(seed, size).data)
        assert content.data.base is None  # keeping one array keeps no other
        assert not content.data.flags.writeable


def test_lent_shards_are_viewed_in_the_owners_memory(lender: Lender) -> None:
    def script(framed: FramedSocket) -> None:
        lender.lend(framed, [0, 64, 100], SIZES)

    with connected(script, lender.admitted) as (owner, connection):
        contents = connection.fetch(handles_of(owner, SIZES))
        assert [bytes(each.data) for each in contents] == [
            SEGMENT[offset : offset + size]
            for offset, size in zip([0, 64, 100], SIZES, strict=True)
        ]
        assert not any(each.data.flags.writeable for each in contents)
        with lender.path.open("r+b") as file:
            file.write(b"new")
        assert bytes(contents[0].data[:3]) == b"new"


def test_ended_loans_are_returned_with_the_next_call(lender: Lender) -> None:
    def script(framed: FramedSocket) -> None:
        for _ in range(3):
            lender.lend(framed, [0, 0], [8, 8])
        returned = receive_request(framed)
        assert isinstance(returned, Returned)
        lender.returned_ids += unpack_numbers(returned.ids)
        cleared = receive_request(framed)
        assert isinstance(cleared, Clear)
        lender.returned_ids += unpack_numbers(cleared.returned)
        framed.send(frame(Cleared(2)))

    with connected(script, lender.admitted) as (owner, connection):
        one, other = handles_of(owner, [8, 8])
        first = connection.fetch([one, other])
        second = connection.fetch([one, one])
        assert lender.returned_ids == []
        del first
        third = connection.fetch([one, other])
        assert sorted(lender.returned_ids) == [one.shard_id, other.shard_id]
        del second
        connection.report_ended()
        connection.report_ended()
        del third
        assert connection.clear([one.shard_id, other.shard_id]) == 2
    returned_ids = [one.shard_id] * 4 + [other.shard_id] * 2
    assert sorted(lender.returned_ids) == returned_ids


def test_a_view_of_lent_memory_keeps_the_connection_open(
    lender: Lender,
) -> None:
    events: list[str] = []

    def script(framed: FramedSocket) -> None:
        lender.lend(framed, [0, 8], [8, 8])
        assert not framed.wait_for_frame()
        events.append("the connection ended")

    with scripted(script, lender.admitted) as owner:
        connection = connect(owner, None, ReceiveBuffer(), "", ignore)
        one, other = connection.fetch(handles_of(owner, [8, 8]))
        view = other.data[2:4]
        connection.retire()
        alive = weakref.ref(connection)
        del connection, one, other
        gc.collect()  # only a view refers to it
        assert alive() is not None
        assert bytes(view) == SEGMENT[10:12]
        events.append("the last view was deleted")
        del view
        gc.collect()
        assert alive() is None
    assert events == ["the last view was deleted", "the connection ended"]


def test_if_lent_memory_cannot_be_attached_the_shards_are_sent(lender: Lender) -> None:
    def script(framed: FramedSocket) -> None:
        lender.lend(framed, [0], [8])
        sent = receive_request(framed)
        assert isinstance(sent, Fetch)
        assert not sent.is_by_memory
        lender.returned_ids += unpack_numbers(sent.returned)
        framed.send(frame(Sent(pack_numbers([8]))), [memoryview(b"streamed")])
        sender(8)(framed)

    lender.path.unlink()
    with connected(script, lender.admitted) as (owner, connection):
        handles = handles_of(owner, [8])
        assert bytes(connection.fetch(handles)[0].data) == b"streamed"
        assert lender.returned_ids == [handles[0].shard_id]
        assert len(connection.fetch(handles)) == 1  # the memory is not tried again


def test_memory_of_another_machine_is_not_attached(tmp_path: Path) -> None:
    with connected(sender(8), Admitted("elsewhere", str(tmp_path))) as (owner, connection):
        assert len(connection.fetch(handles_of(owner, [8]))) == 1


@pytest.mark.parametrize("reason", ["cleared", "expired", "owner_restarted", "never_seen"])
def test_a_missing_shard_is_named_and_the_connection_stays(reason: MissReason) -> None:
    def script(framed: FramedSocket) -> None:
        receive_request(framed)
        framed.send(frame(Missing(5, reason)))
        sender(8)(framed)

    with connected(script) as (owner, connection):
        with pytest.raises(ShardMissing) as caught:
            connection.fetch(handles_of(owner, [8]))
        missing = caught.value
        assert (missing.shard_id, missing.owner, missing.reason) == (5, owner, reason)
        assert connection.state is ConnectionState.READY
        assert len(connection.fetch(handles_of(owner, [8]))) == 1


def test_a_refusal_is_returned_and_the_connection_stays() -> None:
    def script(framed: FramedSocket) -> None:
        receive_request(framed)
        framed.send(frame(Refused("not today")))

    with connected(script) as (owner, connection):
        with pytest.raises(TensorError, match=f"{owner} refused: not today"):
            connection.clear([1])
        assert connection.state is ConnectionState.READY


@pytest.mark.parametrize("sizes", [[8, 8], [], [9]])
def test_shards_of_wrong_sizes_are_a_mismatch_and_end_the_connection(
    lender: Lender, sizes: list[int]
) -> None:
    scripts: list[tuple[Callable[[FramedSocket], None], Admitted | None]] = [
        (sender(*sizes), None),
        (lambda framed: lender.lend(framed, [0] * len(sizes), sizes), lender.admitted),
    ]
    for script, admitted in scripts:
        with connected(script, admitted) as (owner, connection):
            with pytest.raises(FetchMismatch):
                connection.fetch(handles_of(owner, [8]))
            assert connection.state is ConnectionState.WAITING


def test_a_handle_that_claims_more_than_the_owner_sends_is_a_mismatch() -> None:
    with connected(sender(8)) as (owner, connection), pytest.raises(FetchMismatch, match="8 bytes"):
        connection.fetch(handles_of(owner, [2**62]))


@pytest.mark.parametrize(
    "answer",
    [
        Sent(pack_numbers([8])),
        Cleared(1),
        Admitted("", ""),
        Lent([], pack_numbers([0]), pack_numbers([0]), pack_numbers([8])),
        Lent(["/etc/passwd"], pack_numbers([0]), pack_numbers([0]), pack_numbers([8])),
        Lent(["{folder}/../segment"], pack_numbers([0]), pack_numbers([0]), pack_numbers([8])),
        Lent(["{folder}/segment"], pack_numbers([1]), pack_numbers([0]), pack_numbers([8])),
        Lent(
            ["{folder}/segment"],
            pack_numbers([0]),
            pack_numbers([len(SEGMENT) - 7]),
            pack_numbers([8]),
        ),
        Lent(["{folder}/segment"], pack_numbers([0]), pack_numbers([2**64 - 1]), pack_numbers([8])),
        Lent(["{folder}/segment"], b"odd", pack_numbers([0]), pack_numbers([8])),
        Lent(["{folder}/segment"], pack_numbers([0]), pack_numbers([0, 0]), pack_numbers([8])),
    ],
)
def test_an_impossible_loan_is_a_wire_error(lender: Lender, answer: Answer) -> None:
    if isinstance(answer, Lent):
        paths = [path.format(folder=lender.path.parent) for path in answer.paths]
        answer = Lent(paths, answer.segments, answer.offsets, answer.sizes)

    def script(framed: FramedSocket) -> None:
        receive_request(framed)
        framed.send(frame(answer))

    with connected(script, lender.admitted) as (owner, connection):
        with pytest.raises(WireError):
            connection.fetch(handles_of(owner, [8]))
        assert connection.state is ConnectionState.WAITING


def test_a_disconnect_within_the_bytes_is_a_connection_error() -> None:
    def script(framed: FramedSocket) -> None:
        receive_request(framed)
        framed.send(frame(Sent(pack_numbers([2**20]))), [memoryview(bytes(2**19))])

    with connected(script) as (owner, connection):
        with pytest.raises(ConnectionResetError):
            connection.fetch(handles_of(owner, [2**20]))
        assert connection.state is ConnectionState.WAITING


def test_many_small_shards_arrive_in_order() -> None:
    sizes = [16 + each % 3 for each in range(3000)]
    with connected(sender(*sizes)) as (owner, connection):
        contents = connection.fetch(handles_of(owner, sizes))
    expected = [content_of(seed, size).data for seed, size in enumerate(sizes)]
    assert all(
        np.array_equal(content.data, data) for content, data in zip(contents, expected, strict=True)
    )


@pytest.mark.parametrize(
    "address",
    ["", "tcp://", "tcp://127.0.0.1", "127.0.0.1:80", "tcp://127.0.0.1:x", "ipc:///tmp/x"],
)
def test_an_invalid_address_is_refused(address: str) -> None:
    with pytest.raises(AddressError, match="tcp://host:port"):
        connect(address, None, ReceiveBuffer(), "", ignore)


def test_another_machine_is_not_dialled_without_keys() -> None:
    with pytest.raises(AddressError, match="need keys"):
        connect("tcp://10.0.0.1:5", None, ReceiveBuffer(), "", ignore)


def test_a_peer_that_is_no_owner_is_recognised_and_leaves_no_descriptor() -> None:
    def script(framed: FramedSocket) -> None:
        assert not framed.wait_for_frame()

    before = opened()
    with scripted(script, Admitted("x" * 2000, "")) as owner, pytest.raises(WireError):
        connect(owner, None, ReceiveBuffer(), "", ignore)
    assert is_closed_since(before)
