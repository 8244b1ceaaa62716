"""Which state changes a simulation has seen, as `machine: before > after`, so that a test can ask
whether every drawn arrow was walked. Invariant: it only watches; a crash is no transition. Driven
by the nodes, with the states of their machines.
"""

import collections
from collections.abc import Mapping
from typing import Any

NONE = "-"
"""Before something is known, and after it is forgotten."""


class Transitions:
    """Counts arrows, by watching the states of many things of one kind."""

    def __init__(self) -> None:
        self.num = collections.Counter[str]()
        self._last: dict[str, dict[Any, str]] = {}

    def note(self, machine: str, before: str, after: str) -> None:
        """One arrow, unless nothing changed."""
        if before != after:
            self.num[f"{machine}: {before} > {after}"] += 1

    def watch(self, machine: str, states: Mapping[Any, str]) -> None:
        """Compare with the last look at the same machine; what is new or gone counts too."""
        last = self._last.get(machine, {})
        if last == states:
            return
        kind = machine.partition("@")[0]
        for key, state in states.items():
            if (before := last.get(key, NONE)) != state:
                self.num[f"{kind}: {before} > {state}"] += 1
        for key, before in last.items():
            if key not in states:
                self.num[f"{kind}: {before} > {NONE}"] += 1
        self._last[machine] = dict(states)

    def forget(self, machine: str) -> None:
        """A crash is no transition."""
        self._last.pop(machine, None)
