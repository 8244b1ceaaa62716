"""Find secrets, and traces of the machine that a file was written on.

Each pattern has a letter in brackets, so that this file does not match itself.
"""

import re
from collections.abc import Iterator

from tests.house.source import Fault

PATTERNS = {
    "a private key": r"-----BEGIN [A-Z ]*PRIVATE KE[Y]",
    "an access token": r"\b(AKI[A][0-9A-Z]{16}|gh[pousr]_[A-Za-z0-9]{36}|hf_[A-Za-z0-9]{30,})",
    "an API key": r"\bsk-[A-Za-z0-9_-]{40,}",
    "a path of one machine": r"/(wor[k]|roo[t]|hom[e])/\w|/tmp/brie[f]|\.\./share[d]\b|/opt/pyp[i]",
    "a package index": r"\bpypi\.or[g]|pythonhosted\.or[g]|download\.pytorch\.or[g]|npmjs\.or[g]",
    "an index option": r"--(extra-)?index-ur[l]|--find-link[s]",
}


def secrets(path: str, text: str) -> Iterator[Fault]:
    """A fault for each line that holds one of PATTERNS."""
    for number, line in enumerate(text.splitlines(), 1):
        for what, pattern in PATTERNS.items():
            if re.search(pattern, line):
                yield Fault(path, number, f"holds {what}")
