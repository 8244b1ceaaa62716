"""docs/clients.md: one line per client, dialect and mode, from what a run of all of them showed."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.clients.roster import Row

PAGE = """# Clients

Written by `make test-clients`; do not edit. Each line is one client that ran the task of
`tests/clients/script.py` through `rollmesh gateway` in tokens mode, {where}, before a scripted
engine that answers in real tokens: reasoning, a tool call, two calls at once, a final text. A line
*passes* if the client ended well and saw every call and the answer, and if the session's samples
are what the engine was asked and answered: every prompt and answer token for token, each sampled
token trained once, each log-prob the engine's own.

- *exact prefix*: of the calls after a session's first, those whose prompt began with all tokens,
  sampled ones included, of an earlier call. The rest are forks.
- *forks*: by cause. Only a call beside the task (a title) may fork here.
- *healed*: where a client wrote a turn back differently than it was sampled, and it was recognised.

| client | version | dialect | mode | result | calls | exact prefix | forks | healed |
|---|---|---|---|---|---|---|---|---|
{lines}

{num_passed} of {num_rows} pass. Relay mode is not in the table: what it forwards is not exact.
"""


class Ran(NamedTuple):
    """What a task came to."""

    row: Row
    num_calls: int = 0
    num_extending: int = 0
    forks: Mapping[str, int] = Counter()
    healed: Mapping[str, int] = Counter()
    fault: str = ""
    """Why it did not pass, in a line."""


def page(ran: Sequence[Ran], is_offline: bool) -> str:
    """The document."""
    where = "in a network of its own that has only the loopback" if is_offline else "on loopback"
    return PAGE.format(
        where=where,
        lines="\n".join(map(_line, ran)),
        num_passed=sum(not each.fault for each in ran),
        num_rows=len(ran),
    )


def is_offline() -> bool:
    """This process sees no network but the loopback."""
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    return {line.partition(":")[0].strip() for line in lines} == {"lo"}


def _line(ran: Ran) -> str:
    client, dialect, mode = ran.row
    rate = f"{ran.num_extending} of {ran.num_calls - 1}" if ran.num_calls > 1 else "-"
    cells = [
        client.name,
        client.package,
        dialect,
        mode,
        f"**fails**: {ran.fault}" if ran.fault else "pass",
        str(ran.num_calls),
        rate,
        _counts(ran.forks),
        _counts(ran.healed),
    ]
    return "| " + " | ".join(cells) + " |"


def _counts(counts: Mapping[str, int]) -> str:
    told = [f"{kind.replace('_', ' ')} {num}" for kind, num in sorted(counts.items()) if num]
    return ", ".join(told) or "none"
