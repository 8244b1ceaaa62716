"""The matrix: what each row came to, written to docs/reference/clients.md once all rows ran."""

from collections.abc import Iterator

import pytest

from tests.clients.harnesses import REPO
from tests.clients.matrix import Ran, is_offline, page
from tests.clients.roster import relayed, rows

PAGE = REPO / "docs/reference/clients.md"


@pytest.fixture(scope="session")
def matrix() -> Iterator[dict[str, Ran]]:
    """By the row's id; a run of a part of the roster leaves the page as it is."""
    ran: dict[str, Ran] = {}
    yield ran
    wanted = [row.id for row in (*rows(), *relayed())]
    if set(ran) == set(wanted):
        PAGE.write_text(page([ran[each] for each in wanted], is_offline()))
