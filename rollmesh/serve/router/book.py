"""The book: every open group, the clients that asked, and short notes of what ended.

Owns the groups' life cycle (drawn in groups.py), the queue, and the letters that one step of the
ledger sends. Invariants: a group is in exactly one place: waiting in the queue, waiting for a
claim, or with a worker; an ended group leaves a note for a few beats and then nothing. Driven by
ledger.py, which sets `now_s` first, and by crew.py.
"""

from collections import Counter, OrderedDict

import msgspec

from rollmesh.core.ids import GroupId
from rollmesh.serve.router.groups import TRANSITIONS, Client, FairQueue, Group
from rollmesh.wire.frames import Buffer
from rollmesh.wire.machine import Send
from rollmesh.wire.messages import AnyMessage, AskGroup, GroupFailed, GroupMoved, GroupState

MAX_NOTES = 8192
"""Notes of ended groups, at most."""


class Note(msgspec.Struct, frozen=True):
    """How a group ended: an ask that knows fewer attempts than this is a late duplicate."""

    answer: GroupMoved | GroupFailed
    num_attempts: int
    until_s: float


class Book:
    """See the module; the attributes are for reading, the methods change them."""

    def __init__(self, note_s: float, now_s: float) -> None:
        self.now_s = now_s
        self.groups: dict[GroupId, Group] = {}
        self.clients: dict[str, Client] = {}
        self.queue = FairQueue()
        self.held: dict[GroupId, Group] = {}
        """Asked again after a restart; they wait for a worker's claim before they queue."""
        self.num_in: Counter[GroupState] = Counter()
        """Groups by state; those that ended count since the start."""
        self.num: Counter[str] = Counter()
        """What happened since the start, by name."""
        self._note_s = note_s
        self._notes: OrderedDict[GroupId, Note] = OrderedDict()
        self._sends: list[Send] = []

    def send(self, route: bytes, message: AnyMessage, body: Buffer = b"") -> None:
        """A letter of this step."""
        self._sends.append(Send(route, message, body))

    def take_sends(self) -> list[Send]:
        """The letters since the last call."""
        sends, self._sends = self._sends, []
        return sends

    def tell_client(self, group: Group, answer: GroupMoved | GroupFailed | None = None) -> None:
        """Say `answer`, or how `group` stands, to whoever asked for it."""
        if client := self.clients.get(group.client_id):
            now = GroupMoved(group.group_id, group.state, group.attempt, group.worker_id)
            self.send(client.route, answer or now)

    def hear_client(self, client_id: str, route: bytes) -> bool:
        """The client lives, at `route`; True if it was not known."""
        client = self.clients.get(client_id)
        if client is None:
            self.clients[client_id] = Client(client_id, route, self.now_s)
            return True
        client.route, client.heard_s = route, self.now_s
        return False

    def open(self, group: Group) -> None:
        """A group begins here, in whatever state it is found."""
        self.groups[group.group_id] = group
        self.num_in[group.state] += 1

    def enter(self, group: Group, state: GroupState) -> None:
        """Change a group's state, and what is counted by it."""
        assert state in TRANSITIONS[group.state], f"{group.state} -> {state}"
        self.num_in[group.state] -= 1
        self.num_in[state] += 1
        group.state = state

    def wait(self, group: Group, first: bool = False) -> None:
        """A QUEUED group stands in the queue from now on."""
        self.held.pop(group.group_id, None)
        self.queue.push(group, first)

    def unwait(self, group: Group) -> None:
        """It waits no longer, neither for its turn nor for a claim."""
        if not self.queue.remove(group):
            self.held.pop(group.group_id, None)

    def end(self, group: Group, answer: GroupMoved | GroupFailed, num_attempts: int) -> None:
        """The group, which no worker has any more, ends as `answer` says."""
        assert not group.worker_id
        self.note(answer, num_attempts)
        self.tell_client(group, answer)
        self.drop(group, answer.state if isinstance(answer, GroupMoved) else GroupState.FAILED)

    def drop(self, group: Group, state: GroupState) -> None:
        """Forget the group without a word."""
        self.unwait(group)
        self.enter(group, state)
        del self.groups[group.group_id]

    def note(self, answer: GroupMoved | GroupFailed, num_attempts: int) -> None:
        """Remember for a while that the group ended."""
        self._notes[answer.group_id] = Note(answer, num_attempts, self.now_s + self._note_s)
        self._notes.move_to_end(answer.group_id)
        if len(self._notes) > MAX_NOTES:
            self._notes.popitem(last=False)

    def has_ended(self, group_id: GroupId) -> bool:
        """Whether there is a note of its end."""
        return group_id in self._notes

    def late_answer(self, ask: AskGroup) -> GroupMoved | GroupFailed | None:
        """The answer to an ask that comes after its group's end; None if it is a new one."""
        note = self._notes.get(ask.group_id)
        return note.answer if note and ask.attempts < note.num_attempts else None

    def tear_old_notes(self) -> None:
        """Forget the notes whose time is over."""
        while self._notes and next(iter(self._notes.values())).until_s <= self.now_s:
            self._notes.popitem(last=False)
