"""Text for people: suggestions for mistyped names, and escaping of text that others wrote.

- Control characters (C0, DEL, C1), bidirectional controls and lone surrogates become visible
  escapes, so that no text sets a title, writes a clipboard, clears a screen or reorders a line.
- Escaping is applied where such text enters a record that people read, and again where it is shown.
"""

import re
from collections.abc import Iterable

MAX_CLOSE = 3


def close_names(name: str, known: Iterable[str]) -> list[str]:
    """Return the names most like `name`, closest first; at most three."""
    # Imported on use: only a mistake needs it.
    from difflib import get_close_matches  # noqa: PLC0415 - see above

    by_lower = {each.lower(): each for each in known}
    return [by_lower[each] for each in get_close_matches(name.lower(), by_lower, MAX_CLOSE)]


def instead_of(name: str, known: Iterable[str]) -> str:
    """Return `did you mean 'x'?`, or `choose one of x, y, z` if no name is close."""
    known = list(known)
    close = close_names(name, known)
    if close:
        return f"did you mean {' or '.join(map(repr, close))}?"
    return f"choose one of {', '.join(known)}"


_UNSAFE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
_IN_JSON = re.compile("[\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def printable(text: str, keep: str = "") -> str:
    r"""Return `text` with each unsafe character, except those in `keep`, as `\x1b` or `\u202e`."""
    return _UNSAFE.sub(lambda found: _escaped(found[0], keep), text)


def printable_lines(text: str) -> str:
    """Escape like `printable`, but keep newlines and tabs."""
    return printable(text, keep="\n\t")


def printable_json(text: str) -> str:
    """Return a JSON document with its unsafe characters as JSON escapes."""
    return _IN_JSON.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _escaped(character: str, keep: str) -> str:
    if character in keep:
        return character
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
