"""Where a request carries its session's secret.

Three places, tried in this order: the path (`/s/<secret>/v1/...`, for clients that cannot set a
key), `Authorization: Bearer`, `x-api-key`. Invariant: a secret goes to the caller alone; nothing
here logs. Driven by exchange.py.
"""

from collections.abc import Mapping


def find_secret(path: str, headers: Mapping[str, str]) -> str:
    """The secret of a request, or '' if it has none."""
    before, mark, rest = path.partition("/s/")
    if mark and "/v1" not in before:
        return rest.partition("/")[0]
    scheme, _, token = headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token:
        return token.strip()
    return headers.get("x-api-key", "").strip()
