"""Hub and Dialer on real loopback sockets: nothing blocks, nothing malformed is fatal."""

import argparse
import asyncio
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest
import zmq

from rollmesh.cli.options import config_of
from rollmesh.core.config import load_config
from rollmesh.core.errors import AddressError, ConfigError
from rollmesh.wire import sockets
from rollmesh.wire.frames import Packet
from rollmesh.wire.messages import ClientBeat, ClientHello, RouterHello
from rollmesh.wire.sockets import QUEUE_MESSAGES, Dialer, Hub, WakeSignal, wait
from tests.nonsense import nonsense

PATIENCE_S = 60.0


@pytest.fixture
def hub() -> Iterator[Hub]:
    with closing(Hub("tcp://127.0.0.1:0")) as bound:
        yield bound


@pytest.fixture
def dialer(hub: Hub) -> Iterator[Dialer]:
    with closing(Dialer(hub.address, "d1")) as dialled:
        yield dialled


def packets(hub: Hub, number: int) -> list[tuple[bytes, Packet]]:
    """Receive `number` packets; malformed messages also end a wait."""
    found: list[tuple[bytes, Packet]] = []
    end_s = time.monotonic() + PATIENCE_S
    while len(found) < number:
        assert time.monotonic() < end_s, "no message arrived"
        wait([hub], None, PATIENCE_S)
        found += hub.receive()
    return found


def test_the_hub_sees_the_sender_and_can_answer(hub: Hub, dialer: Dialer) -> None:
    assert dialer.send(Packet(ClientHello("c"), "i0", b"body", (b"buffer",)))
    [(route, packet)] = packets(hub, 1)
    assert route == b"d1"
    assert packet == Packet(ClientHello("c"), "i0", b"body", (b"buffer",))
    assert hub.send(route, Packet(RouterHello(0.5), "i1"))
    wait([dialer], None, PATIENCE_S)
    assert list(dialer.receive()) == [Packet(RouterHello(0.5), "i1")]


def test_a_send_to_an_unknown_peer_fails_and_is_counted(hub: Hub) -> None:
    assert not hub.send(b"unknown", Packet(RouterHello(0.5)))
    assert hub.num_unsent == 1


def test_a_malformed_message_is_counted_and_the_next_one_is_received(
    hub: Hub, dialer: Dialer
) -> None:
    dialer.socket.send_multipart([b"rubbish"])
    dialer.socket.send_multipart([b"\xc1", b""])
    dialer.send(Packet(ClientHello("c")))
    [(_, packet)] = packets(hub, 1)
    assert packet.message == ClientHello("c")
    assert hub.num_malformed == 2


def test_a_dialer_skips_malformed_messages(hub: Hub, dialer: Dialer) -> None:
    dialer.send(Packet(ClientHello("c")))
    packets(hub, 1)
    hub.socket.send_multipart([b"d1", b"rubbish"])
    hub.send(b"d1", Packet(RouterHello(0.5)))
    end_s, received = time.monotonic() + PATIENCE_S, list(dialer.receive())
    while not received:  # a malformed message also ends a wait
        assert time.monotonic() < end_s, "no message arrived"
        wait([dialer], None, PATIENCE_S)
        received = list(dialer.receive())
    assert [packet.message for packet in received] == [RouterHello(0.5)]
    assert dialer.num_malformed == 1


def test_queues_are_finite_and_a_full_one_does_not_block() -> None:
    with closing(Dialer("tcp://127.0.0.1:9", "lonely")) as lonely:
        sent = sum(lonely.send(Packet(ClientHello("c"))) for _ in range(QUEUE_MESSAGES + 100))
        assert sent == QUEUE_MESSAGES
        assert lonely.num_unsent == 100


