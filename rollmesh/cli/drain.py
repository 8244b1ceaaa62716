"""`rollmesh drain WORKER [RUN_FOLDER | --router ADDRESS]`: end a worker once its rollouts are done.

It succeeds only when the router has agreed; launch does not start a drained worker again.
"""

import time
from pathlib import Path

from rollmesh.cli.options import add_run, parser
from rollmesh.cli.router_call import ask, facing, router_address
from rollmesh.cli.run_folder import run_folder
from rollmesh.cli.standing import of_folder
from rollmesh.core.errors import UserError
from rollmesh.core.process import OK
from rollmesh.core.run_state import ENDED
from rollmesh.launch.folder import read_addresses
from rollmesh.wire.key_search import has_keys
from rollmesh.wire.messages import AddressesAnswered, AskAddresses, AskDrain, DrainAnswered


def main(argv: list[str]) -> int:
    """Ask the router to drain the worker; return when it has agreed."""
    arguments = parser("drain", "Let a worker finish what it runs; then its process ends.")
    arguments.add_argument("worker", help="its name; `rollmesh status` lists them")
    where = arguments.add_mutually_exclusive_group()
    where.add_argument("run_folder", type=Path, nargs="?", help="the newest in runs/ if left out")
    where.add_argument(
        "--router", metavar="ADDRESS", help="of the router: tcp://host:port or http://host:port"
    )
    add_run(arguments)
    options = arguments.parse_args(argv)
    run = options.run
    if options.router:
        router = router_address(options.router)
    else:
        folder = run_folder(options.run_folder or run)
        router, run = router_of(folder), run or (folder if has_keys(folder) else None)
    reason = "asked for by `rollmesh drain`"
    answer = ask(router, AskDrain(1, options.worker, reason), DrainAnswered, run)
    if not answer.ok:
        raise UserError(answer.error)
    addresses = ask(router, AskAddresses(2), AddressesAnswered, run)
    print(f"{options.worker} takes nothing new; its process ends when what it runs is done")
    print(f"router: {router}, status {facing(addresses.status_url, router)}")
    return OK


def router_of(folder: Path) -> str:
    """The router's address; UserError if the run is over, or has no router yet."""
    standing = of_folder(folder, time.time())
    if standing.run and standing.run.phase in ENDED:
        raise UserError(f"{folder}: the run has ended, and its workers with it")
    ready = read_addresses(folder).get("router")
    if ready is None:
        raise UserError(f"{folder}: its router does not serve yet; try again in a moment")
    return ready.address
