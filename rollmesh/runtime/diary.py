"""What a session tells its scribe, and when.

    begun: Asked is put --ended: Answered is put--> written: both are on disk --> the last byte
    left, undelivered: Untaken --delivered--> Untaken no more; both are written if they can be

Owns when what is written. Invariants: `written` returns only once all that was put is on disk, so
what a client has seen whole is never forgotten; what is only told for the books' sake (who did not
take an answer, why a call failed) holds up nobody where the disk is full, and is written later;
without a scribe nothing is told. Driven by session.py.
"""

from rollmesh.runtime.deeds import Answered, Noted, Scribe, Telling, Untaken, answered, asked
from rollmesh.runtime.graph import Sampled
from rollmesh.runtime.holdings import Holdings, Prompt
from rollmesh.runtime.reply import VOID_FINISH, Reply, ReplyState, number_of
from rollmesh.runtime.turns import Turn


class NoDiary:
    """Of a session of which nothing outlives its process."""

    __slots__ = ()

    def check(self) -> None:
        """SessionError 503 or 507 while no call may begin."""

    def telling(self, held: Holdings) -> Telling | None:
        """Before a prompt is held."""

    def begun(
        self, turn: Turn, prompt: Prompt, replies: tuple[Reply, ...], told: Telling | None
    ) -> None:
        """A call has begun; `told` is from before."""

    def ended(self, reply: Reply, sampled: Sampled | None) -> None:
        """A choice has come to its end; void without tokens, nothing of it was sampled."""

    def noted(self, engine_fault: str, spent_because: str) -> None:
        """Why the newest call got no answer, or what limit ended the session."""

    def left(self, reply: Reply) -> None:
        """A connection reads it no more."""

    def delivered(self, reply: Reply) -> None:
        """Its last byte was handed over."""

    async def written(self) -> None:
        """Until all that was put is on disk; SessionError 507 where that does not take it."""


NO_DIARY = NoDiary()


class Diary(NoDiary):
    """One per session that has a scribe."""

    __slots__ = ("_scribe",)

    def __init__(self, scribe: Scribe) -> None:
        self._scribe = scribe

    def check(self) -> None:
        self._scribe.check()

    def telling(self, held: Holdings) -> Telling:
        return Telling(self._scribe, held)

    def begun(
        self, turn: Turn, prompt: Prompt, replies: tuple[Reply, ...], told: Telling | None
    ) -> None:
        assert told is not None
        self._scribe.put(asked(turn, prompt, replies, told))

    def ended(self, reply: Reply, sampled: Sampled | None) -> None:
        if sampled is not None:
            self._scribe.put(answered(reply, sampled))
        else:
            number = number_of(reply)
            self._scribe.put(Answered(number, b"", b"", (), (), VOID_FINISH))

    def noted(self, engine_fault: str, spent_because: str) -> None:
        self._scribe.put(Noted(engine_fault, spent_because))
        self._scribe.be_due()

    def left(self, reply: Reply) -> None:
        if reply.state is ReplyState.COMMITTED and not reply.is_untaken:
            self._mark(reply, is_untaken=True)

    def delivered(self, reply: Reply) -> None:
        if reply.is_untaken:
            self._mark(reply, is_untaken=False)

    def _mark(self, reply: Reply, *, is_untaken: bool) -> None:
        reply.is_untaken = is_untaken
        self._scribe.put(Untaken(number_of(reply), is_untaken))
        self._scribe.be_due()

    async def written(self) -> None:
        await self._scribe.written()
