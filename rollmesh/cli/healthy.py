"""`rollmesh healthy ADDRESS`: whether the process that listens there serves.

Invariant: one question, one answer within the time: exit code 0, or 1 and a line that says why; an
open port is not enough, the process itself must have answered. Driven by health checks: Docker's,
which find the address in ROLLMESH_HEALTH, Kubernetes's, a script's.

    http://host:port/path   answers 2xx
    tcp://host:port         greets as ZMTP 3 does (rfc.zeromq.org/spec/23), as zmq's thread sends it
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
"""The first byte that a ZMTP peer sends, asked or not."""


def main(argv: list[str]) -> int:
    """Ask; the exit code. AddressError if there is nothing to ask."""
    arguments = parser("healthy", "Exit with 0 if the process that listens at ADDRESS serves.")
    arguments.add_argument(
        "address",
        nargs="?",
        default=os.environ.get(HEALTH_VARIABLE, ""),
        help=f"http://host:port/path or tcp://host:port; {HEALTH_VARIABLE} if left out",
    )
    address = str(arguments.parse_args(argv).address)
    why = fault(split(address))
    if why:
        print(f"{address}: {why}")
    return FAILED if why else OK


def split(address: str) -> SplitResult:
    """The address in its parts; AddressError if it is none of ours."""
    parts = urlsplit(address)
    if parts.scheme not in ("http", "tcp") or not parts.hostname or not parts.port:
        raise AddressError(
            f"{address or 'no address'}: name one, or set {HEALTH_VARIABLE}: "
            "http://host:port/path or tcp://host:port"
        )
    return parts


def fault(parts: SplitResult) -> str:
    """What is wrong there; '' if nothing is."""
    ask = http_fault if parts.scheme == "http" else tcp_fault
    try:
        return ask(parts.hostname or "", parts.port or 0, parts.path)
    except (OSError, http.client.HTTPException) as error:
        return " ".join(str(error).split()) or type(error).__name__


def http_fault(host: str, port: int, path: str) -> str:
    """Of a process that speaks HTTP."""
    connection = http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", path or "/")
        answer = connection.getresponse()
        return "" if 200 <= answer.status < 300 else f"answers {answer.status}"
    finally:
        connection.close()


def tcp_fault(host: str, port: int, _path: str) -> str:
    """Of a process that speaks ZMTP."""
    with socket.create_connection((host, port), TIMEOUT_S) as connection:
        return "" if connection.recv(1) == GREETING else "does not greet as zmq does"