def test_a_dialer_may_dial_before_the_hub_exists(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/hub"
    with closing(Dialer(address, "early")) as early:
        early.send(Packet(ClientHello("early")))
        with closing(Hub(address)) as late:
            [(route, _)] = packets(late, 1)
            assert route == b"early"


def test_a_new_process_of_the_same_name_takes_over_its_route(hub: Hub, dialer: Dialer) -> None:
    dialer.send(Packet(ClientHello("old")))
    packets(hub, 1)
    with closing(Dialer(hub.address, "d1")) as heir:
        heir.send(Packet(ClientHello("new")))
        packets(hub, 1)
        hub.send(b"d1", Packet(RouterHello(0.5)))
        wait([heir], None, PATIENCE_S)
        assert [p.message for p in heir.receive()] == [RouterHello(0.5)]


@pytest.mark.parametrize("bind", ["tcp://127.0.0.1:notaport", "tcp://no.such.host.invalid:1"])
def test_a_hub_that_cannot_listen_names_the_address(bind: str) -> None:
    with pytest.raises(AddressError):
        Hub(bind)


def test_an_address_in_use_is_refused_in_one_line(hub: Hub) -> None:
    with pytest.raises(AddressError, match=f"{hub.address}: cannot listen there"):
        Hub(hub.address)


def test_a_dialer_without_an_address_gets_an_example() -> None:
    with pytest.raises(AddressError, match="tcp://host:port"):
        Dialer("localhost:5", "d")


async def test_an_attached_dialer_hands_over_every_packet_on_the_loop(
    hub: Hub, dialer: Dialer
) -> None:
    got: asyncio.Queue[Packet] = asyncio.Queue()
    dialer.attach(asyncio.get_running_loop(), got.put_nowait)
    dialer.send(Packet(ClientHello("c")))
    packets(hub, 1)
    for number in range(3000):
        assert hub.send(b"d1", Packet(ClientBeat("c", number)))
    seen = [await asyncio.wait_for(got.get(), PATIENCE_S) for _ in range(3000)]
    assert [p.message for p in seen] == [ClientBeat("c", number) for number in range(3000)]


async def test_sending_on_an_attached_dialer_loses_no_wake_up(hub: Hub, dialer: Dialer) -> None:
    got: asyncio.Queue[Packet] = asyncio.Queue()
    dialer.attach(asyncio.get_running_loop(), got.put_nowait)
    for number in range(200):
        dialer.send(Packet(ClientHello("c")))
        packets(hub, 1)
        hub.send(b"d1", Packet(ClientBeat("c", number)))
        # Another send in between may consume the event that would wake the loop.
        dialer.send(Packet(ClientHello("c")))
        packet = await asyncio.wait_for(got.get(), PATIENCE_S)
        assert packet.message == ClientBeat("c", number)
        packets(hub, 1)


def rung_from_a_thread(bell: WakeSignal) -> None:
    thread = threading.Thread(target=bell.ring)
    thread.start()
    thread.join()


@pytest.mark.parametrize("ring", [WakeSignal.ring, rung_from_a_thread])
def test_a_wake_signal_ends_a_wait_once(hub: Hub, ring: Callable[[WakeSignal], None]) -> None:
    with closing(WakeSignal()) as bell:
        ring(bell)
        ring(bell)
        assert select.select([bell], [], [], 0)[0] == [bell]
        wait([hub], bell, PATIENCE_S)
        assert select.select([bell], [], [], 0)[0] == []
        assert list(hub.receive()) == []


# garbage


def test_a_hub_survives_garbage_from_its_peers(hub: Hub, dialer: Dialer) -> None:
    dialer.socket.setsockopt(zmq.SNDTIMEO, int(PATIENCE_S * 1000))
    for frames in nonsense(seed=1, number=1000):
        dialer.socket.send_multipart(frames)
    dialer.send(Packet(ClientHello("c")))
    [(_, packet)] = packets(hub, 1)
    assert packet.message == ClientHello("c")
    assert hub.num_malformed == 1000


def test_a_dialer_survives_garbage_from_its_hub(hub: Hub, dialer: Dialer) -> None:
    dialer.send(Packet(ClientHello("c")))
    [(route, _)] = packets(hub, 1)
    hub.socket.setsockopt(zmq.SNDTIMEO, int(PATIENCE_S * 1000))
    for frames in nonsense(seed=2, number=1000):
        hub.socket.send_multipart([route, *frames])
    assert hub.send(route, Packet(RouterHello(0.5)))
    received: list[Packet] = []
    end_s = time.monotonic() + PATIENCE_S
    while not received:
        assert time.monotonic() < end_s, "no message arrived"
        wait([dialer], None, PATIENCE_S)
        received += dialer.receive()
    assert [packet.message for packet in received] == [RouterHello(0.5)]
    assert dialer.num_malformed == 1000


def test_an_oversized_frame_ends_only_its_connection() -> None:
    with (
        closing(Hub("tcp://127.0.0.1:0", max_frame_bytes=1000)) as hub,
        closing(Dialer(hub.address, "large")) as large,
        closing(Dialer(hub.address, "small")) as small,
    ):
        large.send(Packet(ClientHello("large"), body=bytes(2000)))
        small.send(Packet(ClientHello("small"), body=bytes(900)))
        [(route, _)] = packets(hub, 1)
        assert route == b"small"
        # It reconnects by itself; messages sent before that are lost with the oversized one.
        received: list[bytes] = []
        end_s = time.monotonic() + PATIENCE_S
        while not received:
            assert time.monotonic() < end_s, "no message arrived"
            large.send(Packet(ClientHello("large"), body=bytes(900)))
            wait([hub], None, 0.05)
            received += [route for route, _ in hub.receive()]
        assert set(received) == {b"large"}


def test_a_body_that_is_queued_repeatedly_is_in_memory_once() -> None:
    long = bytes(2**22)
    before = psutil.Process().memory_info().rss
    with closing(Dialer("tcp://127.0.0.1:1", "d2")) as unconnected:
        for _ in range(64):
            assert unconnected.send(Packet(ClientHello("c"), body=long, buffers=(long,)))
        assert psutil.Process().memory_info().rss - before < 64 * len(long)


@pytest.mark.parametrize("greeting", [b"", b"\xff", b"\xff" + bytes(8) + b"\x7f\x03"])
def test_an_incomplete_handshake_is_disconnected(
    monkeypatch: pytest.MonkeyPatch, greeting: bytes
) -> None:
    monkeypatch.setattr(sockets, "HANDSHAKE_S", 0.2)
    with closing(Hub("tcp://127.0.0.1:0")) as hub:
        port = int(hub.address.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as stranger:
            stranger.sendall(greeting)
            received = b"".join(iter(lambda: stranger.recv(100), b""))  # until the end
            assert received == b"" or received.startswith(b"\xff")  # the hub's half of the greeting


KEEPALIVE, ESTABLISHED = "02", "01"


@pytest.mark.parametrize("side", ["hub", "dialer"])
def test_connections_have_keepalive_at_both_ends(hub: Hub, dialer: Dialer, side: str) -> None:
    """The kernel probes a silent peer: /proc/self/net/tcp shows a keepalive timer (proc(5))."""
    dialer.send(Packet(ClientHello("c")))
    packets(hub, 1)
    port = f"{int(hub.address.rpartition(':')[2]):04X}"
    column = 1 if side == "hub" else 2
    end_s = time.monotonic() + PATIENCE_S
    while True:
        rows = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()]
        ours = [r for r in rows if r[column].endswith(f":{port}") and r[3] == ESTABLISHED]
        if [row[5].partition(":")[0] for row in ours] == [KEEPALIVE]:
            break
        assert time.monotonic() < end_s, (
            "no keepalive timer"
        )  # at first the kernel may wait for acks


FEW_DESCRIPTORS = """
import os, resource
from rollmesh.core.errors import AddressError
from rollmesh.wire.sockets import Dialer, WakeSignal, Hub
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
taken, errors = [], set()
try:
    while True:
        taken.append(os.dup(2))
except OSError:
    pass
for _ in range(30):
    for kind in WakeSignal, lambda: Hub("tcp://127.0.0.1:0"), lambda: Dialer("tcp://x:1", "d"):
        try:
            kind().close()
        except AddressError as error:
            errors.add(str(error))
    os.close(taken.pop())
for each in taken:
    os.close(each)
Hub("tcp://127.0.0.1:0").close()
print(*errors)
"""


def test_a_socket_that_cannot_be_opened_is_an_error_in_one_line() -> None:
    """Try with 0 to 29 free descriptors; zmq's first socket needs the most."""
    argv = [sys.executable, "-c", FEW_DESCRIPTORS]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == (
        "no socket can be opened: too many open files; raise the limit: ulimit -n\n"
    )


def silence_options() -> tuple[dict[str, int], dict[str, int]]:
    """The silence options of a socket of messages, and of an HTTP connection."""
    with closing(Dialer("tcp://127.0.0.1:9", "dialer")) as dialer, socket.socket() as connected:
        sockets.notice_death(connected)
        of_zmq = zmq.TCP_KEEPALIVE_IDLE, zmq.TCP_KEEPALIVE_INTVL, zmq.TCP_KEEPALIVE_CNT
        idle, probe, num_probes = [int(dialer.socket.getsockopt(each)) for each in of_zmq]
        dead_ms = int(dialer.socket.getsockopt(zmq.TCP_MAXRT))
        assert idle + probe * num_probes == dead_ms // 1000
        names = {"idle": socket.TCP_KEEPIDLE, "probe": socket.TCP_KEEPINTVL}
        names["dead_ms"] = socket.TCP_USER_TIMEOUT
        http = {key: connected.getsockopt(socket.IPPROTO_TCP, at) for key, at in names.items()}
        return {"idle": idle, "probe": probe, "dead_ms": dead_ms}, http


def test_the_time_until_a_silent_connection_is_closed_is_a_setting() -> None:
    options = argparse.Namespace(config=None, overrides=["network.silence_timeout_s=60"])
    try:
        config_of(options)
        slow = silence_options()
    finally:
        options.overrides.clear()
        config_of(options)
    assert slow == ({"idle": 24, "probe": 12, "dead_ms": 60_000},) * 2
    assert silence_options() == ({"idle": 4, "probe": 2, "dead_ms": 10_000},) * 2


@pytest.mark.parametrize("value", ["2.9", "3601"])
def test_the_time_until_a_silent_connection_is_closed_has_limits(value: str) -> None:
    with pytest.raises(ConfigError, match=r"silence_timeout_s = .*: use 3 to 3600"):
        load_config(None, [f"network.silence_timeout_s={value}"])


def test_a_closed_wake_signal_does_not_touch_a_reused_descriptor(tmp_path: Path) -> None:
    bell = WakeSignal()
    number = bell.fileno()
    bell.close()
    with (tmp_path / "other").open("w+b", buffering=0) as other:
        assert other.fileno() == number, "the system reuses the lowest free number"
        bell.ring()
        bell.hush()
        bell.close()
        assert os.fstat(number).st_size == 0
        with pytest.raises(ValueError, match="closed"):
            bell.fileno()


@pytest.mark.timeout(60)
def test_a_hub_that_many_peers_have_just_left_closes() -> None:
    hub = Hub("tcp://127.0.0.1:0")
    host, _, port = hub.address.removeprefix("tcp://").rpartition(":")
    for _ in range(3000):  # more than zmq keeps of unread events
        with socket.create_connection((host, int(port))) as peer:
            peer.recv(1)
    hub.close()
    assert hub.socket.closed
