"""Network namespaces as hosts with addresses of their own, and faults of the network between them.

    router     engine     worker-1    each a namespace with one device, `eth0`
      |          |           |
      +------ switch --------+        a bridge in a namespace of its own, or a `Forwarder`

- Root, iproute2 and iptables are needed. Nothing outside the namespaces changes, so every network
  may use the same subnet.
- Names contain the process that made them and its start time. The next network removes what a
  killed process left, the processes in it included.
- Packets that are lost are dropped where they arrive: neither end gets an error.
"""

import contextlib
import ctypes
import ipaddress
import itertools
import os
import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

from rollmesh.testing.forwarder import MTU_BYTES, Forwarder, open_tun

SUBNET = "10.77.0.0/24"
DEVICE = "eth0"
PROGRAMS = ("ip", "iptables", "nsenter")
NAMESPACES = Path("/run/netns")
END_WITHIN_S = 30.0
_CLONE_NEWNET = 0x40000000
_NAME = re.compile(r"rollmesh-(?P<pid>\d+)-(?P<start>\d+)-.+")
_numbers = itertools.count()


def why_no_network() -> str:
    """Return why this process can make no network; '' if it can."""
    if os.geteuid() != 0:
        return "only root can make network namespaces"
    missing = [each for each in PROGRAMS if shutil.which(each) is None]
    if missing:
        return f"{missing[0]} is not installed"
    if not Path("/dev/net/tun").exists():
        return "no /dev/net/tun here"
    try:
        with HostNetwork(["probe"]) as network:
            network["probe"].lose(1.0)
    except subprocess.CalledProcessError as error:
        return f"no network namespaces here: {error.stderr.strip()}"
    return ""


