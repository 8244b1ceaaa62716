"""The page of the clients: what counts as passed, and what is not claimed."""

from collections import Counter

from tests.clients.matrix import Ran, page
from tests.clients.roster import RELAY, rows

FIRST, SECOND, *_ = rows()


def lines(*ran: Ran) -> list[str]:
    return page(ran, is_offline=True).splitlines()


def test_a_line_shows_forks_and_repairs() -> None:
    ran = Ran(FIRST, 4, 2, Counter({"edited_history": 1}), Counter({"cache_marker": 2, "x": 0}))
    (line,) = (
        each
        for each in lines(ran)
        if each.startswith(f"| {FIRST.client.name} | {FIRST.client.package}")
    )
    assert line.endswith("| pass | 4 | 2 of 3 | edited history 1 | cache marker 2 |")


def test_only_rows_that_passed_in_tokens_mode_count_and_relay_claims_nothing() -> None:
    relayed = Ran(FIRST._replace(capture=RELAY), 3, 2)
    page = lines(Ran(FIRST, 3, 2), Ran(SECOND, fault="exit 1"), relayed)
    assert any(line.startswith("1 of 2 in tokens mode pass.") for line in page)
    assert any("**fails**: exit 1 | 0 | - | none | none |" in line for line in page)
    assert any("**relay** | pass | 3 | not claimed | - | - |" in line for line in page)
