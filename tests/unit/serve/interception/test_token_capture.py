"""A token session that is restored from a journal."""

from pathlib import Path

from rollmesh.runtime.session_deps import locks_of
from rollmesh.runtime.tokens.prompts import Prompts
from rollmesh.serve.interception.capture import JournaledSession
from rollmesh.serve.interception.journal.session_writer import SessionEventWriter
from rollmesh.serve.interception.token_capture import TokenSessionRestore
from tests.unit.serve.interception.journal.gateway_process import GatewayProcess


async def test_the_set_of_shown_images_is_never_changed_in_place(
    tmp_path: Path, prompts: Prompts
) -> None:
    gateway = GatewayProcess(tmp_path / "journal", prompts, [])

    def read(number: int) -> bytes:
        raise LookupError(number)

    standing = JournaledSession("s", locks_of("key", "secret"), None, 7, read)
    scribe = SessionEventWriter(gateway.journal, "s")
    regaining = TokenSessionRestore(gateway.capture, standing, scribe)
    before = scribe.shown
    regaining.end()
    scribe.shown |= {"a digest"}
    assert isinstance(scribe.shown, frozenset)
    assert before == frozenset()
    gateway.journal.close_journal()
