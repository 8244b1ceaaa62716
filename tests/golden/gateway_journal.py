"""The format of a gateway's journal, and the file that freezes it.

    python -m tests.golden.gateway_journal     writes gateway_journal.json again; only together
                                               with a new FORMAT

Every field is there with its type and its default. Class names and docstrings are no part of the
format: `without_names` compares without them.
"""

from pathlib import Path
from typing import Any

import msgspec

from rollmesh.runtime.session_log import AnyEvent
from rollmesh.serve.interception.journal.entries import FORMAT, AnyEntry
from rollmesh.serve.interception.relay.events import RelayEvent

FILE = Path(__file__).with_name("gateway_journal.json")
KINDS = {"entries": AnyEntry, "tokens": AnyEvent, "relay": RelayEvent}


def shapes() -> dict[str, Any]:
    """The current schemas."""
    schemas = {name: _without_docs(msgspec.json.schema(kind)) for name, kind in KINDS.items()}
    shape: dict[str, Any] = msgspec.json.decode(msgspec.json.encode({"format": FORMAT, **schemas}))
    return shape


def without_names(shape: dict[str, Any]) -> Any:
    """A schema with each reference replaced by its definition."""
    defs = shape.get("$defs", {})

    def inlined(part: Any) -> Any:
        if isinstance(part, list):
            return [inlined(each) for each in part]
        if not isinstance(part, dict):
            return part
        if "$ref" in part:
            return inlined(defs[part["$ref"].rpartition("/")[2]])
        found = {key: inlined(each) for key, each in part.items() if key not in ("$defs", "title")}
        if "anyOf" in found:  # in the order of class names
            found["anyOf"].sort(key=lambda each: msgspec.json.encode(each, order="sorted"))
        return found

    return inlined(shape)


def _without_docs(shape: Any, *, is_set: bool = False) -> Any:
    if isinstance(shape, dict):
        return {
            key: _without_docs(each, is_set=key in ("anyOf", "enum"))
            for key, each in shape.items()
            if key != "description"
        }
    if not isinstance(shape, list):
        return shape
    rows = [_without_docs(each) for each in shape]
    return (
        sorted(rows, key=lambda row: msgspec.json.encode(row, order="sorted")) if is_set else rows
    )


if __name__ == "__main__":
    FILE.write_bytes(msgspec.json.format(msgspec.json.encode(shapes(), order="sorted")) + b"\n")
