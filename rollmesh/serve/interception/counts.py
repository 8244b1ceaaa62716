"""What stands behind an edge or a relay, for the inventory of its process.

Invariant: bytes are counted where they lie: a blob once, however many sessions show it, and not at
all while it is on disk. Driven by the worker's process and by the gateway's backends.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from rollmesh.core.inventory import Inventory
from rollmesh.engine.http import HttpClient
from rollmesh.runtime import blobs
from rollmesh.runtime.images import images
from rollmesh.runtime.registry import Runtime
from rollmesh.runtime.sampler import Sampler
from rollmesh.serve.interception.bodies import Bodies
from rollmesh.serve.interception.book import SessionBook
from rollmesh.serve.interception.edge import Edge
from rollmesh.serve.interception.relay.capture import RelayCapture


def add_blobs(inventory: Inventory) -> None:
    """The process's blobs, and the images that are some of them."""
    inventory.add(
        lambda: {"blobs": blobs.held_bytes()},
        lambda: {"blobs": blobs.num_blobs(), "images": len(images)},
    )


def add_bodies(
    inventory: Inventory, bodies: Bodies, num_open: Callable[[], int], num_kept: Callable[[], int]
) -> None:
    """An HTTP face: bodies in flight, exchanges that run, connections that are kept."""
    inventory.add(
        lambda: {"bodies": bodies.held_bytes},
        lambda: {"bodies": bodies.num_held, "exchanges": num_open()},
        lambda: {"connections": num_kept()},
    )


def add_edge(inventory: Inventory, runtime: Runtime, sampler: Sampler, edge: Edge) -> None:
    """An edge that samples, its sessions and what goes on at engines."""
    none = {"graph": 0, "history": 0}
    inventory.add(lambda: but_blobs([none, runtime.held()]), runtime.entries, runtime.cache_entries)
    inventory.add(None, sampler.entries, sampler.cache_entries)
    add_bodies(inventory, edge.bodies, lambda: edge.num_open, lambda: edge.num_connections)


def add_relay(inventory: Inventory, capture: RelayCapture, client: HttpClient) -> None:
    """A relay's doors, and its connections to providers."""
    inventory.add(
        None,
        lambda: {"doors": capture.num_doors},
        lambda: {"engine_connections": client.num_connections},
    )


def add_book(inventory: Inventory, book: SessionBook, *, counts_open: bool) -> None:
    """A gateway's book: its accounts, and its open sessions, unless a runtime counts them."""

    def held() -> Mapping[str, int]:
        finished = [each.finished for each in book.entries() if each.finished]
        counts = Counter(accounts=sum([each.account.num_bytes for each in finished]))
        if counts_open:
            none = {"answers": 0, "history": 0}
            open_ones = [each.captured.held() for each in book.entries() if not each.finished]
            counts.update(but_blobs([none, *open_ones]))
        return counts

    inventory.add(held, lambda: {"sessions": len(book)})


def but_blobs(held: Iterable[Mapping[str, int]]) -> Counter[str]:
    """The sum, without what is counted once for all."""
    counts: Counter[str] = Counter()
    for each in held:
        counts.update(each)
    del counts["blobs"]
    return counts
