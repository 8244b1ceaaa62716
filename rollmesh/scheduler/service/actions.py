"""What the scheduler's machine asks for: rows for its journal, messages, and lines for its log.

Invariants: of one step the Write comes first, there is at most one, and its shell carries nothing
of that step out before the rows are kept, all or none; a Send may be lost. Values only; driven by
scheduler.py and by whoever carries the actions out: process.py, and the simulator.
"""

import msgspec

from rollmesh.wire.machine import Received, Send, Ticked


class Put(msgspec.Struct, frozen=True):
    """The record of `key` in `table` is this from now on."""

    table: str
    key: str
    raw: bytes
    """The record, msgpack: what a row says does not change with what it was taken from."""


class Drop(msgspec.Struct, frozen=True):
    """There is none any more."""

    table: str
    key: str


class Happened(msgspec.Struct, frozen=True):
    """From `at_s` on, until the next of its GPU: who stands on a GPU, and how."""

    at_s: float
    gpu: int
    pipeline_id: str
    """'' where nobody does."""
    cluster: str
    rank: int
    """Of the generation worker; -1 is a fixed cluster."""
    phase: str
    """That of a worker; `held` by a fixed cluster; `free`."""


Row = Put | Drop | Happened


class Write(msgspec.Struct, frozen=True):
    """Keep these rows, in one transaction."""

    rows: tuple[Row, ...]


class Note(msgspec.Struct, frozen=True):
    """A line for the log."""

    event: str
    """`noun.verbed`."""
    pipeline_id: str
    detail: str
    is_warning: bool = True


Event = Received | Ticked
Action = Write | Send | Note
