"""The answer that one connection is in the middle of, as far as it has been read.

    head not whole --head--> told of in pieces --end--> whole

Owns the parser, llhttp (httptools). Invariant: its callbacks only collect, so that whoever is told
may close its call or begin another meanwhile. Driven by connection.py.
"""

import httptools
from httptools.parser.protocol import HTTPProtocol

Headers = list[tuple[bytes, bytes]]


class AnswerParser(HTTPProtocol):
    """See the module."""

    # What is None llhttp does not call: for each chunk of a stream it would be two calls more.
    on_url = on_status = on_chunk_header = on_chunk_complete = None  # type: ignore[assignment]

    def __init__(self) -> None:
        self._llhttp = httptools.HttpResponseParser(self)
        self.begin(is_head=False)

    def begin(self, *, is_head: bool) -> None:
        """Read the next answer: to a HEAD request, or to another."""
        self.status = 0
        """0 until its head is whole."""
        self.headers: Headers = []
        self.num_mute_bytes = 0
        """Since the last byte of a body."""
        self.has_bytes = False
        self.is_whole = False
        self.keeps_alive = False
        """Its connection may be used again, if it is whole."""
        self._pieces: list[bytes] = []
        self._is_head = is_head

    def feed(self, data: bytes) -> str:
        """What one read brought; returns what is wrong with it, if anything is."""
        self.has_bytes = True
        self.num_mute_bytes += len(data)
        try:
            self._llhttp.feed_data(data)
        except httptools.HttpParserError as error:
            return f"answered what is no HTTP: {error}"
        except httptools.HttpParserUpgrade:
            return "wants to speak another protocol"
        return ""

    def take(self) -> bytes:
        """The new piece of the body, chunk frames removed."""
        if not self._pieces:
            return b""
        data = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces = []
        self.num_mute_bytes = 0
        return data

    def close(self) -> None:
        """Nothing more comes. Else this and llhttp would hold each other."""
        del self._llhttp

    @property
    def ends_with_connection(self) -> bool:
        """Whether the answer says nothing of its length (RFC 9112, 6.3)."""
        names = {name.lower() for name, _ in self.headers}
        return not names & {b"content-length", b"transfer-encoding"}

    # llhttp's callbacks

    def on_message_begin(self) -> None:
        if self.is_whole:
            self.keeps_alive = False
        elif not self.status:
            self.headers = []

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.status:
            self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        status = self._llhttp.get_status_code()
        if status >= 200 and not self.is_whole:
            self.status = status
            # llhttp waits for the body that the head of an answer to HEAD speaks of; a new one
            # does not.
            self.is_whole = self._is_head

    def on_body(self, body: bytes) -> None:
        if not self.is_whole:
            self._pieces.append(body)

    def on_message_complete(self) -> None:
        if self.status and not self.is_whole:
            self.is_whole = True
            self.keeps_alive = self._llhttp.should_keep_alive()
