"""Every client of the roster, each in its own environment: `make test-clients`."""

from pathlib import Path

import pytest

from tests.clients.harnesses import VENVS
from tests.clients.matrix import Ran
from tests.clients.roster import Row, rows
from tests.clients.tasks import perform


@pytest.mark.clients
@pytest.mark.parametrize("row", rows(), ids=lambda row: row.id)
async def test_a_client_does_the_task_and_its_samples_are_exact(
    row: Row, tmp_path: Path, matrix: dict[str, Ran]
) -> None:
    assert not row.client.home or (VENVS / row.client.home).is_dir(), "`make clients` installs it"
    matrix[row.id] = Ran(row, fault="it ran into the test's end")
    try:
        matrix[row.id] = await perform(row, tmp_path)
    except AssertionError as error:
        matrix[row.id] = Ran(row, fault=str(error).splitlines()[0][:120])
        raise
