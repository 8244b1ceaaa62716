"""Read-only view of one reply for the dialects: names, counts and tokens.

The values are the same each time the same request is answered, so a repeated answer is
byte-identical.
"""

from collections.abc import Callable, Sequence

from rollmesh.runtime.chat import AnswerOptions, Delta, ParsedReply, whole_calls
from rollmesh.runtime.replies import Reply, ReplyHead
from rollmesh.runtime.session import Session
from rollmesh.serve.interception.dialects.token_listing import TokenListing


class ReplyView:
    """One reply as one exchange presents it."""

    __slots__ = ("_context", "_reply", "_session", "head", "model", "options")

    def __init__(
        self, session: Session, reply: Reply, options: AnswerOptions, context: "ViewContext"
    ) -> None:
        self.head: ReplyHead = reply.head
        self.options = options
        self.model = options.model or context.model_name
        self._session = session
        self._reply = reply
        self._context = context

    @property
    def answer(self) -> ParsedReply:
        """The parsed answer of a committed reply."""
        return self._session.finish(self._reply)

    def deltas(self) -> list[Delta]:
        """Return a committed reply as deltas, in the order of its content and calls."""
        answer = self.answer
        if not (answer.content and answer.tool_calls):
            calls = whole_calls(answer.tool_calls)
            return [Delta(answer.content, answer.reasoning, calls, self.num_tokens)]
        # Content may be before and after the calls: only the tokens show where.
        reader = self._session.answers.reader(self._reply)
        first = reader.feed(self._reply.token_ids())
        return [*([first] if first else []), reader.end(self.num_tokens)]

    @property
    def finish_reason(self) -> str:
        """`stop`, `length` or `tool_calls`, of a committed reply."""
        return self._reply.finish_reason

    @property
    def matched_stop(self) -> str | None:
        """The stop string that ended a committed reply, if one did."""
        return self._reply.matched_stop

    @property
    def num_tokens(self) -> int:
        """Number of sampled tokens of a committed reply."""
        return self._reply.num_tokens

    def prompt_ids(self) -> list[int]:
        """Return the exact prompt tokens of the reply."""
        return list(self._reply.prompt_ids())

    def prompt_text(self) -> str:
        """Return the prompt as text."""
        pieces = map(self._context.token_bytes, self._reply.prompt_ids())
        return b"".join(pieces).decode("utf-8", "replace")

    def token_ids(self, start: int, stop: int) -> list[int]:
        """Return the sampled tokens `start` to `stop`."""
        return list(self._reply.token_ids(start)[: stop - start])

    def token_text(self, token_id: int) -> str:
        """Return the text of a token; the replacement character for a part of a character."""
        return self._context.token_bytes(token_id).decode("utf-8", "replace")

    def logprobs(self, start: int, stop: int) -> list[float]:
        """Return the log-probs of the sampled tokens `start` to `stop`."""
        return list(self._reply.logprobs()[start:stop])

    def top_logprobs(self, start: int, stop: int) -> Sequence[Sequence[tuple[float, int]]]:
        """Return the most likely alternatives of those tokens; empty if none were requested."""
        if not self.options.num_top_logprobs:
            return ()
        num, rows = self.options.num_top_logprobs, self._reply.top_logprobs()
        # An engine may have returned none for all or a part of the reply.
        return [row[:num] for row in rows[start:stop]] if len(rows) >= stop else ()

    def listed_tokens(self, start: int, stop: int) -> bytes:
        """Return the JSON array of those tokens with their log-probs."""
        return self._context.listing.rows(
            self._context.token_bytes,
            self.token_ids(start, stop),
            self.logprobs(start, stop),
            self.top_logprobs(start, stop),
        )


class ViewContext:
    """Shared by all reply views of a server."""

    def __init__(self, model_name: str, token_bytes: Callable[[int], bytes]) -> None:
        self.model_name = model_name
        """Name in answers to requests without a model name."""
        self.token_bytes = token_bytes
        """Returns the bytes of a token, which may be a part of a character."""
        self.listing = TokenListing()
