"""`rollmesh healthy ADDRESS`: check whether the process that listens there serves.

- One request, one answer within the time limit: exit code 0, or 1 and a line with the reason. An
  open port is not enough; the process itself must have answered.
- For health checks of Docker (which sets ROLLMESH_HEALTH), Kubernetes and scripts, so it imports
  little.

    http://host:port/path   answers 2xx
    tcp://host:port         sends the ZMTP 3 greeting (rfc.zeromq.org/spec/23)
"""

import http.client
import os
import socket
from urllib.parse import SplitResult, urlsplit

from rollmesh.cli.options import parser
from rollmesh.core.errors import AddressError
from rollmesh.core.process import FAILED, OK

HEALTH_VARIABLE = "ROLLMESH_HEALTH"
TIMEOUT_S = 3.0
GREETING = b"\xff"
"""The first byte that a ZMTP peer sends, without being asked."""


def main(argv: list[str]) -> int:
    """Check the address and return the exit code; AddressError without an address."""
    arguments = parser("healthy", "Exit with 0 if the process at ADDRESS serves.")
    arguments.add_argument(
        "address",
        nargs="?",
        default=os.environ.get(HEALTH_VARIABLE, ""),
        help=f"http://host:port/path or tcp://host:port (default: {HEALTH_VARIABLE})",
    )
    address = str(arguments.parse_args(argv).address)
    why = fault(split(address))
    if why:
        print(f"{address}: {why}")
    return FAILED if why else OK


def split(address: str) -> SplitResult:
    """Split the address; AddressError if it has another form."""
    parts = urlsplit(address)
    if parts.scheme not in ("http", "tcp") or not parts.hostname or not parts.port:
        raise AddressError(
            f"{address or 'no address'}: name one, or set {HEALTH_VARIABLE}: "
            "http://host:port/path or tcp://host:port"
        )
    return parts


def fault(parts: SplitResult) -> str:
    """Return what is wrong there; '' if it serves."""
    ask = http_fault if parts.scheme == "http" else tcp_fault
    try:
        return ask(parts.hostname or "", parts.port or 0, parts.path)
    except (OSError, http.client.HTTPException) as error:
        return " ".join(str(error).split()) or type(error).__name__


def http_fault(host: str, port: int, path: str) -> str:
    """Check a process that speaks HTTP."""
    connection = http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", path or "/")
        answer = connection.getresponse()
        return "" if 200 <= answer.status < 300 else f"returned status {answer.status}"
    finally:
        connection.close()


def tcp_fault(host: str, port: int, _path: str) -> str:
    """Check a process that speaks ZMTP."""
    with socket.create_connection((host, port), TIMEOUT_S) as connection:
        return "" if connection.recv(1) == GREETING else "sent no ZMTP greeting"
