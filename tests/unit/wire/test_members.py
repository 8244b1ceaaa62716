"""A hub accepts from each key the messages of its role, under its own names, until its removal."""

import functools
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from rollmesh.core.errors import AddressError
from rollmesh.core.ids import GroupId
from rollmesh.wire.fleet import AddEngine, DropEngine, JoinEngine, ListEngines, ReadFleet
from rollmesh.wire.frames import Packet
from rollmesh.wire.header import Message
from rollmesh.wire.keys import Keys, Role, add_member, new_keys, read_key_file, remove_member
from rollmesh.wire.members import ROUTER, SINK, Access
from rollmesh.wire.messages import (
    AskAddresses,
    AskDrain,
    AskGroup,
    CancelGroup,
    ClientHello,
    ClientLeft,
    GroupDelivered,
    GroupFinished,
    GroupNews,
    GroupStarted,
    WorkerExited,
    WorkerLeft,
)
from rollmesh.wire.sockets import Dialer, Hub, check_admitted, refusal, wait

LAST = AskAddresses(99)


class KeyRing:
    """A key folder, a hub, and dialers that hold its keys."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self.hub_keys = new_keys(folder)
        self._stack = stack
        self.hub = self.bind(self.hub_keys, Access(self.hub_keys, ROUTER))

    def bind(self, keys: Keys, access: Access) -> Hub:
        hub = Hub("tcp://127.0.0.1:0", keys, access=access)
        self._stack.callback(hub.close)
        return hub

    @functools.cache  # noqa: B019 - a ring ends with its test
    def keys(self, name: str) -> Keys:
        return read_key_file(self.folder / f"{name}.json")

    def dial(self, name: str, hub: Hub | None = None) -> Dialer:
        dialer = Dialer((hub or self.hub).peer_address, name, self.keys(name))
        self._stack.callback(dialer.close)
        return dialer

    def accepted(self, *sent: tuple[str, Message]) -> list[Message]:
        """Send each message with the key of that name; return those that the hub accepts."""
        accepted: list[Message] = []
        for name, message in sent:
            dialer = self.dial(name)
            dialer.send(Packet(message))  # type: ignore[arg-type]
            dialer.send(Packet(ReadFleet(1)))
            dialer.send(Packet(LAST))
            before = self.hub.num_refused + len(accepted)
            while self.hub.num_refused + len(accepted) < before + 3:
                wait([self.hub], None, 10.0)
                accepted += [packet.message for _, packet in self.hub.receive()]
        return [each for each in accepted if each != LAST and not isinstance(each, ReadFleet)]


@pytest.fixture
def ring(tmp_path: Path) -> Iterator[KeyRing]:
    with ExitStack() as stack:
        yield KeyRing(tmp_path / "keys", stack)


def ask(client_id: str, run_id: str) -> AskGroup:
    return AskGroup(GroupId(run_id, 0), client_id, "echo", 1, "tcp://127.0.0.1:9")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("worker", AskDrain(1, "w", "")),
        ("worker", JoinEngine(1, "http://127.0.0.1:1")),
        ("worker", AddEngine(1, "http://127.0.0.1:1")),
        ("worker", DropEngine(1, "http://127.0.0.1:1")),
        ("worker", ListEngines(1)),
        ("client", AddEngine(1, "http://127.0.0.1:1")),
        ("publisher", AddEngine(1, "http://127.0.0.1:1")),
        ("publisher", DropEngine(1, "http://127.0.0.1:1")),
        ("operator", JoinEngine(1, "http://127.0.0.1:1")),
        ("worker", ask("c", "r")),
        ("worker", WorkerExited("w", 1, "")),
        ("client", JoinEngine(1, "http://127.0.0.1:1")),
        ("client", AskDrain(1, "w", "")),
        ("client", WorkerLeft("w", "")),
        ("operator", WorkerLeft("w", "")),
        ("operator", ask("c", "r")),
        ("node", ClientHello("c")),
    ],
)
def test_a_message_that_the_role_may_not_send_is_dropped(
    ring: KeyRing, name: str, message: Message
) -> None:
    assert ring.accepted((name, message)) == []
    assert ring.accepted(("hub", message)) == [message]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("worker", WorkerLeft("w", "")),
        ("client", ask("c", "r")),
        ("publisher", ask("c", "r")),
        ("publisher", JoinEngine(1, "http://127.0.0.1:1")),
        ("operator", AskDrain(1, "w", "")),
        ("operator", WorkerExited("w", 1, "")),
        ("operator", AddEngine(1, "http://127.0.0.1:1", True)),
        ("operator", DropEngine(1, "http://127.0.0.1:1", True, True, True)),
        ("operator", ListEngines(1)),
    ],
)
def test_a_message_of_the_role_is_accepted(ring: KeyRing, name: str, message: Message) -> None:
    assert ring.accepted((name, message)) == [message]


def test_news_is_checked_message_by_message(ring: KeyRing) -> None:
    of_worker = GroupStarted(GroupId("r", 0), 0), GroupDelivered(GroupId("r", 1), 0)
    assert ring.accepted(("worker", of_worker[0])) == [of_worker[0]]
    dialer = ring.dial("client")
    dialer.send(Packet(GroupNews(of_worker)))
    dialer.send(Packet(LAST))
    wait([ring.hub], None, 10.0)
    assert [packet.message for _, packet in ring.hub.receive()] == [LAST]


@pytest.mark.parametrize(
    ("role", "first", "second"),
    [
        (Role.WORKER, WorkerLeft("w", ""), WorkerLeft("w", "forged")),
        (Role.CLIENT, ClientHello("c"), ClientLeft("c")),
        (Role.CLIENT, ask("c", "r"), CancelGroup(GroupId("r", 0), "forged")),
        (Role.CLIENT, ask("c", "r"), ask("d", "r")),
    ],
)
def test_a_name_belongs_to_the_key_that_used_it_first(
    ring: KeyRing, role: Role, first: Message, second: Message
) -> None:
    add_member(ring.folder, role, "other")
    assert ring.accepted((role, first), ("other", second)) == [first]
    assert ring.accepted((role, second)) == [second]


def test_a_workers_name_that_names_a_key_belongs_to_that_key(ring: KeyRing) -> None:
    add_member(ring.folder, Role.WORKER, "worker-0")
    left = WorkerLeft("worker-0", "")
    assert ring.accepted(("worker", left)) == []
    assert ring.accepted(("worker-0", left)) == [left]


def test_the_names_of_a_removed_key_are_free(ring: KeyRing) -> None:
    add_member(ring.folder, Role.CLIENT, "old")
    assert ring.accepted(("old", ClientHello("c"))) == [ClientHello("c")]
    remove_member(ring.folder, "old")
    assert ring.accepted(("client", ClientHello("c"))) == [ClientHello("c")]


def test_a_removed_key_is_refused_also_on_an_open_connection(ring: KeyRing) -> None:
    hub = ring.bind(ring.hub_keys, Access(ring.hub_keys, ROUTER, look_again_s=-1.0))
    keys, dialer = ring.keys("client"), ring.dial("client", hub)
    dialer.send(Packet(LAST))
    wait([hub], None, 10.0)
    assert [packet.message for _, packet in hub.receive()] == [LAST]
    remove_member(ring.folder, "client")
    dialer.send(Packet(LAST))
    wait([hub], None, 10.0)
    assert [packet.message for _, packet in hub.receive()] == []
    assert hub.num_refused == 1
    assert "refuses our key" in refusal(hub.address, keys)


def test_an_added_key_is_accepted_at_once(ring: KeyRing) -> None:
    add_member(ring.folder, Role.WORKER, "late")
    assert refusal(ring.hub.address, ring.keys("late")) == ""


def test_a_member_cannot_bind_as_the_hub(ring: KeyRing) -> None:
    """Peers check the hub's key, and a member's socket has another."""
    impostor = ring.bind(ring.keys("worker"), Access(ring.keys("worker"), ROUTER))
    assert "hub's key" in refusal(impostor.address, ring.keys("client"))
    dialer = Dialer(impostor.address, "client", ring.keys("client"))
    dialer.send(Packet(LAST))
    wait([impostor], None, 0.3)
    assert list(impostor.receive()) == []
    dialer.close()


def test_a_clients_sink_has_the_clients_own_key(ring: KeyRing) -> None:
    keys = ring.keys("client")
    sink = ring.bind(keys, Access(keys, SINK))
    assert sink.peer_address == f"{sink.address}#{keys.public}"
    dialer = ring.dial("worker", sink)
    finished = GroupFinished(GroupId("r", 0), 0, "w", True)
    dialer.send(Packet(finished))
    wait([sink], None, 10.0)
    assert [packet.message for _, packet in sink.receive()] == [finished]
    stranger = ring.dial("operator", sink)
    stranger.send(Packet(finished))
    dialer.send(Packet(finished))
    wait([sink], None, 10.0)
    assert len(list(sink.receive())) <= 2
    assert sink.num_refused <= 1


def test_a_route_cannot_be_guessed(ring: KeyRing) -> None:
    one, two = ring.dial("worker"), ring.dial("worker")
    for dialer in (one, two):
        dialer.send(Packet(WorkerLeft("w", "")))
    routes: set[bytes] = set()
    while len(routes) < 2:
        wait([ring.hub], None, 10.0)
        routes |= {route for route, _ in ring.hub.receive()}
    assert all(route.startswith(b"worker~") and len(route) == 23 for route in routes)


def test_refusals_are_logged_at_powers_of_two(
    ring: KeyRing, capsys: pytest.CaptureFixture[str]
) -> None:
    access = Access(ring.hub_keys, ROUTER)
    worker = ring.keys("worker").public
    capsys.readouterr()
    for _ in range(1000):
        assert not access.takes(worker, JoinEngine(1, "http://127.0.0.1:1"))
    assert access.num_refused == 1000
    assert capsys.readouterr().out.count("message.refused") <= 10


@pytest.mark.parametrize("has_keys", [True, False])
def test_a_dial_without_a_valid_key_fails_at_once_in_one_line(
    ring: KeyRing, tmp_path: Path, has_keys: bool
) -> None:
    keys = new_keys(tmp_path / "others") if has_keys else None
    with pytest.raises(AddressError, match=f"^{ring.hub.address}: .*ROLLMESH_KEYS"):
        check_admitted(ring.hub.address, keys)


def test_an_unreachable_address_is_not_a_refusal() -> None:
    assert refusal("tcp://127.0.0.1:1", None) == ""
