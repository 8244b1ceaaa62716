"""A child of a supervisor that behaves as a test specifies.

It follows the protocol of core/process.py, and writes its role to a FIFO after its Ready report, so
that tests need not poll.
"""

import argparse
import os
import resource
import signal
import socket
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

from rollmesh.core.process import (
    Ready,
    announce,
    attach_to_launcher,
    http_address,
    listen,
    wait_for_go,
)


def serves(_: argparse.Namespace) -> None:
    """Run until stopped."""


def done(_: argparse.Namespace) -> None:
    sys.exit(0)


def fails(_: argparse.Namespace) -> None:
    sys.exit("ValueError: it broke")


def exceeds_memory(_: argparse.Namespace) -> None:
    """Allocate more memory than its limit allows."""
    resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))
    bytearray(2**31)


def ignores_stop(options: argparse.Namespace) -> None:
    """Acknowledge the stop signal and continue."""
    signal.signal(signal.SIGTERM, lambda *_: mark(options, f"{options.role} got SIGTERM"))


def busy(_: argparse.Namespace) -> None:
    """Compute until stopped, as a long train step does."""
    while True:
        sum(range(10_000))


def saves(options: argparse.Namespace) -> None:
    """Write a file when stopped."""

    def save(*_: object) -> None:
        options.path.write_text("saved")
        sys.exit(0)

    signal.signal(signal.SIGTERM, save)


def starts_daemon(options: argparse.Namespace) -> None:
    """Start a daemon, as tmux does: it leaves its group, its session and its parent."""
    code = (
        "import os, signal as s; os.fork() and os._exit(0); os.setsid(); os.fork() and os._exit(0)"
    )
    code += "; print(os.getpid(), flush=True); s.signal(s.SIGHUP, s.SIG_IGN); s.pause()"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as child:
        assert child.stdout
        options.path.write_bytes(child.stdout.readline())


def parent(options: argparse.Namespace) -> None:
    """Start a process that leaves its session, has no mark and ignores SIGTERM."""
    code = "import signal as s; s.signal(s.SIGTERM, s.SIG_IGN); print(flush=True); s.pause()"
    child = subprocess.Popen(
        [sys.executable, "-c", code], env={}, start_new_session=True, stdout=subprocess.PIPE
    )
    assert child.stdout
    child.stdout.readline()
    options.path.write_text(str(child.pid))


class Answer(BaseHTTPRequestHandler):
    """A minimal implementation of the router's /status."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"workers": [], "num_done": 3}')

    def log_message(self, *_: object) -> None:
        """Log nothing."""


def run(options: argparse.Namespace) -> None:
    """Behave as specified, report, and wait for the end."""
    if options.behaviour == "mistaken":
        sys.stderr.write("noise\nrollmesh: the key is wrong; correct it\n")
        sys.exit(2)
    address = ""
    if options.listen_fd is not None:
        listening = listen("", options.listen_fd)
        address = http_address(listening)
    behave = {
        "serves": serves,
        "ignores_stop": ignores_stop,
        "saves": saves,
        "parent": parent,
        "starts_daemon": starts_daemon,
    }
    behave.get(options.behaviour, serves)(options)
    if options.bind:
        mark(options, options.bind)
    announce(options.ready_fd, Ready(options.role, os.getpid(), address, address))
    mark(options, options.role)
    then = {"done": done, "fails": fails, "exceeds_memory": exceeds_memory, "busy": busy}
    then.get(options.behaviour, serves)(options)
    if options.listen_fd is not None:
        serve(listening)
    while True:
        signal.pause()


def mark(options: argparse.Namespace, line: str) -> None:
    """Write a line to the test's FIFO."""
    with open(options.fifo, "w") as fifo:
        fifo.write(f"{line}\n")


def serve(listening: socket.socket) -> None:
    """Answer requests on the inherited socket."""
    server = HTTPServer(("", 0), Answer, bind_and_activate=False)
    server.socket = listening
    server.serve_forever()


if __name__ == "__main__":
    attach_to_launcher()
    parser = argparse.ArgumentParser()
    parser.add_argument("--bind")
    for name in ("fifo", "role", "behaviour", "path"):
        parser.add_argument(name, type=Path if name == "path" else str)
    parser.add_argument("--ready-fd", type=int)
    parser.add_argument("--listen-fd", type=int)
    parser.add_argument("--go-fd", type=int)
    given = parser.parse_args()
    wait_for_go(given.go_fd)
    run(given)
