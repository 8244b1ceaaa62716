"""`rollmesh drain WORKER [RUN_FOLDER | --router ADDRESS]`: it finishes what it runs, and leaves.

Invariant: it says yes only when the router has said so; launch does not start a drained worker
again. Driven by people, before they take a machine away.
"""

import time
from pathlib import Path

from rollmesh.cli.options import parser
from rollmesh.cli.run_folder import run_folder
from rollmesh.cli.standing import of_folder
from rollmesh.core.errors import AddressError, UserError
from rollmesh.core.ids import new_id
from rollmesh.core.process import OK
from rollmesh.core.run_state import ENDED
from rollmesh.launch.folder import read_addresses
from rollmesh.wire.frames import Packet
from rollmesh.wire.keys import check_dial, read_keys
from rollmesh.wire.messages import AskDrain, DrainAnswered
from rollmesh.wire.sockets import Dialer, wait

ANSWER_S = 3.0
SAY_AGAIN_S = 0.5


def main(argv: list[str]) -> int:
    """Ask for it; returns when the router has agreed."""
    arguments = parser("drain", "Let a worker finish what it runs; then its process ends.")
    arguments.add_argument("worker", help="its name; `rollmesh status` lists them")
    where = arguments.add_mutually_exclusive_group()
    where.add_argument("run_folder", type=Path, nargs="?", help="the newest in runs/ if left out")
    where.add_argument("--router", metavar="ADDRESS", help="tcp://host:port of the router")
    options = arguments.parse_args(argv)
    router = options.router or router_of(run_folder(options.run_folder))
    answer = ask(router, AskDrain(1, options.worker, "asked for by `rollmesh drain`"))
    if not answer.ok:
        raise UserError(answer.error)
    print(f"{options.worker} takes nothing new; its process ends when what it runs is done")
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


def ask(router: str, message: AskDrain) -> DrainAnswered:
    """The router's answer; AddressError if there is none in time."""
    keys = read_keys()
    check_dial(router, keys)
    dialer = Dialer(router, new_id("drain"), keys)
    try:
        end_s = time.monotonic() + ANSWER_S
        while time.monotonic() < end_s:
            dialer.send(Packet(message))
            wait([dialer], None, SAY_AGAIN_S)
            for packet in dialer.receive():
                if isinstance(packet.message, DrainAnswered):
                    return packet.message
    finally:
        dialer.close()
    raise AddressError(
        f"{router}: no router answers there within {ANSWER_S:g} s; "
        "are its address and our keys right?"
    )
