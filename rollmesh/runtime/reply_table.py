"""The replies of one session: the newest to each distinct request, and which of them are over.

The same body has the same replies while they are not delivered, so two equal requests in flight
share one answer; after delivery it has them again if the client marks it as a retry. Unmarked it
gets new ones, which supersede the old ones once they are delivered: if nothing ever follows those,
the client never saw them, and they do not train. So a turn that is resent five times trains once.
Invariant: a request's choices stand or fall together, which is its driver's doing. Driven by
session.py.
"""

from collections import deque
from collections.abc import Iterable

from rollmesh.runtime.reply import Reply, ReplyState
from rollmesh.runtime.turns import Turn

MAX_LISTED = 32
"""Delivered replies whose likeliest tokens are kept, for a retry: they take 2 KB a token."""

Choices = tuple[Reply, ...]
"""The replies to one request."""


class ReplyTable:
    """See the module."""

    __slots__ = ("_listed", "_of_request", "_older")

    def __init__(self) -> None:
        self._of_request: dict[int, Choices] = {}
        """By the request's digest."""
        self._older: dict[int, set[int]] = {}
        """Nodes of delivered answers to requests that were asked anew, until that is delivered."""
        self._listed: deque[Reply] | None = None
        """The newest delivered ones with likeliest tokens; few sessions have any."""

    def put(self, digest: int, replies: Choices) -> None:
        """The request has these from now on."""
        self._of_request[digest] = replies

    def put_again(self, digest: int, replies: Choices) -> None:
        """The same, as another process did it: those it has already were delivered before."""
        older = [
            r.node for r in self._of_request.get(digest, ()) if r.state is ReplyState.DELIVERED
        ]
        if older:
            self._older.setdefault(digest, set()).update(older)
        self.put(digest, replies)

    def newest(self, digest: int) -> Choices | None:
        """What the request has, whether or not it is to be answered by that again."""
        return self._of_request.get(digest)

    def all(self) -> Iterable[Choices]:
        """By request."""
        return self._of_request.values()

    def known(self, turn: Turn) -> Choices | None:
        """What `turn` is to be answered with, if it already has that."""
        replies = self._of_request.get(turn.digest)
        if replies is None:
            return None
        if turn.is_retry or any(r.state is not ReplyState.DELIVERED for r in replies):
            return replies
        # Asked anew after delivery: siblings. If nothing follows the old ones, it was a retry.
        self._older.setdefault(turn.digest, set()).update([reply.node for reply in replies])
        return None

    def delivered(self, reply: Reply) -> Iterable[int]:
        """The last byte of a committed reply was handed over; the nodes that it supersedes."""
        reply.state = ReplyState.DELIVERED
        if reply.top_logprobs():
            self._list(reply)
        return self._older.pop(reply.source.digest, ()) if self._older else ()

    def take_back(self, reply: Reply, older: set[int]) -> None:
        """It was not delivered after all, and supersedes nothing until it is."""
        if older:
            self._older.setdefault(reply.source.digest, set()).update(older)

    def pop(self, digest: int) -> Choices:
        """The request has none from now on; those that it had."""
        return self._of_request.pop(digest, ())

    def drop_void(self) -> None:
        """Requests whose answers were withdrawn may be asked anew."""
        for digest, replies in list(self._of_request.items()):
            if any(reply.state is ReplyState.VOID for reply in replies):
                del self._of_request[digest]

    def _list(self, reply: Reply) -> None:
        self._listed = self._listed or deque()
        self._listed.append(reply)
        if len(self._listed) > MAX_LISTED:
            self._listed.popleft().drop_top_logprobs()
