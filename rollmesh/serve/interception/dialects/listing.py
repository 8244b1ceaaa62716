"""Sampled tokens with their log-probs, as OpenAI's APIs list them.

Owns the JSON of each token that was ever listed: only the figure between two halves is new. A part
of a character has the replacement character as its text, and its true bytes. Invariant: a listing
of one range of tokens is the same bytes each time. One per edge, which serves one model; driven by
the dialects through ReplyView.
"""

from collections.abc import Callable, Sequence

import orjson

Tops = Sequence[Sequence[tuple[float, int]]]
"""For each token its likeliest alternatives: log-prob and id; empty where none were asked for."""


class TokenListing:
    """See the module."""

    def __init__(self) -> None:
        self._halves: dict[int, tuple[bytes, bytes]] = {}

    def rows(
        self,
        bytes_of: Callable[[int], bytes],
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        tops: Tops,
    ) -> bytes:
        """A JSON array of `{"token", "logprob", "bytes", "top_logprobs"}`."""
        pieces: list[bytes] = []
        for n, (token_id, figure) in enumerate(zip(token_ids, _figures(logprobs), strict=True)):
            before, after = self._halves_of(bytes_of, token_id)
            pieces += (before, figure, after)
            if tops:
                pieces += (b',"top_logprobs":[', self._tops(bytes_of, tops[n]), b"]},")
            else:
                pieces.append(b',"top_logprobs":[]},')
        return b"[%b]" % b"".join(pieces)[:-1]

    def _tops(self, bytes_of: Callable[[int], bytes], tops: Sequence[tuple[float, int]]) -> bytes:
        figures = _figures([logprob for logprob, _ in tops])
        halves = [self._halves_of(bytes_of, token_id) for _, token_id in tops]
        rows = zip(figures, halves, strict=True)
        return b",".join(b"%b%b%b}" % (before, figure, after) for figure, (before, after) in rows)

    def _halves_of(self, bytes_of: Callable[[int], bytes], token_id: int) -> tuple[bytes, bytes]:
        halves = self._halves.get(token_id)
        if halves is None:
            token = bytes_of(token_id)
            text = orjson.dumps(token.decode("utf-8", "replace"))
            before = b'{"token":%b,"logprob":' % text
            after = b',"bytes":' + orjson.dumps(list(token))
            halves = self._halves[token_id] = before, after
        return halves


def _figures(logprobs: Sequence[float]) -> list[bytes]:
    """Each number as JSON; one call of the encoder for all."""
    return orjson.dumps(list(logprobs))[1:-1].split(b",") if len(logprobs) else []
