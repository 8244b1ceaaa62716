"""A request's headers say whether it may have been sent before."""

import pytest

from rollmesh.serve.interception.retries import read_retry_mark

KEY, COUNT = b"idempotency-key", b"x-stainless-retry-count"


@pytest.mark.parametrize(
    ("headers", "key", "is_resent"),
    [
        ({}, b"", False),
        ({KEY: b"k"}, b"k", True),
        ({KEY: b""}, b"", False),
        ({COUNT: b"0"}, b"", False),
        ({COUNT: b""}, b"", False),
        ({COUNT: b"1"}, b"", True),
        ({KEY: b"k", COUNT: b"0"}, b"k", True),
        ({KEY: b"", COUNT: b"2"}, b"", True),
    ],
)
def test_a_key_or_a_count_marks_a_resend_and_an_empty_one_does_not(
    headers: dict[bytes, bytes], key: bytes, is_resent: bool
) -> None:
    assert read_retry_mark(headers) == (key, is_resent)
