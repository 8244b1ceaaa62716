"""The matrix: the outcome of each row, written to docs/reference/clients.md after all rows ran."""

from collections.abc import Iterator

import pytest

from tests.clients.harnesses import REPO
from tests.clients.matrix import Ran, is_offline, page
from tests.clients.roster import relayed, rows

PAGE = REPO / "docs/reference/clients.md"


@pytest.fixture(scope="session")
def matrix() -> Iterator[dict[str, Ran]]:
    """Outcomes by the row's id; a partial run leaves the page unchanged."""
    ran: dict[str, Ran] = {}
    yield ran
    wanted = [row.id for row in (*rows(), *relayed())]
    if set(ran) == set(wanted):
        PAGE.write_text(page([ran[each] for each in wanted], is_offline()))
