"""A gateway's journal is written as other releases read it, or says that it is not."""

import msgspec

from tests.golden.gateway_journal import FILE, KINDS, shapes

FROZEN = msgspec.json.decode(FILE.read_bytes())


def test_entries_and_deeds_look_as_they_were_frozen_under_this_format() -> None:
    now = shapes()
    changed = [name for name in KINDS if now[name] != FROZEN[name]]
    why = "raise FORMAT in archive/entries.py, then python -m tests.golden.gateway_journal"
    assert changed == [], why
    assert now["format"] == FROZEN["format"]
