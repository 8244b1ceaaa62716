"""Writes what one relayed session does into its gateway's journal.

Invariant: what was told is written before the loop has turned again, or its session hears why not;
then it is tried again with the next. Made by capture.py, driven by session.py.
"""

from collections.abc import Callable

from rollmesh.core.errors import SessionError
from rollmesh.serve.interception.journal.gateway_journal import GatewayJournal
from rollmesh.serve.interception.journal.session_writer import SessionTexts
from rollmesh.serve.interception.journal.write_buffer import WriteBuffer
from rollmesh.serve.interception.relay.call import RelayCall
from rollmesh.serve.interception.relay.deeds import Namer, RelayDeed


class RelayScribe(WriteBuffer):
    """One per session."""

    __slots__ = ("_archive", "namer", "on_written")

    def __init__(self, archive: GatewayJournal, session_id: str) -> None:
        super().__init__(session_id, archive.due)
        texts = SessionTexts(archive, session_id)
        self.namer = Namer(texts.text, texts.same)
        self.on_written: Callable[[SessionError | None], None] | None = None
        """The session's, which hears of each try."""
        self._archive = archive

    def check(self) -> None:
        """SessionError 503 or 507 while no call may begin."""
        self._archive.check()

    def ended(self, call: RelayCall) -> None:
        """A call has come to its end."""
        self.tell(self.namer.called(call))

    def tell(self, deed: RelayDeed) -> None:
        """Write this, now or with the next."""
        self.put(deed)
        self.be_due()

    def write(self) -> None:
        """What is due, now."""
        self._archive.due.write()

    def tried(self, failure: SessionError | None) -> None:
        super().tried(failure)
        if self.on_written is not None:
            self.on_written(failure)
