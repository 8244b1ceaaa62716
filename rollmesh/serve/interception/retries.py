"""How a client says that a request may be one that it has sent before.

Two ways: an `Idempotency-Key`, which its resends share, and the count that the SDKs of OpenAI and
Anthropic keep (`x-stainless-retry-count`; github.com/stainless-api). Invariant: a header that is
there but empty, or a count of 0, says nothing. Driven by exchange.py and the relay.
"""

from collections.abc import Mapping
from typing import NamedTuple


class RetryMark(NamedTuple):
    """What a request's headers say of it."""

    key: bytes
    """Its Idempotency-Key, b"" if it has none."""
    is_resent: bool
    """The same body, if it was answered before, wants that answer."""


def read_retry_mark(headers: Mapping[bytes, bytes]) -> RetryMark:
    """The mark of a request; headers by name in lower case."""
    key = headers.get(b"idempotency-key", b"")
    count = headers.get(b"x-stainless-retry-count", b"0")
    if not key and count == b"0":
        return _NONE
    return RetryMark(key, bool(key) or count not in (b"", b"0"))


_NONE = RetryMark(b"", is_resent=False)
