"""What a dialect sees of one reply: names, counts and tokens, read-only.

Invariant: everything here is the same each time the same request is answered, so a repeated answer
is byte-equal. Made by exchange.py, read by the dialects.
"""

from collections.abc import Callable, Sequence

from rollmesh.runtime.chat import Answer, Delta, Wish, whole_calls
from rollmesh.runtime.replies import Reply, ReplyHead
from rollmesh.runtime.session import Session
from rollmesh.serve.interception.dialects.token_listing import TokenListing


class ReplyView:
    """One reply as one exchange shows it."""

    __slots__ = ("_edge", "_reply", "_session", "head", "model", "wish")

    def __init__(self, session: Session, reply: Reply, wish: Wish, edge: "ViewContext") -> None:
        self.head: ReplyHead = reply.head
        self.wish = wish
        self.model = wish.model or edge.model_name
        self._session = session
        self._reply = reply
        self._edge = edge

    @property
    def answer(self) -> Answer:
        """What a committed reply says."""
        return self._session.finish(self._reply)

    def deltas(self) -> list[Delta]:
        """A committed reply in pieces that tell the order of what it says."""
        answer = self.answer
        if not (answer.content and answer.tool_calls):
            calls = whole_calls(answer.tool_calls)
            return [Delta(answer.content, answer.reasoning, calls, self.num_tokens)]
        # Content may stand on both sides of the calls: only the tokens know.
        reader = self._session.answers.reader(self._reply)
        first = reader.feed(self._reply.token_ids())
        return [*([first] if first else []), reader.end(self.num_tokens)]

    @property
    def finish_reason(self) -> str:
        """`stop`, `length` or `tool_calls`; of a committed reply."""
        return self._reply.finish_reason

    @property
    def matched_stop(self) -> str | None:
        """The stop string that ended a committed reply, if one did."""
        return self._reply.matched_stop

    @property
    def num_tokens(self) -> int:
        """Sampled tokens; of a committed reply."""
        return self._reply.num_tokens

    def prompt_ids(self) -> list[int]:
        """The exact tokens that the reply was sampled after."""
        return list(self._reply.prompt_ids())

    def prompt_text(self) -> str:
        """The prompt as text."""
        pieces = map(self._edge.token_bytes, self._reply.prompt_ids())
        return b"".join(pieces).decode("utf-8", "replace")

    def token_ids(self, start: int, stop: int) -> list[int]:
        """Sampled tokens `start` to `stop`."""
        return list(self._reply.token_ids(start)[: stop - start])

    def token_text(self, token_id: int) -> str:
        """One token's text; of a part of a character, the replacement character."""
        return self._edge.token_bytes(token_id).decode("utf-8", "replace")

    def logprobs(self, start: int, stop: int) -> list[float]:
        """Log-probs of the sampled tokens `start` to `stop`."""
        return list(self._reply.logprobs()[start:stop])

    def top_logprobs(self, start: int, stop: int) -> Sequence[Sequence[tuple[float, int]]]:
        """The likeliest alternatives of those tokens; empty where none were asked for."""
        if not self.wish.num_top_logprobs:
            return ()
        num, rows = self.wish.num_top_logprobs, self._reply.top_logprobs()
        # An engine may have listed none, for all of the reply or for a leg of it.
        return [row[:num] for row in rows[start:stop]] if len(rows) >= stop else ()

    def listed_tokens(self, start: int, stop: int) -> bytes:
        """The JSON array that lists those tokens with their log-probs."""
        return self._edge.listing.rows(
            self._edge.token_bytes,
            self.token_ids(start, stop),
            self.logprobs(start, stop),
            self.top_logprobs(start, stop),
        )


class ViewContext:
    """What all replies of an edge are shown with."""

    def __init__(self, model_name: str, token_bytes: Callable[[int], bytes]) -> None:
        self.model_name = model_name
        """For requests that name no model."""
        self.token_bytes = token_bytes
        """One token's bytes, which may be a part of a character."""
        self.listing = TokenListing()
