"""Results of checks: one line each, with a remedy unless the check passed."""

import enum
from pathlib import Path

import msgspec

from rollmesh.core.config import Config
from rollmesh.core.text import printable


class Level(enum.StrEnum):
    """How a check ended."""

    OK = "ok"
    WARN = "warn"
    """The run starts, and may be slow or lose time."""
    FAIL = "FAIL"
    """The run does not start, or cannot finish."""


class Part(enum.StrEnum):
    """A kind of process that runs on a machine."""

    ROUTER = "router"
    TRAINER = "trainer"
    ENGINE = "engine"
    WORKER = "worker"


class Finding(msgspec.Struct, frozen=True):
    """The result of one check."""

    check: str
    level: Level
    text: str
    remedy: str = ""

    @property
    def line(self) -> str:
        """The line for a terminal."""
        remedy = f"; {self.remedy}" if self.remedy else ""
        return printable(f"{self.level:<4} {self.check}: {self.text}{remedy}")


def ok(check: str, text: str) -> Finding:
    """Return the result of a check that passed."""
    return Finding(check, Level.OK, text)


def warn(check: str, text: str, remedy: str) -> Finding:
    """Return the result of a check that found a lesser fault."""
    return Finding(check, Level.WARN, text, remedy)


def fail(check: str, text: str, remedy: str) -> Finding:
    """Return the result of a check that found a fault."""
    return Finding(check, Level.FAIL, text, remedy)


def failed(check: str, error: Exception, remedy: str) -> Finding:
    """Return a failure; the remedy is the last part of the error's text, or `remedy`."""
    text, mark, named = str(error).rpartition("; ")
    return fail(check, text, named) if mark else fail(check, named, remedy)


class MachinePlan(msgspec.Struct, frozen=True, kw_only=True):
    """The processes that are to run on this machine, and their settings."""

    config: Config
    parts: frozenset[Part]
    router: str = ""
    """tcp:// address of a router that runs already; '' before the start."""
    run: Path | None = None
    """Run folder with the keys; None for ROLLMESH_KEYS."""

    def has(self, *parts: Part) -> bool:
        """Return whether one of these runs here."""
        return not self.parts.isdisjoint(parts)

    @property
    def starts_engines(self) -> bool:
        """Whether the run starts engines here."""
        return self.has(Part.ENGINE) and not self.config.engine.urls
