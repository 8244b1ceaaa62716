"""The dashboard's process: one page over one run folder.

Owns the listening socket and the polling task. Invariants: it serves loopback only, since the page
has no login; the first SIGTERM or SIGINT ends it within a second. Driven by `rollmesh dashboard`,
by hand or by launch, which hands it a listening descriptor and waits for its report.
"""

import argparse
import asyncio
import os
from collections.abc import Callable
from pathlib import Path

from aiohttp import web

from rollmesh.core.clock import SystemClock
from rollmesh.core.errors import AddressError
from rollmesh.core.process import Ready, announce, http_address, listen, stop_event
from rollmesh.dashboard.pages import Pages
from rollmesh.dashboard.reader import RunReader

POLL_S = 0.5
LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})


class Options(argparse.Namespace):
    """The command line."""

    run_folder: Path | None
    """None lists the runs; `run` needs one."""
    host: str
    port: int
    listen_fd: int | None
    ready_fd: int | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command line to `parser`."""
    parser.add_argument(
        "run_folder",
        type=Path,
        nargs="?",
        help="folder of a running or finished run; left out, the runs in runs/ are listed",
    )
    parser.add_argument("--host", default="127.0.0.1", help="a loopback address (%(default)s)")
    parser.add_argument("--port", type=int, default=8265, help="0 picks a free one (%(default)s)")
    parser.add_argument("--listen-fd", type=int, help="serve on this inherited socket")
    parser.add_argument("--ready-fd", type=int, help="report here when serving")


def run(options: Options, folder: Path, say: Callable[[str], None]) -> None:
    """Serve the page of `folder` until a signal, and `say` where; AddressError if it cannot."""
    if options.listen_fd is None and options.host not in LOOPBACK:
        raise AddressError(
            f"{options.host}: the page has no login and is served on loopback only; "
            f"keep --host 127.0.0.1 and reach it through `ssh -L {options.port}:127.0.0.1:"
            f"{options.port}`"
        )
    asyncio.run(serve(options, folder, say))


async def serve(options: Options, folder: Path, say: Callable[[str], None]) -> None:
    """Listen, report, follow the folder; returns after the first SIGTERM or SIGINT."""
    stop = stop_event(asyncio.get_running_loop())
    clock = SystemClock()
    pages = Pages(RunReader(folder), clock)
    runner = web.AppRunner(pages.app(), access_log=None, shutdown_timeout=0.5)
    await runner.setup()
    listening = listen(f"{options.host}:{options.port}", options.listen_fd)
    await web.SockSite(runner, listening).start()
    async with asyncio.TaskGroup() as tasks:
        following = tasks.create_task(pages.follow(POLL_S), name="follow")
        address = http_address(listening)
        announce(options.ready_fd, Ready("dashboard", os.getpid(), address))
        say(f"{address} shows {folder}; Ctrl-C ends it")
        await stop.wait()
        following.cancel()
    pages.feed.close()
    await runner.cleanup()