class VirtualHost:
    """A network namespace with one address."""

    def __init__(self, name: str, address: str, namespace: str) -> None:
        self.name = name
        self.address = address
        self.namespace = namespace
        self.prefix = ("nsenter", f"--net={NAMESPACES / namespace}")
        """Words before a command that run it on this host. Unlike `ip netns exec`, they leave /sys
        and with it the control groups in place."""

    def start(self, argv: Sequence[str], **options: Any) -> "subprocess.Popen[bytes]":
        """Start a process on this host; options as for Popen."""
        return subprocess.Popen([*self.prefix, *argv], **options)

    def run(self, *argv: str) -> str:
        """Run a command on this host; return its output. CalledProcessError if it fails."""
        return _run(*self.prefix, *argv)

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function in a thread that is on this host, and return its result: sockets that it
        opens belong to this host, whichever thread uses them later."""

        def enter() -> Any:
            with open(NAMESPACES / self.namespace, "rb") as namespace:
                _enter(namespace.fileno())
            return function(*args)

        with ThreadPoolExecutor(1) as thread:
            return thread.submit(enter).result()

    def socket(self, kind: socket.SocketKind = socket.SOCK_STREAM) -> socket.socket:
        """Return a new socket of this host."""
        opened: socket.socket = self.call(socket.socket, socket.AF_INET, kind)
        return opened

    def lose(self, share: float) -> None:
        """Drop this share of the packets that arrive, at random."""
        odds = ("-m", "statistic", "--mode", "random", "--probability", f"{share}")
        self._iptables("-A", "INPUT", "-i", DEVICE, *odds, "-j", "DROP")

    def drop_from(self, sender: "VirtualHost | None" = None) -> None:
        """Drop all packets that arrive from `sender`, or from all hosts: loss in one direction."""
        source = ("-s", sender.address) if sender else ()
        self._iptables("-A", "INPUT", "-i", DEVICE, *source, "-j", "DROP")

    def drop_none(self) -> None:
        """Undo `lose` and `drop_from`."""
        self._iptables("-F", "INPUT")

    def pids(self) -> list[int]:
        """Return the processes on this host."""
        return [int(word) for word in _run("ip", "netns", "pids", self.namespace).split()]

    def _iptables(self, *words: str) -> None:
        self.run("iptables", "-w", *words)


class HostNetwork:
    """Hosts that reach each other; a context that removes them at its end."""

    def __init__(
        self, names: Iterable[str], forwarder: Forwarder | None = None, subnet: str = SUBNET
    ) -> None:
        """With a `forwarder`, packets between hosts take its delay and loss; otherwise a bridge
        carries them."""
        remove_stale()
        network = ipaddress.ip_network(subnet)
        self._prefix_bits = network.prefixlen
        self._addresses = (str(each) for each in network.hosts())
        self._name = f"rollmesh-{os.getpid()}-{_start_of(os.getpid())}-{next(_numbers)}"
        self._namespaces = itertools.count()
        self._switch = f"{self._name}-switch"
        self._forwarder = forwarder
        self.hosts: dict[str, VirtualHost] = {}
        try:
            if forwarder is None:
                self._make_switch()
            for name in names:
                self.add(name)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getitem__(self, name: str) -> VirtualHost:
        return self.hosts[name]

    def add(self, name: str, address: str = "") -> VirtualHost:
        """Add a host (default: with the next free address)."""
        host = VirtualHost(
            name,
            address or next(self._addresses),
            f"{self._name}-{next(self._namespaces)}-{name}",
        )
        _run("ip", "netns", "add", host.namespace)
        self.hosts[name] = host
        if self._forwarder:
            self._forwarder.attach(host.address, host.call(open_tun, DEVICE))
            _ip(host.namespace, "link", "set", DEVICE, "mtu", str(MTU_BYTES))
        else:
            hardware = ("address", hardware_address(host.address))
            end = ("peer", "name", DEVICE, *hardware, "netns", host.namespace)
            port = _port_of(host)
            _ip(self._switch, "link", "add", port, "type", "veth", *end)
            _ip(self._switch, "link", "set", port, "master", "switch", "up")
        _ip(host.namespace, "link", "set", "lo", "up")
        _ip(host.namespace, "addr", "add", f"{host.address}/{self._prefix_bits}", "dev", DEVICE)
        _ip(host.namespace, "link", "set", DEVICE, "up")
        return host

    def disconnect(self, name: str) -> None:
        """Cut a host off from all others, as a pulled cable does."""
        self._set_port(name, up=False)

    def reconnect(self, name: str) -> None:
        """Undo `disconnect`."""
        self._set_port(name, up=True)

    def cut(self, one: str, other: str) -> None:
        """Drop all packets between two hosts; both still reach the others."""
        self.hosts[one].drop_from(self.hosts[other])
        self.hosts[other].drop_from(self.hosts[one])

    def heal(self) -> None:
        """Undo every cut, loss and disconnection."""
        for host in self.hosts.values():
            host.drop_none()
            self.reconnect(host.name)

    def vanish(self, name: str) -> VirtualHost:
        """Remove a host as a power failure does: its processes die and no packet announces it.
        `add` with its address starts another in its place."""
        host = self.hosts.pop(name)
        if self._forwarder:
            self._forwarder.detach(host.address)
        else:
            _ip(self._switch, "link", "delete", _port_of(host))
        _remove(host.namespace)
        return host

    def close(self) -> None:
        """End all processes of the hosts and remove the hosts. Idempotent."""
        for name in list(self.hosts):
            self.vanish(name)
        if self._switch in _names():
            _remove(self._switch)

    def _make_switch(self) -> None:
        _run("ip", "netns", "add", self._switch)
        _ip(self._switch, "link", "add", "switch", "type", "bridge", "forward_delay", "0")
        _ip(self._switch, "link", "set", "switch", "up")

    def _set_port(self, name: str, *, up: bool) -> None:
        host = self.hosts[name]
        if self._forwarder:
            self._forwarder.set_link(host.address, up=up)
        else:
            _ip(self._switch, "link", "set", _port_of(host), "up" if up else "down")


def hardware_address(address: str) -> str:
    """Return the hardware address of the host with this IP address.

    A successor has the same one. With another, the other hosts would send to the old device for up
    to a minute, because a namespace does not announce its address by ARP as real hosts do.
    """
    return ":".join(f"{byte:02x}" for byte in (2, 0, *ipaddress.IPv4Address(address).packed))


def remove_stale() -> None:
    """Remove the hosts of processes that ended without doing so, and what runs on them."""
    for name in _names():
        found = _NAME.fullmatch(name)
        if found and _start_of(int(found["pid"])) != found["start"]:
            with contextlib.suppress(subprocess.CalledProcessError):  # another process removes it
                _remove(name)


def _remove(namespace: str) -> None:
    """Kill the processes of a namespace and remove it."""
    pids = [int(word) for word in _run("ip", "netns", "pids", namespace).split()]
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    _run("ip", "netns", "delete", namespace)


def _names() -> list[str]:
    return [each.name for each in NAMESPACES.iterdir()] if NAMESPACES.is_dir() else []


def _start_of(pid: int) -> str:
    """Return the start time of a process in clock ticks; '' if there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return ""
    return fields[19]


def _port_of(host: VirtualHost) -> str:
    """Return the name of a host's device in the switch; names have at most 15 characters."""
    return f"to-{host.namespace.split('-')[4]}"


def _ip(namespace: str, *words: str) -> None:
    _run("ip", "-n", namespace, *words)


def _run(*argv: str) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=END_WITHIN_S)
    if done.returncode:
        raise subprocess.CalledProcessError(done.returncode, argv, done.stdout, done.stderr)
    return done.stdout


def _enter(namespace: int) -> None:
    """Move this thread into a network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, _CLONE_NEWNET):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
