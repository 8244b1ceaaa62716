"""How long the router's tables are, and what it holds, as its snapshot tells.

Invariants: `entries` are of live work, so each is 0 once every group has ended; `cache_entries` are
of peers that are connected, and of notes within bounds, or of a time. Driven by status.py.
"""

from collections.abc import Mapping

from rollmesh.serve.router.ledger import Ledger


def held(ledger: Ledger) -> Mapping[str, int]:
    """Bytes in memory, by what."""
    return {"asks": ledger.book.num_body_bytes}


def entries(ledger: Ledger) -> Mapping[str, int]:
    """By table."""
    book, workers = ledger.book, list(ledger.crew.workers)
    return {
        "groups": len(book.groups),
        "waiting_groups": book.num_waiting,
        "client_groups": sum([len(groups) for groups in book.of_client.values()]),
        "worker_groups": sum([len(worker.groups) for worker in workers]),
    }


def cache_entries(ledger: Ledger, num_engines: int) -> Mapping[str, int]:
    """By cache."""
    book, workers = ledger.book, list(ledger.crew.workers)
    return {
        "clients": len(book.clients),
        "workers": len(workers),
        "lost_groups": sum([len(worker.lost_groups) for worker in workers]),
        "engines": num_engines,
        "notes": len(book.notes),
        "ended_workers": ledger.crew.num_ends,
        "loading_workers": len(ledger.loads.now()),
        "agenda": ledger.deals.num_noted + len(book.deadlines),
    }
