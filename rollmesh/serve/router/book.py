"""The book: every open group, the clients that asked, and short notes of what ended.

Owns the groups' life cycle (drawn in groups.py), the queue, the deadlines, and the letters that one
step of the ledger sends. Invariants: a group is in exactly one place: waiting in the queue, among
the suspects or for a claim, or with a worker; an ended group leaves a note for a few beats and then
nothing. Driven by ledger.py, which sets `now_s` first, by crew.py and by suspects.py.
"""

import heapq
import math
from collections import Counter, OrderedDict

import msgspec

from rollmesh.core.ids import GroupId
from rollmesh.serve.router.groups import TRANSITIONS, Client, FairQueue, Group
from rollmesh.wire.frames import Buffer
from rollmesh.wire.machine import Send
from rollmesh.wire.messages import AnyMessage, AskGroup, GroupFailed, GroupMoved, GroupState

MAX_NOTES = 8192
"""Notes of ended groups, at most."""
FAILURE_NOTES = 20
"""So much longer are failures remembered: one that was lost on its way is asked for again."""
SPARE_DEADLINES = 1024
"""Deadlines of ended groups that may still stand in the agenda."""


class Note(msgspec.Struct, frozen=True, gc=False):
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
        self.suspects: dict[GroupId, Group] = {}
        """They wait for a worker that runs no other suspect."""
        self.num_waiting_bytes = 0
        """Of the bodies of all that wait."""
        self.of_client: dict[str, dict[GroupId, Group]] = {}
        self.num_in: Counter[GroupState] = Counter()
        """Groups by state; those that ended count since the start."""
        self.num: Counter[str] = Counter()
        """What happened since the start, by name."""
        self._note_s = note_s
        self._notes: OrderedDict[GroupId, Note] = OrderedDict()
        self._sends: list[Send] = []
        self._deadlines: list[tuple[float, int, Group]] = []
        self._num_deadlines = 0

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

    def weight_of(self, client_id: str) -> int:
        """How many turns it has in a row."""
        client = self.clients.get(client_id)
        return client.weight if client else 1

    def open(self, group: Group) -> None:
        """A group begins here, in whatever state it is found."""
        self.groups[group.group_id] = group
        self.num_in[group.state] += 1
        self.set_client(group, group.client_id)

    def set_client(self, group: Group, client_id: str) -> None:
        """Whose group it is; '' is nobody's."""
        self._leave_client(group)
        group.client_id = client_id
        if client_id:
            self.of_client.setdefault(client_id, {})[group.group_id] = group

    def set_deadline(self, group: Group, deadline_s: float) -> None:
        """It has `deadline_s` from now, and never more than was said before; 0 says nothing."""
        ends_s = self.now_s + deadline_s
        # Also false where it is not a number.
        if deadline_s <= 0 or not ends_s < group.ends_s:
            return
        group.ends_s = ends_s
        self._num_deadlines += 1
        heapq.heappush(self._deadlines, (ends_s, self._num_deadlines, group))
        if len(self._deadlines) > SPARE_DEADLINES + 2 * len(self.groups):
            self._deadlines = [each for each in self._deadlines if self._is_due_at(*each)]
            heapq.heapify(self._deadlines)

    def take_overdue(self) -> list[Group]:
        """The open groups whose deadline has passed since the last call."""
        overdue = []
        while self._deadlines and self._deadlines[0][0] <= self.now_s:
            entry = heapq.heappop(self._deadlines)
            if self._is_due_at(*entry):
                overdue.append(entry[2])
        return overdue

    def deadline_left_s(self, group: Group) -> float:
        """As messages say it: what is left, or 0 where there is no limit."""
        return 0.0 if group.ends_s == math.inf else max(group.ends_s - self.now_s, 0.001)

    def enter(self, group: Group, state: GroupState) -> None:
        """Change a group's state, and what is counted by it."""
        assert state in TRANSITIONS[group.state], f"{group.state} -> {state}"
        self.num_in[group.state] -= 1
        self.num_in[state] += 1
        group.state = state

    @property
    def num_waiting(self) -> int:
        """Groups in the queue, among the suspects, or waiting for a claim."""
        return len(self.queue) + len(self.suspects) + len(self.held)

    def hold(self, group: Group) -> None:
        """A QUEUED group waits for a worker's claim."""
        self.held[group.group_id] = group
        self.num_waiting_bytes += len(group.body)

    def wait(self, group: Group, first: bool = False) -> None:
        """A QUEUED group waits for its turn from now on, and a suspect for a worker of its own."""
        self.unwait(group)
        group.queued_s = self.now_s
        self.num_waiting_bytes += len(group.body)
        if group.deaths:
            self.suspects[group.group_id] = group
        else:
            self.queue.push(group, first)

    def take(self, group: Group) -> None:
        """The head of the queue gets its turn."""
        self.queue.take(group, self.weight_of(group.client_id))
        self.num_waiting_bytes -= len(group.body)

    def unwait(self, group: Group) -> None:
        """It waits no longer, neither for its turn nor for a claim."""
        apart = self.suspects.pop(group.group_id, None) or self.held.pop(group.group_id, None)
        if apart or self.queue.remove(group):
            self.num_waiting_bytes -= len(group.body)

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
        self._leave_client(group)
        del self.groups[group.group_id]

    def note(self, answer: GroupMoved | GroupFailed, num_attempts: int) -> None:
        """Remember for a while that the group ended."""
        beats = FAILURE_NOTES if isinstance(answer, GroupFailed) else 1
        until_s = self.now_s + beats * self._note_s
        self._notes[answer.group_id] = Note(answer, num_attempts, until_s)
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

    def _leave_client(self, group: Group) -> None:
        if groups := self.of_client.get(group.client_id):
            groups.pop(group.group_id, None)
            if not groups:
                del self.of_client[group.client_id]

    def _is_due_at(self, ends_s: float, _: int, group: Group) -> bool:
        return group.ends_s == ends_s and self.groups.get(group.group_id) is group
