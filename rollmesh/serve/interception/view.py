"""What a dialect sees of one reply: names, counts and tokens, read-only.

Invariant: everything here is the same each time the same request is answered, so a repeated answer
is byte-equal. Made by exchange.py, read by the dialects.
"""

from collections.abc import Sequence

from rollmesh.runtime.reply import Reply, ReplyHead
from rollmesh.runtime.session import Session
from rollmesh.runtime.turns import Turn


class ReplyView:
    """One reply as one exchange shows it."""

    def __init__(self, session: Session, reply: Reply, turn: Turn, default_model: str) -> None:
        self.turn = turn
        self.model = turn.model or default_model
        self._session = session
        self._reply = reply

    @property
    def head(self) -> ReplyHead:
        return self._reply.head

    @property
    def finish_reason(self) -> str:
        """`stop`, `length` or `tool_calls`; of a committed reply."""
        return self._session.finish_reason(self._reply)

    @property
    def num_tokens(self) -> int:
        """Sampled tokens; of a committed reply."""
        return len(self._session.token_ids(self._reply))

    def prompt_ids(self) -> list[int]:
        """The exact tokens that the reply was sampled after."""
        return list(self._session.prompt_ids(self._reply))

    def token_ids(self, start: int, stop: int) -> list[int]:
        """Sampled tokens `start` to `stop`."""
        return list(self._session.token_ids(self._reply))[start:stop]

    def tokens(self, start: int, stop: int) -> list[tuple[str, float]]:
        """Text and log-prob of the sampled tokens `start` to `stop`."""
        ids = self.token_ids(start, stop)
        logprobs: Sequence[float] = self._session.logprobs(self._reply)[start:stop]
        text = self._session.token_text
        return [(text(i), logprob) for i, logprob in zip(ids, logprobs, strict=True)]
