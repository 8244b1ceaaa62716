"""What the gateway shows of itself to Prometheus.

Invariant: everything is read from plain numbers when somebody scrapes; nothing is counted twice and
no label is an id. Driven by the exposition of the gateway.
"""

import asyncio
from collections import Counter
from collections.abc import Iterator

from rollmesh.core.metrics import Figure
from rollmesh.serve.interception.archive.archive import Archive
from rollmesh.serve.interception.backends import Backend
from rollmesh.serve.interception.book import SessionBook

LAG_PROBE_S = 0.25


class LoopLag:
    """How late the event loop is; the worst since it was asked last."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._worst_s = 0.0
        self._due_s = 0.0
        self._timer = loop.call_soon(self._probe)

    def take(self) -> float:
        """Seconds."""
        worst_s, self._worst_s = self._worst_s, 0.0
        return worst_s

    def close(self) -> None:
        """Probe no more."""
        self._timer.cancel()

    def _probe(self) -> None:
        now_s = self._loop.time()
        if self._due_s:
            self._worst_s = max(self._worst_s, now_s - self._due_s)
        self._due_s = now_s + LAG_PROBE_S
        self._timer = self._loop.call_at(self._due_s, self._probe)


def gateway_figures(book: SessionBook, backend: Backend, lag: LoopLag) -> Iterator[Figure]:
    """A source for the exposition, but for its arguments."""
    for (route, state), number in backend.exchanges().items():
        labels = {"dialect": route.strip("/"), "state": state}
        yield Figure("exchanges_total", number, "Agents' requests by their end.", labels)
    yield Figure("exchanges_open", backend.num_open(), "Agents' requests that run.")
    yield Figure("live_legs", backend.num_live(), "Calls that engines work on.")
    num_calls, num_tokens = backend.totals()
    yield Figure("calls_total", num_calls, "Calls that asked for sampling.")
    yield Figure("sampled_tokens_total", num_tokens, "Sampled tokens; 0 in a relay.")
    phases: Counter[str] = Counter()
    for engine in backend.engines():
        phase, labels = engine["phase"], {"engine": engine["url"]}
        phases[phase] += 1
        yield Figure("engine_ready", phase == "ready", "Whether it may be used.", labels)
    for phase, number in phases.items():
        yield Figure("engines", number, "Engines by phase.", {"phase": phase})
    yield from _book_figures(book)
    yield Figure("loop_lag_seconds", lag.take(), "Worst lag of the event loop since last asked.")


def archive_figures(archive: Archive) -> Iterator[Figure]:
    """A source for the exposition: what outlives the gateway."""
    yield Figure("journal_bytes", archive.journal.size_bytes, "Of the gateway's journal.")
    yield Figure("journal_live_bytes", archive.live_bytes, "Of it, what sessions still need.")


def _book_figures(book: SessionBook) -> Iterator[Figure]:
    num_sessions = num_finished = 0
    for entry in book.entries():
        num_sessions += 1
        num_finished += entry.finished is not None
    states = {
        "open": num_sessions - num_finished,
        "finished": num_finished,
        "set_aside": len(book.aside),
    }
    for state, number in states.items():
        yield Figure("sessions", number, "Sessions in the book.", {"state": state})
    yield Figure("sessions_opened_total", book.num_opened, "Sessions opened.")
    yield Figure("sessions_expired_total", book.num_expired, "Sessions that nobody deleted.")
    for cause, number in book.forks().items():
        yield Figure("forks_total", number, "Histories that did not go on.", {"cause": cause})
    for kind, number in book.healed().items():
        yield Figure("healed_total", number, "Differences that did not fork.", {"kind": kind})
