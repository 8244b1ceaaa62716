"""One consumer at its owner's door: let in, answered, and cleaned up after.

    ARRIVED --admit--> ANSWERED --hangs up, dies, talks nonsense, does not read--> LEFT
                                   LEFT --it holds no loans, or has hung up--> what it held is free

Owns the connection and its thread. Invariants: whatever a consumer says, or leaves unsaid, ends its
own connection at most; what it was lent stays pinned until it says that it is done with it, or its
end of the connection is closed, which its kernel does for the dead; and not before, since one that
was told to go may still be looking. Driven by server.py.
"""

from rollmesh.core.errors import ShardMissing, TensorError, WireError
from rollmesh.core.logs import get_logger
from rollmesh.tensors.frames import (
    MAX_IDS,
    Admitted,
    Ask,
    Clear,
    Cleared,
    Fetch,
    Lent,
    Missing,
    Refused,
    Returned,
    Sent,
    column,
    decode_ask,
    frame,
    numbers_of,
)
from rollmesh.tensors.handshake import admit
from rollmesh.tensors.line import Line, why_lost
from rollmesh.tensors.page import BEGINNING, answer_page
from rollmesh.tensors.store import OwnerStore
from rollmesh.wire.keys import Keys
from rollmesh.wire.sockets import HANDSHAKE_S

log = get_logger()


class Guest:
    """See the module."""

    def __init__(self, name: str, line: Line, store: OwnerStore) -> None:
        """`name` is that under which the store pins what this one is lent."""
        self.name = name
        self._line = line
        self._store = store
        self._num_lent = 0

    def serve(self, keys: Keys | None, admitted: Admitted, token: str) -> None:
        """Until it has left; `token` is what pages ask for. Raises nothing."""
        try:
            self._line.allow(HANDSHAKE_S)
            if self._line.look_ahead() == BEGINNING:
                answer_page(self._line, self._store, token)
                return
            admit(self._line, keys, admitted)
            while self._line.goes_on():
                self._answer(decode_ask(self._line.receive()))
        except (OSError, WireError) as error:
            log.info("guest.lost", guest=self.name, why=why_lost(error))
        except Exception:  # door: what one consumer asks must not end its owner's thread unsaid
            log.exception("guest.failed", guest=self.name)
        finally:
            self._part()

    def cut(self) -> None:
        """It is served no longer; from any thread."""
        self._line.cut()

    def _answer(self, ask: Ask) -> None:
        match ask:
            case Fetch(ids, is_by_memory, returned):
                self._take_back(returned)
                self._give(_ids(ids), is_by_memory)
            case Clear(ids, returned):
                self._take_back(returned)
                self._line.send(frame(Cleared(self._store.clear(_ids(ids)))))
            case Returned(ids):
                self._take_back(ids)
            case _:
                raise WireError(f"{type(ask).__name__} after the handshake")

    def _give(self, ids: list[int], is_by_memory: bool) -> None:
        try:
            if is_by_memory:
                self._lend(ids)
            else:
                self._send(ids)
        except ShardMissing as error:
            self._line.send(frame(Missing(error.shard_id, error.reason)))
        except TensorError as error:
            self._line.send(frame(Refused(str(error))))

    def _lend(self, ids: list[int]) -> None:
        places = self._store.places(ids, self.name)
        if not self._num_lent:
            self._line.share_machine()
        self._num_lent += len(places)
        paths: dict[str, int] = {}
        segments = column([paths.setdefault(each.path, len(paths)) for each in places])
        offsets = column([each.offset for each in places])
        sizes = column([each.num_bytes for each in places])
        self._line.send(frame(Lent([*paths], segments, offsets, sizes)))

    def _send(self, ids: list[int]) -> None:
        sizes, windows = self._store.windows(ids, self.name)
        try:
            self._line.send(frame(Sent(column(sizes))), windows)
        finally:
            self._store.unpin(ids, self.name)

    def _take_back(self, returned: bytes) -> None:
        ids = _ids(returned)
        if ids:
            self._num_lent -= len(ids)
            self._store.unpin(ids, self.name)

    def _part(self) -> None:
        if self._num_lent > 0:
            self._line.stop_sending()
            self._line.wait_for_end()
        self._store.drop_peer(self.name)
        self._line.close()


def _ids(column: bytes) -> list[int]:
    ids = numbers_of(column)
    if len(ids) > MAX_IDS:
        raise WireError(f"{len(ids)} ids in a message; at most {MAX_IDS}")
    return ids
