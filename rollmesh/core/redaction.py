"""Replace secrets in what a process logs and prints.

- A secret that the process registered is replaced wherever its exact text is written: in structured
  logs, on stderr and, in a process that launch started, on stdout.
- A pattern catches common forms of secrets that were not registered. It is a net with holes.
- Not covered: output that libraries write to the descriptors themselves, output of programs that
  the process starts, and a secret that is printed in pieces or encoded.
"""

import json
import re
import sys
import weakref
from collections.abc import Callable
from typing import Any, TextIO, cast
from urllib.parse import quote

HIDDEN = "[hidden]"
MIN_CHARS = 8
"""Shorter values are not registered: they would be replaced in ordinary words."""

_NET = re.compile(
    r"(/s/|%2Fs%2F|\bsk-|\b(?:bearer|basic)\s+|[?&]key=|://[^\s/:@]*:"
    r"|(?:api[-_]?key|token|secret|password)[\"']?\s*[:=]\s*[\"']?)[A-Za-z0-9_\-.~+=]{16,}",
    re.IGNORECASE,
)
_SECRET_FIELD = re.compile("secret|token|keys$", re.IGNORECASE)
_WORD = re.compile(r"[A-Za-z0-9_\-]{43,46}(?![A-Za-z0-9_\-])")
"""The form of a session's secrets, one of which begins with `sk-`."""


class _Known:
    """The secrets of this process."""

    def __init__(self) -> None:
        self.forms: set[str] = set()
        self.pattern: re.Pattern[str] | None = None
        self.lookups: list[weakref.WeakMethod[Callable[[str], bool]]] = []

    def add(self, value: str) -> None:
        """Register the value, as it is and as JSON, Python and URLs write it."""
        if len(value) < MIN_CHARS or value in self.forms:
            return
        self.forms |= {value, json.dumps(value)[1:-1], repr(value)[1:-1], quote(value, safe="")}
        longest_first = sorted(self.forms, key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, longest_first)))

    def has_word(self, word: str) -> bool:
        """Return whether a lookup finds the word."""
        return any(is_secret(word) for each in self.lookups if (is_secret := each()))


_known = _Known()


def register_secret(value: str) -> None:
    """Replace `value` in everything that this process logs or prints from now on."""
    _known.add(value)


def register_content(text: str) -> None:
    """Register the content of a file of secrets: one line, or a JSON object's fields named
    `*secret` and `*token*`.
    """
    try:
        found = json.loads(text)
    except ValueError:
        found = text.strip()
    if isinstance(found, dict):
        for name, value in found.items():
            if isinstance(value, str) and _SECRET_FIELD.search(name):
                register_content(value)
    elif "\n" not in text.strip():
        register_secret(text.strip())


def register_lookup(is_secret: Callable[[str], bool]) -> None:
    """Replace each word for which the bound method `is_secret` is true, while its object exists."""
    _known.lookups = [each for each in _known.lookups if each()]
    _known.lookups.append(weakref.WeakMethod(is_secret))


def redact(text: str) -> str:
    """Return `text` without registered secrets and without what looks like one."""
    if _known.pattern is not None:
        text = _known.pattern.sub(HIDDEN, text)
    if _known.lookups:
        text = _WORD.sub(lambda found: HIDDEN if _known.has_word(found[0]) else found[0], text)
    return _NET.sub(rf"\g<1>{HIDDEN}", text)


class RedactingStream:
    """A text stream that redacts each write."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write `text`, redacted; return the length of `text`."""
        self._stream.write(redact(text))
        return len(text)

    def writelines(self, lines: list[str]) -> None:
        """Write each line, redacted."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def redact_output(*, with_stdout: bool) -> None:
    """Redact what this process prints to stderr, tracebacks included, and to stdout if asked."""
    for name in ("stderr", "stdout") if with_stdout else ("stderr",):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, RedactingStream):
            setattr(sys, name, cast(TextIO, RedactingStream(stream)))
