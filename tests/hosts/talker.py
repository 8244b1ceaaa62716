"""Processes for test_connections.py, which each run on a host of their own.

hub ADDRESS         prints a line for each message
dialer ADDRESS      sends a message ten times a second
fetcher URL         fetches the URL again and again, and prints a line for each answer
"""

import asyncio
import sys
import threading

from rollmesh.core.errors import EngineUnavailable
from rollmesh.engine.http import HttpClient, target
from rollmesh.wire.frames import Packet
from rollmesh.wire.keys import read_keys
from rollmesh.wire.messages import ClientLeft
from rollmesh.wire.sockets import Dialer, Hub, wait

INTERVAL_S = 0.1
NEVER_S = 1000.0


def report(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def run_hub(address: str) -> None:
    hub = Hub(address, read_keys())
    while True:
        wait([hub], None, NEVER_S)
        for _ in hub.receive():
            report("received")


def run_dialer(address: str) -> None:
    dialer = Dialer(address, "dialer", read_keys())
    pause = threading.Event()
    while not pause.wait(INTERVAL_S):
        dialer.send(Packet(ClientLeft("one")))


async def run_fetcher(url: str) -> None:
    pause = threading.Event()
    async with HttpClient() as http:
        while True:
            try:
                await http.fetch(target("GET", url), timeout_s=NEVER_S)
                report("fetched")
            except EngineUnavailable as error:
                report(f"failed: {error}")
            await asyncio.to_thread(pause.wait, INTERVAL_S)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["hub", address]:
            run_hub(address)
        case ["dialer", address]:
            run_dialer(address)
        case ["fetcher", url]:
            asyncio.run(run_fetcher(url))
