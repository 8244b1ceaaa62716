"""Where a request carries its session's secret.

Three places, tried in this order: the path (`/s/<secret>/v1/...`, for clients that cannot set a
key), `Authorization: Bearer`, `x-api-key`. Invariant: a secret goes to the caller alone; nothing
here logs. Driven by exchange.py.
"""

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
