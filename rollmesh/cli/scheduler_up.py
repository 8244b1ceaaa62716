"""`rollmesh scheduler up`: the service and admission on this machine, kept alive, all let in.

    a child   STARTING --reports--> SERVING --dies--> STARTING, after a moment
              STARTING --ends--> all end, with its last line; one that has served starts again

Owns the two processes. Invariants: each is a process of its own, and the death of one is nothing
to the other; pipelines that the file names are registered and admitted when both serve for the
first time, and not again; both end with us. Driven by people: who wants other supervision starts
`serve` and `admission` by themselves.
"""

import os
import select
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from rollmesh.cli.options import add_no_keys, parser
from rollmesh.cli.scheduler_verbs import enrol
from rollmesh.core.errors import ConfigError, UserError
from rollmesh.core.process import LAUNCHER_VARIABLE, OK, Ready, Stop
from rollmesh.core.share import FLEET_FILE, KEYS
from rollmesh.scheduler.admission.fleet_file import read_fleet
from rollmesh.wire.keys import (
    KEYS_VARIABLE,
    SCHEDULER_KEYS_VARIABLE,
    new_keys,
    use_scheduler_keys,
)

AGAIN_S = 0.5
START_S = 60.0
STOP_S = 10.0
LOOK_S = 0.2


class Child:
    """One of the two."""

    def __init__(self, verb: str, fleet: Path) -> None:
        self.verb = verb
        self._argv = [sys.executable, "-m", "rollmesh.cli.main", "scheduler", verb, str(fleet)]
        self._process: subprocess.Popen[bytes] | None = None
        self._again_s = 0.0

    def start(self) -> Ready:
        """Returns when it serves; UserError where it ends instead, having said why."""
        reading, writing = os.pipe()
        with os.fdopen(reading, "rb") as pipe:
            self._process = subprocess.Popen(
                [*self._argv, "--ready-fd", str(writing)],
                pass_fds=[writing],
                env={**os.environ, LAUNCHER_VARIABLE: str(os.getpid())},
                start_new_session=True,  # the terminal's Ctrl-C is ours, and it is told by us
            )
            os.close(writing)
            heard, _, _ = select.select([pipe], [], [], START_S)
            line = pipe.readline() if heard else b""
        if not line:
            self.stop()
            raise UserError(f"{self.verb} did not come to serve; what it says stands above")
        return msgspec.json.decode(line, type=Ready)

    def tend(self) -> None:
        """Start it again where it has died."""
        assert self._process is not None
        if self._process.poll() is None or time.monotonic() < self._again_s:
            return
        print(f"{self.verb} ended with code {self._process.returncode}; it is started again")
        try:
            self.start()
        except UserError as error:  # it has served before: it may again
            print(error)
        self._again_s = time.monotonic() + AGAIN_S

    def stop(self) -> None:
        """Tell it to end, and see that it does."""
        if self._process is None or self._process.poll() is not None:
            return
        self._process.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def use_keys(folder: Path, *, has_keys: bool) -> None:
    """Make the fleet's keys where there are none; ConfigError if it has keys and may have none."""
    if os.environ.get(KEYS_VARIABLE) or SCHEDULER_KEYS_VARIABLE in os.environ:
        return
    if not has_keys and folder.exists():
        raise ConfigError(f"--no-keys: the fleet has keys; remove {folder} to do without")
    if has_keys:
        if not folder.exists():
            folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            new_keys(folder)
        use_scheduler_keys(folder)


def main(argv: list[str]) -> int:
    """Start both, let all in, and keep both until stopped."""
    arguments = parser("scheduler up", "Start the service and admission, and let all pipelines in.")
    arguments.add_argument("fleet", type=Path, nargs="?", default=Path(FLEET_FILE))
    add_no_keys(arguments)
    options = arguments.parse_args(argv)
    path: Path = options.fleet
    fleet = read_fleet(path)
    use_keys(Path(fleet.journal) / KEYS, has_keys=options.has_keys)
    stop = Stop()  # both die with us
    children = [Child("serve", path), Child("admission", path)]
    try:
        service, admission = [each.start() for each in children]
        enrol(fleet, (), admission.address, admits=True)
        print(f"serves at {service.address}, {service.http_address}/status", flush=True)
        while not stop.is_asked:
            time.sleep(LOOK_S)
            for child in children:
                child.tend()
    finally:
        for child in reversed(children):
            child.stop()
    return OK
