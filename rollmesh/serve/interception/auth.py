"""Where a request carries its session's secret, and whether it carries the admin's token.

A secret has three places, tried in this order: the path (`/s/<secret>/v1/...`, for clients that
cannot set a key), `Authorization: Bearer`, `x-api-key`; the token is a Bearer and nothing else.
Invariants: a secret goes to the caller alone, and nothing here logs; the token is compared in
constant time. Driven by exchange.py, the relay's edge, and who answers admins.
"""

import hmac
from collections.abc import Mapping


def find_secret(path: str, headers: Mapping[bytes, bytes]) -> str:
    """The secret of a request, or '' if it has none; headers by name in lower case."""
    before, mark, rest = path.partition("/s/")
    if mark and "/v1" not in before:
        return rest.partition("/")[0]
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() != b"bearer" or not token:
        token = headers.get(b"x-api-key", b"")
    return token.strip().decode("utf-8", "surrogateescape")


def bears(token: bytes, headers: Mapping[bytes, bytes]) -> bool:
    """Whether a request carries this token; an empty one is carried by none."""
    scheme, _, said = headers.get(b"authorization", b"").partition(b" ")
    is_known = hmac.compare_digest(said.strip(), token)
    return is_known and bool(token) and scheme.lower() == b"bearer"
