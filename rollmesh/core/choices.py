"""Suggestions for a mistyped name: the closest known names, or else all of them."""

from collections.abc import Iterable

MAX_CLOSE = 3


def close_names(name: str, known: Iterable[str]) -> list[str]:
    """The names most like `name`, closest first; at most three."""
    # Imported here: only a mistake pays for it.
    from difflib import get_close_matches  # noqa: PLC0415 - see above

    by_lower = {each.lower(): each for each in known}
    return [by_lower[each] for each in get_close_matches(name.lower(), by_lower, MAX_CLOSE)]


def instead_of(name: str, known: Iterable[str]) -> str:
    """`did you mean 'x'?`, or `choose one of x, y, z` where nothing is close."""
    known = list(known)
    close = close_names(name, known)
    if close:
        return f"did you mean {' or '.join(map(repr, close))}?"
    return f"choose one of {', '.join(known)}"
