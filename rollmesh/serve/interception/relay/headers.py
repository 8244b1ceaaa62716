"""Which header lines pass a relay, in either direction.

Invariants: our own secrets never leave: an agent's key is replaced by the provider's or dropped,
and a line that quotes the secret it showed us is dropped; what belongs to one connection stays on
it; cookies pass in neither direction, since agents share the provider's account. Lines are bytes,
each with its end, as they stand on the wire. Driven by edge.py and call.py.
"""

from collections.abc import Iterable

Header = tuple[bytes, bytes]

_HOP_BY_HOP = {
    b"connection",
    b"keep-alive",
    b"proxy-authenticate",
    b"proxy-authorization",
    b"proxy-connection",
    b"te",
    b"trailer",
    b"transfer-encoding",
    b"upgrade",
}
_NOT_FORWARDED = _HOP_BY_HOP | {
    b"host",
    b"content-length",
    b"content-encoding",  # of the body, which is inflated here
    b"expect",
    b"cookie",
    b"authorization",
    b"x-api-key",
    b"accept-encoding",  # the answer is read here too
    b"openai-organization",  # whom the provider bills is not the agent's to choose
    b"openai-project",
    b"anthropic-organization",
}
_NOT_RETURNED = _HOP_BY_HOP | {b"content-length", b"set-cookie"}


def forwarded(sent: Iterable[Header], secret: str, key: bytes, prefers_x_api_key: bool) -> bytes:
    """The lines for the upstream of what an agent sent, who showed us `secret`.

    `key` is the provider's, empty for none; it replaces the agent's own. Lines that `Connection`
    names belong to one connection (RFC 9110, 7.6.1) and are left out.
    """
    shown = secret.encode("utf-8", "surrogateescape")
    lines: list[bytes] = []
    nominated: set[bytes] = set()
    for name, value in sent:
        lower = name.lower()
        if lower == b"x-api-key":
            prefers_x_api_key = True
        elif lower == b"authorization":
            prefers_x_api_key = False
        elif lower == b"connection":
            nominated.update(option.strip().lower() for option in value.split(b","))
        elif lower not in _NOT_FORWARDED and shown not in value:
            lines.append(b"%b: %b\r\n" % (name, value))
    if nominated - _NOT_FORWARDED:
        lines = [line for line in lines if line.partition(b":")[0].lower() not in nominated]
    if key:
        line = b"x-api-key: %b\r\n" if prefers_x_api_key else b"Authorization: Bearer %b\r\n"
        lines.append(line % key)
    return b"".join(lines)


def returned(told: Iterable[Header]) -> bytes:
    """The lines for the agent of what an upstream told; the body's length is ours to say."""
    return b"".join([b"%b: %b\r\n" % (n, v) for n, v in told if n.lower() not in _NOT_RETURNED])


def tells_events(lines: bytes) -> bool:
    """Whether an answer with these header lines is a stream of events."""
    # Most are none: then one look at all lines is enough.
    told = b"event-stream" in lines.lower()
    return told and b"event-stream" in value_in(lines, b"content-type")


def value_in(lines: bytes, name: bytes) -> bytes:
    """A header's value in lower case, empty if it is not there; `name` is in lower case."""
    for line in lines.split(b"\r\n"):
        found, _, value = line.partition(b":")
        if found.lower() == name:
            return value.strip().lower()
    return b""
