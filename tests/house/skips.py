"""The skip policy: a test may be skipped only as tests/skips.toml allows.

tests/conftest.py turns every other skip into a failure. An entry names tests and the reason that
pytest reports, and both must match.
"""

import re
import stat
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class AllowedSkip:
    """One entry: node ids and the reported reason, `*` standing for anything."""

    tests: str
    reason: str
    why: str

    def allows(self, node_id: str, reason: str) -> bool:
        """Both patterns match as a whole."""
        return _matches(self.tests, node_id) and _matches(self.reason, reason)

    def test_file(self) -> str:
        """The file pattern of `tests`, relative to the repository."""
        return self.tests.partition("::")[0]


def read_skips(path: Path) -> list[AllowedSkip]:
    """Read the entries of `path`; TypeError or KeyError if one is malformed."""
    tables = tomllib.loads(path.read_text(encoding="ascii"))["skip"]
    return [AllowedSkip(**table) for table in tables]


def refusal(allowed: Sequence[AllowedSkip], node_id: str, reason: str) -> str | None:
    """Return why the skip of `node_id` fails the run; None if an entry allows it."""
    if any(entry.allows(node_id, reason) for entry in allowed):
        return None
    return (
        f"{node_id} was skipped ({reason}), and tests/skips.toml does not list it with that "
        "reason: fix the test, or list it and say why"
    )


def _matches(pattern: str, text: str) -> bool:
    return re.fullmatch(re.escape(pattern).replace(r"\*", ".*"), text, re.DOTALL) is not None


def needs_shared_python() -> None:
    """Skip the test if other users cannot run this interpreter, so that no slot user can."""
    for path in (Path(sys.prefix), Path(sys.executable).resolve()):
        for each in (path, *path.parents):
            if not each.stat().st_mode & stat.S_IXOTH:
                pytest.skip(f"other users cannot pass {each}")
