"""A process that has loaded torch and, for each line that it reads, forks a trainer.

Its arguments are the settings and the router. It prints the child's pid, then its exit code. The
child is an ordinary trainer that starts quickly.
"""

import os
import sys
from pathlib import Path

from rollmesh.core.config import Config, load_config
from rollmesh.core.errors import UserError
from rollmesh.core.process import FAILED, USAGE
from rollmesh.trainer.process import run


def train(config: Config, router: str) -> int:
    """Run one trainer; return its exit code."""
    try:
        return run(config, router, None)
    except UserError as error:
        sys.stderr.write(f"rollmesh: {error}\n")
        return USAGE
    except BaseException as error:  # noqa: BLE001 - door: what ends a trainer is for the test
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return FAILED


def main() -> None:
    config, router = load_config(Path(sys.argv[1])), sys.argv[2]
    for _ in sys.stdin:
        pid = os.fork()
        if not pid:
            os._exit(train(config, router))
        report(pid)
        report(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def report(number: int) -> None:
    sys.stdout.write(f"{number}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
