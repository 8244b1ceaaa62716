"""A session in tokens that comes back of a journal."""

from pathlib import Path

from rollmesh.runtime.prompts import Prompts
from rollmesh.runtime.session_deps import locks_of
from rollmesh.serve.interception.archive.scribe import SessionScribe
from rollmesh.serve.interception.capture import Standing
from rollmesh.serve.interception.tokens import TokenRegaining
from tests.unit.serve.interception.archive.lives import Life


async def test_what_was_shown_before_is_a_set_that_nobody_changes(
    tmp_path: Path, prompts: Prompts
) -> None:
    life = Life(tmp_path / "journal", prompts, [])

    def read(number: int) -> bytes:
        raise LookupError(number)

    standing = Standing("s", locks_of("key", "secret"), None, 7, read)
    scribe = SessionScribe(life.archive, "s")
    regaining = TokenRegaining(life.capture, standing, scribe)
    before = scribe.shown
    regaining.end()
    scribe.shown |= {"a digest"}
    assert isinstance(scribe.shown, frozenset)
    assert before == frozenset()
    life.archive.close_journal()
