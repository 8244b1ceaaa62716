"""The event behind which the agent of a streamed answer waits for nothing more.

    /chat/completions, /completions   data: [DONE]
    /messages                         message_stop
    /responses                        response.completed, .incomplete or .failed

Invariants: the event is found however its bytes are cut into pieces; what a model says is never
taken for it, since JSON has no line breaks within a text. A compressed stream is not looked into:
there the end of its HTTP answer alone tells. Pure; driven by call.py.
"""

import re

_DONE = (b"[DONE]",)
_WORDS = {
    "/messages": (b"message_stop",),
    "/responses": (b"response.completed", b"response.incomplete", b"response.failed"),
}
_LINE = re.compile(
    rb"[\r\n](?:data: ?\[DONE\]"
    rb'|(?:event: ?|data: ?{"type": ?")(?:message_stop|response\.(?:completed|incomplete|failed)))'
)
_LINE_BYTES = 48
"""No such line is longer up to where it tells."""


class StreamEnd:
    """Of one answer; `is_in` gets its pieces in their order."""

    __slots__ = ("_tail", "_words")

    def __init__(self, route: str) -> None:
        self._words = _WORDS.get(route, _DONE)
        self._tail = b"\n"

    def is_in(self, piece: bytes) -> bool:
        """Whether the event begins in this piece, or in the one before and is seen now."""
        text = self._tail + piece
        self._tail = text[-_LINE_BYTES:]
        # Most pieces have none of the words, which a search for a line would take longer to see.
        for word in self._words:
            if word in text:
                return _LINE.search(text) is not None
        return False
