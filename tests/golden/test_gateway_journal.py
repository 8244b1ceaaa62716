"""A gateway's journal keeps its format, or has a new FORMAT number."""

import msgspec

from tests.golden.gateway_journal import FILE, KINDS, shapes, without_names

FROZEN = msgspec.json.decode(FILE.read_bytes())


def test_the_format_is_the_frozen_one() -> None:
    now = shapes()
    changed = [name for name in KINDS if without_names(now[name]) != without_names(FROZEN[name])]
    why = "raise FORMAT in archive/entries.py, then python -m tests.golden.gateway_journal"
    assert changed == [], why
    assert now["format"] == FROZEN["format"]
