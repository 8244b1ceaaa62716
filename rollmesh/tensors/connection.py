"""A consumer's connection to one owner: one call at a time, and what was lent over it.

    READY --a call--> ASKING --its whole answer came--> READY
                      ASKING --anything else--> ASKING for good: it is to be retired
    READY | ASKING --retire--> RETIRED --the last loan has ended--> closed

Owns the line and the loans. An owner on this machine lends: the answer says where in its memory the
shards lie, and that is looked at in place. Any other sends, and the bytes are received into the
landing. Invariants: an answer belongs to the call, since there is never more than one on the way;
what was lent stays as it is while it is looked at, also beyond the connection's last call, since
the owner takes nothing back before our end of the line is closed. Driven by peer.py, in its lock.
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
from rollmesh.tensors.frames import (
    MAX_IDS,
    Admitted,
    Carry,
    Clear,
    Cleared,
    Elsewhere,
    End,
    Fetch,
    Lent,
    Missing,
    Refused,
    Returned,
    Sent,
    Take,
    Taken,
    column,
    decode_answer,
    frame,
    numbers_of,
)
from rollmesh.tensors.handles import Content, RTensor, pack
from rollmesh.tensors.handshake import introduce, memory_at
from rollmesh.tensors.landing import Landing
from rollmesh.tensors.line import Line
from rollmesh.tensors.loans import Array, Loans
from rollmesh.tensors.segment import SHARED_MEMORY, Attached
from rollmesh.wire.keys import Keys, check_dial

CONNECT_S = 5.0
CARRY_S = 120.0
"""A neighbour is waited for so long: it may be in the midst of a long transfer. Past it the owner
is asked."""
_Kind = TypeVar("_Kind", Lent, Sent, Taken, Cleared)


class Pointed(Exception):
    """The owner has the shards, and `address` is where to get them."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self.address = address


class ConnectionState(enum.StrEnum):
    """See the module."""

    READY = "ready"
    ASKING = "asking"
    RETIRED = "retired"


_lingering: set["Connection"] = set()
"""Retired ones of which something is still lent: nothing else may hold them, and they must not be
closed."""


