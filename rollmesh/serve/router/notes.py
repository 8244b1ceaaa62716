"""Short notes of groups that have ended, for what still comes of them.

Invariant: notes are torn after a few beats, those of failures later, and there are MAX_NOTES at
most. Driven by book.py and ledger.py.
"""

import hmac
import sys
from collections import OrderedDict

import msgspec

from rollmesh.core.ids import GroupId
from rollmesh.wire.messages import AskGroup, GroupFailed, GroupMoved

MAX_NOTES = 8192
"""Notes of ended groups, at most."""
FAILURE_NOTES = 20
"""So much longer are failures remembered: one that was lost on its way is asked for again."""
FOR_GOOD = sys.maxsize
"""More attempts than any ask knows of: the group has ended, whatever is said of it."""


class Note(msgspec.Struct, frozen=True):
    """How a group ended: an ask that knows fewer attempts than this is a late duplicate."""

    answer: GroupMoved | GroupFailed
    num_attempts: int
    until_s: float
    ticket: bytes = b""
    """The ticket of the group or of its cancel; b"" if it was not known."""


class Notes:
    """See the module."""

    def __init__(self, note_s: float) -> None:
        self._note_s = note_s
        self._notes: OrderedDict[GroupId, Note] = OrderedDict()

    def __len__(self) -> int:
        return len(self._notes)

    def __contains__(self, group_id: object) -> bool:
        return group_id in self._notes

    def add(
        self,
        answer: GroupMoved | GroupFailed,
        num_attempts: int,
        now_s: float,
        ticket: bytes = b"",
    ) -> None:
        """Remember for a while that the group ended."""
        beats = FAILURE_NOTES if isinstance(answer, GroupFailed) else 1
        until_s = now_s + beats * self._note_s
        self._notes[answer.group_id] = Note(answer, num_attempts, until_s, ticket)
        self._notes.move_to_end(answer.group_id)
        if len(self._notes) > MAX_NOTES:
            self._notes.popitem(last=False)

    def late_answer(self, ask: AskGroup) -> GroupMoved | GroupFailed | None:
        """The answer to an ask that comes after its group's end; None if it is a new one."""
        note = self._notes.get(ask.group_id)
        if note is None or ask.attempts >= note.num_attempts:
            return None
        return note.answer if self.is_theirs(ask.group_id, ask.ticket) else None

    def is_theirs(self, group_id: GroupId, ticket: bytes) -> bool:
        """Whether the note of the group, if there is one, was made under this ticket or none."""
        note = self._notes.get(group_id)
        return not note or not note.ticket or hmac.compare_digest(note.ticket, ticket)

    def reason(self, group_id: GroupId) -> str:
        """Why the group failed; '' if it did not, as far as is remembered."""
        note = self._notes.get(group_id)
        return note.answer.reason if note and isinstance(note.answer, GroupFailed) else ""

    def tear(self, now_s: float) -> None:
        """Forget those whose time is over, as far as they stand before others'."""
        while self._notes and next(iter(self._notes.values())).until_s <= now_s:
            self._notes.popitem(last=False)
