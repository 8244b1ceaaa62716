"""The table of docs/reference/clients.md: a row for each client, dialect and mode."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.clients.roster import RELAY, Row

TEMPLATE = Path(__file__).with_name("page.md")


class Ran(NamedTuple):
    """The outcome of a task."""

    row: Row
    num_calls: int = 0
    num_extending: int = 0
    forks: Mapping[str, int] = Counter()
    healed: Mapping[str, int] = Counter()
    fault: str = ""
    """One line with the reason if it failed."""


def page(ran: Sequence[Ran], is_offline: bool) -> str:
    """Return the document."""
    where = "in a network of its own that has only the loopback" if is_offline else "on loopback"
    return TEMPLATE.read_text().format(
        where=where,
        lines="\n".join(map(_line, ran)),
        num_passed=sum(not each.fault for each in ran if each.row.capture != RELAY),
        num_rows=sum(each.row.capture != RELAY for each in ran),
    )


def is_offline() -> bool:
    """Whether this process sees no network except loopback."""
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    return {line.partition(":")[0].strip() for line in lines} == {"lo"}


def _line(ran: Ran) -> str:
    client, dialect, mode, capture = ran.row
    rate = f"{ran.num_extending} of {ran.num_calls - 1}" if ran.num_calls > 1 else "-"
    claims = [rate, _counts(ran.forks), _counts(ran.healed)]
    cells = [
        client.name,
        client.package,
        dialect,
        mode,
        "**relay**" if capture == RELAY else capture,
        f"**fails**: {ran.fault}" if ran.fault else "pass",
        str(ran.num_calls),
        *(["not claimed", "-", "-"] if capture == RELAY else claims),
    ]
    return "| " + " | ".join(cells) + " |"


def _counts(counts: Mapping[str, int]) -> str:
    parts = [f"{kind.replace('_', ' ')} {num}" for kind, num in sorted(counts.items()) if num]
    return ", ".join(parts) or "none"
