"""A consumer's connection to one owner: one call at a time, and the loans made over it.

    READY --a call--> WAITING --its whole answer arrived--> READY
                      WAITING --anything else--> WAITING for good: it is to be retired
    READY | WAITING --retire--> RETIRED --the last loan has ended--> closed

- An owner on this machine lends: its answer says where in memory the shards are, and they are
  mapped in place. Any other owner sends, into the receive buffer.
- An answer belongs to the current call, since there is never more than one.
- Lent memory does not change while it is in use, even after the last call: the owner takes nothing
  back before this end of the connection is closed.
"""

import enum
import socket
from collections.abc import Callable, Sequence
from typing import TypeVar
from urllib.parse import urlsplit

from rollmesh.core.errors import (
    AddressError,
    FetchMismatch,
    ShardMissing,
    TensorError,
    WireError,
)
from rollmesh.tensors.framed_socket import FramedSocket
from rollmesh.tensors.frames import (
    MAX_IDS,
    Admitted,
    Clear,
    Cleared,
    EndStep,
    Fetch,
    FetchElsewhere,
    FetchForPeer,
    Lent,
    Missing,
    Refused,
    Returned,
    Sent,
    ShardsTaken,
    TakeShards,
    decode_answer,
    frame,
    pack_numbers,
    unpack_numbers,
)
from rollmesh.tensors.handles import Content, RTensor, pack
from rollmesh.tensors.handshake import greet_owner, memory_id
from rollmesh.tensors.receive_buffer import Array, ArrayLoans, ReceiveBuffer
from rollmesh.tensors.segment import SHARED_MEMORY, AttachedSegment
from rollmesh.wire.keys import Keys, check_dial

CONNECT_S = 5.0
RELAYED_FETCH_S = 120.0
"""Timeout of a fetch through a peer, which may be in a long transfer; then the owner is asked."""
_Kind = TypeVar("_Kind", Lent, Sent, ShardsTaken, Cleared)


class Redirected(Exception):
    """The owner has the shards, and `address` is where to fetch them."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self.address = address


class ConnectionState(enum.StrEnum):
    """The states of a connection; drawn in the module's docstring."""

    READY = "ready"
    WAITING = "waiting"
    RETIRED = "retired"


_lingering: set["OwnerConnection"] = set()
"""Retired connections with open loans. Nothing else may refer to them, and they must not be
closed."""


