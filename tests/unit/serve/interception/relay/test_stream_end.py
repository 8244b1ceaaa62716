"""Detection of the end of a streamed answer."""

import pytest

from rollmesh.serve.interception.dialects.registry import DIALECTS
from rollmesh.serve.interception.relay.upstream_answer import StreamEndDetector

BEFORE = (
    b'event: ping\r\ndata: {"text":"data: [DONE]\\nevent: message_stop\\nresponse.failed"}\r\n\r\n'
)
ENDS = {
    "/chat/completions": [b"data: [DONE]\n\n", b"data:[DONE]\r\n\r\n"],
    "/completions": [b"data: [DONE]\n\n"],
    "/messages": [b"event: message_stop\ndata: {}\n\n", b'data: {"type":"message_stop"}\n\n'],
    "/responses": [
        b"event: response.completed\ndata: {}\n\n",
        b"event:response.failed\ndata: {}\n\n",
        b'data: {"type": "response.incomplete"}\n\n',
    ],
}


@pytest.mark.parametrize(("route", "end"), [(r, end) for r, ends in ENDS.items() for end in ends])
@pytest.mark.parametrize("num_bytes", [1, 7, 1000])
def test_the_end_is_seen_before_it_is_whole_however_it_is_cut(
    route: str, end: bytes, num_bytes: int
) -> None:
    stream = StreamEndDetector(DIALECTS[route])
    assert not any(stream.is_in(piece) for piece in pieces(BEFORE * 3, num_bytes))
    seen = [stream.is_in(piece) for piece in pieces(end, num_bytes)]
    shown = b"".join(pieces(end, num_bytes)[: seen.index(True)])
    assert b"\n" not in shown, "of its first line"


@pytest.mark.parametrize("route", ENDS)
def test_a_stream_may_be_nothing_but_its_end(route: str) -> None:
    assert StreamEndDetector(DIALECTS[route]).is_in(ENDS[route][0])


def pieces(data: bytes, num_bytes: int) -> list[bytes]:
    return [data[at : at + num_bytes] for at in range(0, len(data), num_bytes)]
