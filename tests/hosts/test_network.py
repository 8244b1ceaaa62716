"""Network namespaces as hosts: what reaches what, with and without faults."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from rollmesh.testing.forwarder import Forwarder
from rollmesh.testing.network import NAMESPACES, HostNetwork, VirtualHost, remove_stale

PORT = 5000
SOON_S = 0.3
"""Time in which a packet that is not lost arrives."""
ARRIVES_WITHIN_S = 30.0


@pytest.fixture
def network() -> Iterator[HostNetwork]:
    with HostNetwork(["one", "other", "third"]) as made:
        yield made


def reaches(sender: VirtualHost, receiver: VirtualHost, within_s: float = SOON_S) -> bool:
    """Whether one of a few datagrams arrives."""
    with sender.socket(socket.SOCK_DGRAM) as out, receiver.socket(socket.SOCK_DGRAM) as into:
        into.bind((receiver.address, PORT))
        into.settimeout(within_s / 3)
        for _ in range(3):
            try:
                out.sendto(b"?", (receiver.address, PORT))
                return into.recv(10) == b"?"
            except (TimeoutError, OSError):
                continue
    return False


def test_hosts_have_addresses_of_their_own_and_reach_each_other(network: HostNetwork) -> None:
    one, other = network["one"], network["other"]
    assert (one.address, other.address) == ("10.77.0.1", "10.77.0.2")
    assert reaches(one, other, ARRIVES_WITHIN_S)
    assert "10.77.0.1" in one.run("ip", "-o", "addr", "show", "eth0")
    outside = subprocess.run(["ip", "-o", "addr"], capture_output=True, text=True, check=True)
    assert "10.77." not in outside.stdout


def test_cut_is_between_two_hosts_and_heals(network: HostNetwork) -> None:
    one, other, third = network["one"], network["other"], network["third"]
    assert reaches(one, other, ARRIVES_WITHIN_S)
    network.cut("one", "other")
    assert not reaches(one, other)
    assert not reaches(other, one)
    assert reaches(one, third, ARRIVES_WITHIN_S)
    network.heal()
    assert reaches(one, other, ARRIVES_WITHIN_S)


def test_disconnected_host_reaches_no_other(network: HostNetwork) -> None:
    network.disconnect("one")
    assert not reaches(network["one"], network["other"])
    assert reaches(network["third"], network["other"], ARRIVES_WITHIN_S)
    network.reconnect("one")
    assert reaches(network["one"], network["other"], ARRIVES_WITHIN_S)


def test_loss_may_be_in_one_direction(network: HostNetwork) -> None:
    one, other = network["one"], network["other"]
    other.drop_from(one)
    assert not reaches(one, other)
    other.drop_none()
    assert reaches(one, other, ARRIVES_WITHIN_S)
    one.lose(1.0)
    assert reaches(one, other, ARRIVES_WITHIN_S)
    assert not reaches(other, one)


def test_connection_survives_a_short_cut(network: HostNetwork) -> None:
    one, other = network["one"], network["other"]
    with other.socket() as listener:
        listener.bind((other.address, PORT))
        listener.listen()
        with one.socket() as client:
            client.connect((other.address, PORT))
            with listener.accept()[0] as served:
                network.cut("one", "other")
                client.sendall(b"first")
                served.settimeout(SOON_S)
                with pytest.raises(TimeoutError):
                    served.recv(10)
                network.heal()
                served.settimeout(ARRIVES_WITHIN_S)
                assert served.recv(10) == b"first"


def test_host_that_vanishes_is_replaced_at_its_address(network: HostNetwork) -> None:
    one = network["one"]
    assert reaches(one, network["other"], ARRIVES_WITHIN_S)
    card = hardware_address_of(network["other"])
    gone = network.vanish("other")
    assert not reaches(one, network["third"]) or gone.namespace not in os.listdir(NAMESPACES)
    process = network["third"].start(["sleep", "1000"])
    network.vanish("third")
    assert process.wait(ARRIVES_WITHIN_S) == -signal.SIGKILL
    other = network.add("other", gone.address)
    assert (other.address, hardware_address_of(other)) == (gone.address, card)
    assert reaches(one, other, ARRIVES_WITHIN_S)


def hardware_address_of(host: VirtualHost) -> str:
    return host.run("ip", "-brief", "link", "show", "eth0").split()[2]


def test_forwarder_delays_packets_between_hosts() -> None:
    with Forwarder(delay_s=0.1) as forwarder, HostNetwork(["one", "other"], forwarder) as network:
        one, other = network["one"], network["other"]
        with other.socket() as listener, one.socket() as client:
            listener.bind((other.address, PORT))
            listener.listen()
            begun_s = time.monotonic()
            client.connect((other.address, PORT))
            assert time.monotonic() - begun_s >= 0.2, "a round trip"
        network.disconnect("one")
        assert not reaches(one, other)
        network.reconnect("one")
        assert reaches(one, other, ARRIVES_WITHIN_S)
        gone = network.vanish("other")
        assert reaches(one, network.add("again", gone.address), ARRIVES_WITHIN_S)


LEAVES = """
import os, subprocess
from rollmesh.testing.network import HostNetwork
network = HostNetwork(["one"])
process = network["one"].start(["sleep", "1000"], stdout=subprocess.DEVNULL)
print(network["one"].namespace, process.pid, flush=True)
os.kill(os.getpid(), 9)
"""


def test_what_a_killed_process_left_is_removed() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LEAVES], stdout=subprocess.PIPE, text=True, check=False
    )
    assert done.returncode == -signal.SIGKILL
    namespace, pid = done.stdout.split()
    assert (NAMESPACES / namespace).exists()
    sleeper = psutil.Process(int(pid))
    remove_stale()
    assert not (NAMESPACES / namespace).exists()
    assert psutil.wait_procs([sleeper], ARRIVES_WITHIN_S)[1] == []
