"""The clients: they come, fall silent, speak again or leave, and what becomes of their groups.

    PRESENT --missed beats--> AWAY --a word--> PRESENT
    PRESENT, AWAY --ClientLeft--> forgotten    which one that keeps its groups says if it is done
    AWAY --client_grace_s, KEPT_S if it keeps groups--> forgotten

Invariants: groups of a client that is away go on, behind those of all that are there (groups.py,
deals.py); with a client its groups are cancelled; of one that keeps them nothing ends for good: it
is told nothing, and what it asks for again from its journal begins anew. Driven by ledger.py.
"""

import msgspec

from rollmesh.core.config import RouterConfig
from rollmesh.serve.router.book import CLIENT_LEFT, Book
from rollmesh.serve.router.deals import Deals
from rollmesh.serve.router.groups import Client, Group
from rollmesh.wire.messages import ClientHello, GroupFailed

MAX_WEIGHT = 1000
"""More turns in a row no client gets."""
KEPT_S = 3600.0
"""Who starts a dead trainer again has done so by then; of one that was given up the results would
fill the workers for ever."""


class Forgotten(msgspec.Struct, frozen=True):
    """A client that was given up while it had groups."""

    client_id: str
    num_groups: int
    reason: str


class Clients:
    """See the module; the book has the table."""

    def __init__(self, book: Book, deals: Deals, settings: RouterConfig) -> None:
        self._book = book
        self._deals = deals
        self._patience_s = settings.beat_s * settings.missed_beats
        self._grace_s = self._patience_s + settings.client_grace_s
        self._forgotten: list[Forgotten] = []

    def introduce(self, hello: ClientHello) -> None:
        """One that was just heard says what it is like."""
        client = self._book.clients[hello.client_id]
        client.weight = min(max(hello.weight, 1), MAX_WEIGHT)
        client.keep = hello.keep

    def see_off(self, client_id: str) -> None:
        """It says goodbye, for good."""
        if client := self._book.clients.get(client_id):
            self._forget(client, f"{CLIENT_LEFT}: it said goodbye")

    def is_away(self, client_id: str) -> bool:
        """Whether it has been silent for longer than a client that is there."""
        client = self._book.clients.get(client_id)
        return client is None or self._book.now_s - client.heard_s > self._patience_s

    def let_go(self, group: Group, reason: str) -> None:
        """The group of a client that is away ends here."""
        client = self._book.clients.get(group.client_id)
        if client and client.keep:
            self._deals.take_away(group, tell_worker=reason)
            failed = GroupFailed(group.group_id, reason)
            self._book.end(group, failed, num_attempts=0, is_told=False)
        else:
            self._deals.fail(group, reason)

    def look_after(self) -> None:
        """What time brings: silence."""
        book = self._book
        for client in list(book.clients.values()):
            if not self.is_away(client.client_id):
                continue
            silent_s = book.now_s - client.heard_s
            book.queue.away.add(client.client_id)
            keeps = client.keep and client.client_id in book.of_client
            if silent_s > (max(KEPT_S, self._grace_s) if keeps else self._grace_s):
                reason = f"{CLIENT_LEFT}: silent for {silent_s:.0f} s"
                if num_groups := self._forget(client, reason):
                    self._forgotten.append(Forgotten(client.client_id, num_groups, reason))

    def take_forgotten(self) -> list[Forgotten]:
        """Who was given up since the last call."""
        forgotten, self._forgotten = self._forgotten, []
        return forgotten

    def _forget(self, client: Client, reason: str) -> int:
        """How many groups it had."""
        client_id, book = client.client_id, self._book
        groups = list(book.of_client.get(client_id, {}).values())
        for group in groups:
            self.let_go(group, reason)
        del book.clients[client_id]
        book.queue.away.discard(client_id)
        return len(groups)
