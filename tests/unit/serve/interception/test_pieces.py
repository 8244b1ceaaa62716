"""What is long lies apart, and is the same again when it is joined."""

from rollmesh.serve.interception.pieces import MIN_BLOB_BYTES, cut, joined, says

LONG = b"A" * 50_000


def test_whatever_is_cut_is_the_same_again() -> None:
    quotes = b'"x' * MIN_BLOB_BYTES
    for raw in (
        b"",
        b"{}",
        LONG,
        b'{"a":"' + LONG + b'","b":"' + LONG + b'"}',
        quotes,
        LONG + b'"',
    ):
        pieces = cut(raw)
        assert joined(pieces) == raw
        assert says(pieces, memoryview(raw))
        assert not says(pieces, memoryview(raw + b"x"))
        assert not says(pieces, memoryview(b"x" + raw))
        assert sum(len(p) for p in pieces if isinstance(p, bytes)) < MIN_BLOB_BYTES
    one, other = cut(b'{"a":"' + LONG + b'"}'), cut(b'{"a":"' + LONG + b'","marked":true}')
    assert one[1] is other[1]
