"""`rollmesh status [RUN_FOLDER | --router ADDRESS]`: show the state of a run or of a router's mesh.

It only reads: the files of the run, or the router's status.
"""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from rollmesh.cli.options import add_run, parser
from rollmesh.cli.run_folder import run_folder
from rollmesh.cli.standing import Standing, of_folder, of_router
from rollmesh.cli.tables import paint
from rollmesh.core.errors import UserError
from rollmesh.core.process import OK
from rollmesh.launch.screen import Terminal, ignore_closed_output

LOOK_S = 1.0
PIPE_WIDTH = 200
"""Where stdout is no terminal, lines are cut for no one."""

Look = Callable[[], Standing]


def main(argv: list[str]) -> int:
    """Tell it, once or until Ctrl-C."""
    arguments = parser("status", "Show a run: its progress, workers, queue and engines.")
    where = arguments.add_mutually_exclusive_group()
    where.add_argument("run_folder", type=Path, nargs="?", help="the newest in runs/ if left out")
    where.add_argument(
        "--router", metavar="ADDRESS", help="of a router: tcp://host:port or http://host:port"
    )
    add_run(arguments)
    arguments.add_argument("--watch", action="store_true", help="again each second, until Ctrl-C")
    arguments.add_argument("--json", dest="is_json", action="store_true", help="one JSON line")
    options = arguments.parse_args(argv)
    look = looker(options.run_folder, options.router, options.run)
    with ignore_closed_output():
        if options.is_json:
            tell_json(look, options.watch)
        else:
            tell(look, options.watch)
    return OK


def looker(folder: Path | None, router: str | None, run: Path | None = None) -> Look:
    """What takes a look each time it is called; UserError where there is nothing to look at."""
    if router:
        return lambda: of_router(router, time.time(), run)
    chosen = run_folder(folder or run)
    return lambda: of_folder(chosen, time.time())


def tell_json(look: Look, is_watched: bool) -> None:
    """A line per look."""
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            print(msgspec.json.encode(look()).decode(), flush=True)
            if not is_watched:
                return
            time.sleep(LOOK_S)


def tell(look: Look, is_watched: bool) -> None:
    """The tables; watched, they are painted in place, and a router that is away is waited for."""
    width = None if sys.stdout.isatty() else PIPE_WIDTH
    console = Terminal(highlight=False, width=width)
    scene: RenderableType = paint(look())
    if not is_watched:
        console.print(scene)
        return
    with contextlib.suppress(KeyboardInterrupt), shower(console) as show:
        while True:
            show(scene)
            time.sleep(LOOK_S)
            try:
                scene = paint(look())
            except UserError as error:
                scene = Text(str(error), style="yellow")


@contextlib.contextmanager
def shower(console: Console) -> Iterator[Callable[[RenderableType], None]]:
    """What shows a scene: over the last one on a terminal, else below it."""
    if not console.is_terminal:
        yield console.print
        return
    with Live(console=console, auto_refresh=False) as live:
        yield lambda scene: live.update(scene, refresh=True)
