"""The answers of one session: what they say, and by which names they are known.

A reply's id is the name of its call. Agents name it again (`previous_response_id`), and so does who
rewards a turn. Invariants: a name leads to the node of its answer, and to none while there is no
answer, or where it is void; what an answer says is read from its tokens alone. Driven by
session.py.
"""

from rollmesh.core.errors import SessionError
from rollmesh.runtime.deltas import Answer, DeltaReader
from rollmesh.runtime.prompts import Prompts
from rollmesh.runtime.reply import Reply, number_of
from rollmesh.runtime.spot import NO_NODE


class Answers:
    """See the module."""

    __slots__ = ("_nodes", "_prompts", "_session_id")

    def __init__(self, session_id: str, prompts: Prompts) -> None:
        self._session_id = session_id
        self._prompts = prompts
        self._nodes: list[int] = []
        """By the call's number; NO_NODE where it has no answer."""

    def begin(self) -> str:
        """A call begins; its name."""
        name = f"{self._session_id}-{len(self._nodes)}"
        self._nodes.append(NO_NODE)
        return name

    def put(self, reply: Reply) -> None:
        """It is in the graph and answers its call."""
        self._nodes[number_of(reply)] = reply.node

    def node_of(self, name: str) -> int:
        """Of the answer with this name; NO_NODE if there is none such."""
        session_id, _, number = name.rpartition("-")
        # Python counts the digits of an integer and refuses too many.
        is_ours = session_id == self._session_id and len(number) <= len(str(len(self._nodes)))
        if is_ours and number.isdecimal() and int(number) < len(self._nodes):
            return self._nodes[int(number)]
        return NO_NODE

    def reader(self, reply: Reply) -> DeltaReader:
        """Cuts the reply's tokens into deltas."""
        if reply.source.is_raw:
            return self._prompts.raw_reader(reply.head.params.stop)
        return self._prompts.reader(reply.reading())

    def read(self, reply: Reply) -> Answer:
        """All that its tokens say."""
        token_ids = reply.token_ids()
        if not reply.source.is_raw:
            return self._prompts.answer(reply.reading(), token_ids)
        reader = self.reader(reply)
        reader.feed(token_ids)
        reader.end(len(token_ids))
        return reader.answer()

    def forget(self) -> None:
        """All names."""
        self._nodes.clear()


def no_such(name: int | str) -> SessionError:
    """Nothing here was answered under this name."""
    why = f"Previous response with id {name!r} not found."
    return SessionError(400, "previous_response_not_found", why)
