"""A session's opening and its account as they are filed, and as they come back.

What is long of an account lies in blobs, which the journal has once. Invariant: an account that
comes back is told in the same bytes. Driven by book.py, which files, and by recovery.py.
"""

from collections.abc import Callable

from rollmesh.runtime.blobs import Blob
from rollmesh.runtime.session_deps import locks_of
from rollmesh.runtime.session_log import Text
from rollmesh.serve.interception import capture
from rollmesh.serve.interception.account import Account, Finished, Hole
from rollmesh.serve.interception.archive import entries
from rollmesh.serve.interception.archive.archive import Archive
from rollmesh.serve.interception.pieces import Piece


def opened(new: capture.Opened, metadata: bytes, created_s: float) -> entries.Opened:
    """The first entry of a session."""
    locks = locks_of(new.api_key, new.path_secret)
    session_id = new.captured.session_id
    return entries.Opened(session_id, 0, created_s, locks, metadata, new.seed, new.sampling)


def finish(archive: Archive, captured: capture.CapturedSession, finished: Finished) -> None:
    """File an account; SessionError 507 where the disk does not take it."""
    session_id, account = captured.session_id, finished.account
    contents: set[int] = set()
    archive.due.write()  # before the account has its number, which it would else share

    def text_of(piece: Piece) -> Text:
        if isinstance(piece, bytes):
            return piece
        contents.add(number := archive.name(session_id, piece))
        return number

    inlets = [
        (at, inlet if isinstance(inlet, Hole) else text_of(inlet)) for at, inlet in account.inlets
    ]
    entry = entries.Finished(
        session_id,
        archive.rooms[session_id].next_number,
        finished.outcome,
        text_of(account.text),
        tuple(inlets),
        text_of(account.names),
        account.nodes,
        dict(finished.forks),
        dict(finished.healed),
        finished.fault,
        finished.spent_because,
        captured.num_calls,
    )
    archive.finish(entry, contents)


def finished_again(entry: entries.Finished, blob_of: Callable[[int], Blob]) -> Finished:
    """The account as it was filed."""

    def piece_of(text: Text) -> Piece:
        return text if isinstance(text, bytes) else blob_of(text)

    inlets: list[tuple[int, Hole | Piece]] = [
        (at, inlet if isinstance(inlet, Hole) else piece_of(inlet)) for at, inlet in entry.inlets
    ]
    account = Account(
        entry.session_id, piece_of(entry.text), inlets, piece_of(entry.names), entry.nodes
    )
    return Finished(
        entry.outcome, account, entry.forks, entry.healed, entry.fault, entry.spent_because
    )