class Connection:
    """See the module; made by `connect`."""

    def __init__(
        self,
        owner: str,
        line: Line,
        admitted: Admitted,
        landing: Landing,
        on_loan_end: Callable[[], None],
    ) -> None:
        """`on_loan_end`: there is something to tell by `tell_ended`; as Loans has it."""
        self.state = ConnectionState.READY
        self._owner = owner
        self._landing = landing
        self._line = line
        self._folder = admitted.folder
        self._sees_memory = bool(admitted.memory) and admitted.memory == memory_at(admitted.folder)
        self._segments: dict[str, Attached] = {}
        self._on_loan_end = on_loan_end
        self._loans: Loans[int] = Loans(self._loan_ended)
        if self._sees_memory:
            line.share_machine()

    @property
    def num_received(self) -> int:
        """Bytes, so far."""
        return self._line.num_received

    def fetch(self, handles: Sequence[RTensor], may_point: bool = False) -> list[Content]:
        """Their contents, in order. ShardMissing; TensorError where the owner refuses;
        FetchMismatch; OSError and WireError where the line has failed; Pointed, if it may be."""
        ids = column([handle.shard_id for handle in handles])
        if self._sees_memory:
            lent = self._borrow(Fetch(ids, True, self._ended()), handles)
            if lent is not None:
                return lent
        return self._receive(Fetch(ids, False, self._ended(), may_point), handles)

    def fetch_carried(self, handles: Sequence[RTensor]) -> list[Content]:
        """Of a neighbour, what he fetched from another owner; errors as of `fetch`."""
        patience_s, self._line.patience_s = self._line.patience_s, CARRY_S
        try:
            lent = self._borrow(Carry(pack(handles), self._ended()), handles)
        finally:
            self._line.patience_s = patience_s
        if lent is None:
            raise TensorError(f"what {self._owner} lent cannot be seen from here")
        return lent

    def take(self, shard_ids: Sequence[int], step: int) -> None:
        """They are of `step` from now on; errors as of `fetch`."""
        self._ask(Take(column(shard_ids), step, self._ended()), Taken)
        self.state = ConnectionState.READY

    def clear(self, shard_ids: Sequence[int]) -> int:
        """How many of these were there and are freed; errors as of `fetch`."""
        return self._free(Clear(column(shard_ids), self._ended()))

    def end_step(self, step: int) -> int:
        """The same of what `step`, or one before it, took."""
        return self._free(End(step, self._ended()))

    def tell_ended(self) -> None:
        """Say which loans have ended, if any; errors as of `fetch`."""
        while ended := self._ended():
            self.state = ConnectionState.ASKING
            self._line.send(frame(Returned(ended)))
            self.state = ConnectionState.READY

    def settle(self) -> None:
        """The same, and the owner has heard it when this returns."""
        self.tell_ended()
        self.clear(())

    def interrupt(self) -> None:
        """Whoever waits for an answer is told that none comes; from any thread."""
        self._line.stop_receiving()

    def retire(self) -> None:
        """Nothing more is asked. It is closed once nothing is lent any more."""
        self.state = ConnectionState.RETIRED
        self._segments.clear()
        _lingering.add(self)
        self._close_if_done()

    def _borrow(self, ask: Fetch | Carry, handles: Sequence[RTensor]) -> list[Content] | None:
        """None where the memory cannot be seen after all."""
        lent = self._ask(ask, Lent)
        sizes, segments = numbers_of(lent.sizes), numbers_of(lent.segments)
        self._check_sizes(handles, sizes)
        try:
            attached = [self._attach(path) for path in lent.paths]
        except (OSError, ValueError):  # another user's, or there is nothing in it
            self._sees_memory = False
            self._loans.give_back([handle.shard_id for handle in handles])
            self.state = ConnectionState.READY
            return None
        views = [each.view for each in attached]
        places = zip(segments, numbers_of(lent.offsets), sizes, strict=True)
        try:
            arrays = [views[segment](offset, num_bytes) for segment, offset, num_bytes in places]
        except (ValueError, IndexError, OverflowError) as error:
            raise WireError(f"lent what is not there: {error}") from None
        self._loans.lend([handle.shard_id for handle in handles], arrays)
        self.state = ConnectionState.READY
        return _contents(handles, arrays)

    def _receive(self, ask: Fetch, handles: Sequence[RTensor]) -> list[Content]:
        sent = self._ask(ask, Sent)
        self._check_sizes(handles, numbers_of(sent.sizes))
        sizes = [handle.num_bytes for handle in handles]
        arrays = self._landing.receive(sizes, self._line.fill)
        self.state = ConnectionState.READY
        return _contents(handles, arrays)

    def _free(self, ask: Clear | End) -> int:
        answer = self._ask(ask, Cleared)
        self.state = ConnectionState.READY
        return answer.number

    def _ask(self, ask: Fetch | Carry | Take | Clear | End, kind: type[_Kind]) -> _Kind:
        """The answer's header. Whoever has read all of the answer is READY again."""
        self.state = ConnectionState.ASKING
        self._line.send(frame(ask))
        answer = decode_answer(self._line.receive())
        if isinstance(answer, kind):
            return answer
        if isinstance(answer, Missing):
            self.state = ConnectionState.READY
            raise ShardMissing(answer.shard_id, self._owner, answer.reason)
        if isinstance(answer, Elsewhere):
            self.state = ConnectionState.READY
            raise Pointed(answer.address)
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

    def _attach(self, path: str) -> Attached:
        """The segment at `path`, seen from here; OSError where it cannot be."""
        attached = self._segments.get(path)
        if attached is None:
            if path.rpartition("/")[0] not in (self._folder, str(SHARED_MEMORY)):
                raise WireError(f"lent from {path}, where no owner has its memory")
            attached = self._segments[path] = Attached(path)
        return attached

    def _ended(self) -> bytes:
        return column(self._loans.take_ended(MAX_IDS))

    def _loan_ended(self) -> None:
        if self.state is ConnectionState.RETIRED:
            self._close_if_done()
        else:
            self._on_loan_end()

    def _close_if_done(self) -> None:
        # The last loan may end while we retire: both find none, and both may close.
        if not self._loans:
            self._line.close()
            _lingering.discard(self)


def _contents(handles: Sequence[RTensor], arrays: Sequence[Array]) -> list[Content]:
    pairs = zip(handles, arrays, strict=True)
    return [Content(handle.dtype, handle.shape, array) for handle, array in pairs]


def connect(
    owner: str, keys: Keys | None, landing: Landing, relay: str, on_loan_end: Callable[[], None]
) -> Connection:
    """Dial `owner`, tcp://host:port. AddressError where that is no address, needs keys, or has
    others; OSError and WireError where nobody answers there who is an owner."""
    host_port = _parsed(owner)
    check_dial(owner, keys)
    line = Line(socket.create_connection(host_port, CONNECT_S))
    try:
        admitted = introduce(line, owner, keys, relay)
        return Connection(owner, line, admitted, landing, on_loan_end)
    except BaseException:
        line.close()
        raise


def _parsed(owner: str) -> tuple[str, int]:
    try:
        parts = urlsplit(owner)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not owner.startswith("tcp://") or not host or port is None:
        raise AddressError(f"{owner}: not an owner's address; it is written as tcp://host:port")
    return host, port
