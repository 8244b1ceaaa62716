"""What is read of an answer, however its bytes are cut."""

import pytest

from rollmesh.engine.parser import AnswerParser

WHOLE = (
    b"HTTP/1.1 100 Continue\r\nX: y\r\n\r\n"
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
)


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_an_answer_is_the_same_however_it_is_cut(size: int) -> None:
    parser, body = AnswerParser(), b""
    for at in range(0, len(WHOLE), size):
        assert parser.feed(WHOLE[at : at + size]) == ""
        body += parser.take()
    assert (parser.status, body, parser.is_whole, parser.keeps_alive) == (200, b"abcde", True, True)
    assert parser.headers == [(b"Transfer-Encoding", b"chunked")]
    assert not parser.ends_with_connection
    parser.close()


def test_what_stands_behind_an_answer_is_none_of_it() -> None:
    parser = AnswerParser()
    assert parser.feed(WHOLE + b"HTTP/1.1 500 No\r\nContent-Length: 1\r\n\r\nx") == ""
    assert (parser.status, parser.take(), parser.is_whole) == (200, b"abcde", True)
    assert not parser.keeps_alive
    parser.close()


def test_the_next_answer_begins_with_nothing_of_the_last() -> None:
    parser = AnswerParser()
    parser.feed(WHOLE)
    parser.begin(is_head=True)
    assert (parser.status, parser.headers, parser.take(), parser.has_bytes) == (0, [], b"", False)
    assert parser.feed(b"HTTP/1.1 204 No\r\n\r\n") == ""
    assert (parser.status, parser.is_whole, parser.ends_with_connection) == (204, True, True)
    parser.close()