class OwnerConnection:
    """A connection to an owner; made by `connect`."""

    def __init__(
        self,
        owner: str,
        framed: FramedSocket,
        admitted: Admitted,
        receive_buffer: ReceiveBuffer,
        on_loan_end: Callable[[], None],
    ) -> None:
        """`on_loan_end` is called when `report_ended` has something to report; see ArrayLoans."""
        self.state = ConnectionState.READY
        self._owner = owner
        self._receive_buffer = receive_buffer
        self._framed = framed
        self._folder = admitted.folder
        self._sees_memory = bool(admitted.memory) and admitted.memory == memory_id(admitted.folder)
        self._segments: dict[str, AttachedSegment] = {}
        self._on_loan_end = on_loan_end
        self._loans: ArrayLoans[int] = ArrayLoans(self._loan_ended)
        if self._sees_memory:
            framed.share_machine()

    @property
    def num_received(self) -> int:
        """Bytes received so far."""
        return self._framed.num_received

    def fetch(self, handles: Sequence[RTensor], may_redirect: bool = False) -> list[Content]:
        """Return the contents of `handles`, in order.

        Raises ShardMissing; TensorError if the owner refuses; FetchMismatch; OSError or WireError
        if the connection has failed; Redirected if `may_redirect`.
        """
        ids = pack_numbers([handle.shard_id for handle in handles])
        if self._sees_memory:
            lent = self._fetch_lent(Fetch(ids, True, self._ended_loans()), handles)
            if lent is not None:
                return lent
        return self._receive(Fetch(ids, False, self._ended_loans(), may_redirect), handles)

    def fetch_carried(self, handles: Sequence[RTensor]) -> list[Content]:
        """Fetch through a peer what it fetches from another owner; errors as of `fetch`."""
        patience_s, self._framed.patience_s = self._framed.patience_s, RELAYED_FETCH_S
        try:
            lent = self._fetch_lent(FetchForPeer(pack(handles), self._ended_loans()), handles)
        finally:
            self._framed.patience_s = patience_s
        if lent is None:
            raise TensorError(f"what {self._owner} lent cannot be seen from here")
        return lent

    def take(self, shard_ids: Sequence[int], step: int) -> None:
        """Assign the shards to `step`; errors as of `fetch`."""
        self._request(TakeShards(pack_numbers(shard_ids), step, self._ended_loans()), ShardsTaken)
        self.state = ConnectionState.READY

    def clear(self, shard_ids: Sequence[int]) -> int:
        """Free the shards; return how many were held. Errors as of `fetch`."""
        return self._free(Clear(pack_numbers(shard_ids), self._ended_loans()))

    def end_step(self, step: int) -> int:
        """Free what `step`, or one before it, took; return how many. Errors as of `fetch`."""
        return self._free(EndStep(step, self._ended_loans()))

    def report_ended(self) -> None:
        """Report ended loans to the owner, if any; errors as of `fetch`."""
        while ended := self._ended_loans():
            self.state = ConnectionState.WAITING
            self._framed.send(frame(Returned(ended)))
            self.state = ConnectionState.READY

    def settle(self) -> None:
        """Report ended loans, and return when the owner has processed the report."""
        self.report_ended()
        self.clear(())

    def interrupt(self) -> None:
        """Wake the thread that waits for an answer; none will come. From any thread."""
        self._framed.stop_receiving()

    def retire(self) -> None:
        """Make no more calls; close once no loan is open."""
        self.state = ConnectionState.RETIRED
        self._segments.clear()
        _lingering.add(self)
        self._close_if_done()

    def _fetch_lent(
        self, request: Fetch | FetchForPeer, handles: Sequence[RTensor]
    ) -> list[Content] | None:
        """Return None if the lent memory cannot be mapped after all."""
        lent = self._request(request, Lent)
        sizes, segments = unpack_numbers(lent.sizes), unpack_numbers(lent.segments)
        self._check_sizes(handles, sizes)
        try:
            attached = [self._attach(path) for path in lent.paths]
        except (OSError, ValueError):  # another user's memory, or an empty file
            self._sees_memory = False
            self._loans.give_back([handle.shard_id for handle in handles])
            self.state = ConnectionState.READY
            return None
        views = [each.view for each in attached]
        places = zip(segments, unpack_numbers(lent.offsets), sizes, strict=True)
        try:
            arrays = [views[segment](offset, num_bytes) for segment, offset, num_bytes in places]
        except (ValueError, IndexError, OverflowError) as error:
            raise WireError(f"lent what is not there: {error}") from None
        self._loans.lend([handle.shard_id for handle in handles], arrays)
        self.state = ConnectionState.READY
        return _contents(handles, arrays)

    def _receive(self, request: Fetch, handles: Sequence[RTensor]) -> list[Content]:
        sent = self._request(request, Sent)
        self._check_sizes(handles, unpack_numbers(sent.sizes))
        sizes = [handle.num_bytes for handle in handles]
        arrays = self._receive_buffer.receive(sizes, self._framed.fill)
        self.state = ConnectionState.READY
        return _contents(handles, arrays)

    def _free(self, request: Clear | EndStep) -> int:
        answer = self._request(request, Cleared)
        self.state = ConnectionState.READY
        return answer.number

    def _request(
        self, request: Fetch | FetchForPeer | TakeShards | Clear | EndStep, kind: type[_Kind]
    ) -> _Kind:
        """Send a request and return the answer's header; the caller sets READY after reading the
        rest."""
        self.state = ConnectionState.WAITING
        self._framed.send(frame(request))
        answer = decode_answer(self._framed.receive())
        if isinstance(answer, kind):
            return answer
        if isinstance(answer, Missing):
            self.state = ConnectionState.READY
            raise ShardMissing(answer.shard_id, self._owner, answer.reason)
        if isinstance(answer, FetchElsewhere):
            self.state = ConnectionState.READY
            raise Redirected(answer.address)
        if isinstance(answer, Refused):
            self.state = ConnectionState.READY
            raise TensorError(f"{self._owner} refused: {answer.why}")
        raise WireError(f"{type(answer).__name__} where {kind.__name__} belongs")

    def _check_sizes(self, handles: Sequence[RTensor], sizes: list[int]) -> None:
        if len(sizes) != len(handles):
            what = f"{len(handles)} shards were asked of {self._owner}, {len(sizes)} came"
            raise FetchMismatch(what)
        for handle, num_bytes in zip(handles, sizes, strict=True):
            if handle.num_bytes != num_bytes:
                what = f"shard {handle.shard_id:#x} of {self._owner} has {num_bytes} bytes there"
                raise FetchMismatch(f"{what}, and {handle.num_bytes} by its handle")

    def _attach(self, path: str) -> AttachedSegment:
        """Map the segment at `path`; OSError if that fails."""
        attached = self._segments.get(path)
        if attached is None:
            if path.rpartition("/")[0] not in (self._folder, str(SHARED_MEMORY)):
                raise WireError(f"lent from {path}, where no owner has its memory")
            attached = self._segments[path] = AttachedSegment(path)
        return attached

    def _ended_loans(self) -> bytes:
        return pack_numbers(self._loans.take_ended(MAX_IDS))

    def _loan_ended(self) -> None:
        if self.state is ConnectionState.RETIRED:
            self._close_if_done()
        else:
            self._on_loan_end()

    def _close_if_done(self) -> None:
        # The last loan may end during `retire`: both then find none, and both may close.
        if not self._loans:
            self._framed.close()
            _lingering.discard(self)


def _contents(handles: Sequence[RTensor], arrays: Sequence[Array]) -> list[Content]:
    pairs = zip(handles, arrays, strict=True)
    return [Content(handle.dtype, handle.shape, array) for handle, array in pairs]


def connect(
    owner: str,
    keys: Keys | None,
    receive_buffer: ReceiveBuffer,
    relay: str,
    on_loan_end: Callable[[], None],
) -> OwnerConnection:
    """Connect to `owner`, tcp://host:port.

    Raises AddressError if that is no address, needs keys, or has others; OSError or WireError if no
    owner answers there.
    """
    host_port = _parse_address(owner)
    check_dial(owner, keys)
    framed = FramedSocket(socket.create_connection(host_port, CONNECT_S))
    try:
        admitted = greet_owner(framed, owner, keys, relay)
        return OwnerConnection(owner, framed, admitted, receive_buffer, on_loan_end)
    except BaseException:
        framed.close()
        raise


def _parse_address(owner: str) -> tuple[str, int]:
    try:
        parts = urlsplit(owner)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not owner.startswith("tcp://") or not host or port is None:
        raise AddressError(f"{owner}: not an owner's address; it is written as tcp://host:port")
    return host, port
