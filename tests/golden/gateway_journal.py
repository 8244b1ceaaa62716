"""What the entries and deeds of a gateway's journal look like, and the file that freezes that.

    python -m tests.golden.gateway_journal     writes gateway_journal.json anew; only together with
                                               a new FORMAT

Invariant: every field with its type and its default stands there, and no word of a docstring.
Driven by test_gateway_journal.py.
"""

from pathlib import Path
from typing import Any

import msgspec

from rollmesh.runtime.deeds import AnyDeed
from rollmesh.serve.interception.archive.entries import FORMAT, AnyEntry
from rollmesh.serve.interception.relay.deeds import RelayDeed

FILE = Path(__file__).with_name("gateway_journal.json")
KINDS = {"entries": AnyEntry, "tokens": AnyDeed, "relay": RelayDeed}


def shapes() -> dict[str, Any]:
    """As they are now."""
    told = {name: _but_words(msgspec.json.schema(kind)) for name, kind in KINDS.items()}
    shape: dict[str, Any] = msgspec.json.decode(msgspec.json.encode({"format": FORMAT, **told}))
    return shape


def _but_words(shape: Any, *, is_set: bool = False) -> Any:
    if isinstance(shape, dict):
        return {
            key: _but_words(each, is_set=key in ("anyOf", "enum"))
            for key, each in shape.items()
            if key != "description"
        }
    if not isinstance(shape, list):
        return shape
    rows = [_but_words(each) for each in shape]
    return (
        sorted(rows, key=lambda row: msgspec.json.encode(row, order="sorted")) if is_set else rows
    )


if __name__ == "__main__":
    FILE.write_bytes(msgspec.json.format(msgspec.json.encode(shapes(), order="sorted")) + b"\n")
