"""Encode sampled tokens with their log-probs in the shape of OpenAI's APIs.

- A range of tokens encodes to the same bytes each time.
- A token that is a part of a character has the replacement character as its text, and its own
  bytes.
"""

from collections.abc import Callable, Sequence
from itertools import repeat

import orjson

Tops = Sequence[Sequence[tuple[float, int]]]
"""The likeliest alternatives of each token: (log-prob, id); empty if none were requested."""


_Halves = tuple[bytes, bytes]
"""A token's JSON before and after its log-prob, without the closing brace."""
_NO_TOPS = b',"top_logprobs":[]},'


class TokenListing:
    """Encoder with a cache of each token's JSON; one for each served model."""

    def __init__(self) -> None:
        self._halves: dict[int, _Halves] = {}
        """By token id."""

    def rows(
        self,
        bytes_of: Callable[[int], bytes],
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        tops: Tops,
    ) -> bytes:
        """A JSON array of `{"token", "logprob", "bytes", "top_logprobs"}`."""
        if not len(token_ids):
            return b"[]"
        halves = self._halves_of(bytes_of, token_ids)
        ends = [self._tops(bytes_of, row) for row in tops] if tops else repeat(_NO_TOPS)
        pieces = [
            piece
            for (before, after), figure, end in zip(halves, _figures(logprobs), ends, strict=False)
            for piece in (before, figure, after, end)
        ]
        return b"[%b]" % b"".join(pieces)[:-1]

    def _tops(self, bytes_of: Callable[[int], bytes], tops: Sequence[tuple[float, int]]) -> bytes:
        figures = _figures([logprob for logprob, _ in tops])
        halves = self._halves_of(bytes_of, [token_id for _, token_id in tops])
        rows = zip(figures, halves, strict=True)
        listed = b",".join(b"%b%b%b}" % (before, figure, after) for figure, (before, after) in rows)
        return b',"top_logprobs":[%b]},' % listed

    def _halves_of(
        self, bytes_of: Callable[[int], bytes], token_ids: Sequence[int]
    ) -> list[_Halves]:
        halves = self._halves
        try:
            return [halves[token_id] for token_id in token_ids]
        except KeyError:
            for token_id in token_ids:
                if token_id not in halves:
                    halves[token_id] = _encode_token(bytes_of(token_id))
            return [halves[token_id] for token_id in token_ids]


def _encode_token(token: bytes) -> _Halves:
    text = orjson.dumps(token.decode("utf-8", "replace"))
    return b'{"token":%b,"logprob":' % text, b',"bytes":' + orjson.dumps(list(token))


def _figures(logprobs: Sequence[float]) -> list[bytes]:
    """Each number as JSON, by one call of the encoder."""
    return orjson.dumps(list(logprobs))[1:-1].split(b",") if len(logprobs) else []
